// SPDX-License-Identifier: GPL-2.0

//! Dispatch of packets to the endpoints of VQPs.
//!
//! # Operation
//!
//! A packet for which no endpoint exists is rejected with an update to its sender. Views do not reach all
//! nodes at the same time. So packets of nodes outside the view are stored until the next view.
//!
//! # Locking
//!
//! `VqpTable::deferred_packets` is held during the dispatch, so packets are processed in order. Its lock
//! order is in [`crate::vqp::table`].

use crate::vqp::table::{VqpTable, MAX_DEFERRED_PACKETS};
use kernel::{prelude::*, sync::Arc};
use kite_core::{
    view::NodeInstance,
    wire::packet::{Packet, PacketBody, VqpMessage, VqpPhase, WindowUpdate},
};

impl VqpTable {
    /// Processes the stored packets of nodes that the current view has added. The others may be in the next
    /// view.
    pub(crate) fn deliver_deferred(self: &Arc<Self>) {
        self.deliver_from_members(&mut self.deferred_packets.lock());
    }

    /// Processes the stored packets of members, in order.
    fn deliver_from_members(self: &Arc<Self>, deferred: &mut KVec<KVec<u8>>) {
        let is_from_reachable = |bytes: &KVec<u8>| {
            let packet = Packet::decode(bytes);
            packet.is_ok_and(|packet| self.memory_service.cluster.is_reachable(packet.sender))
        };
        while let Some(index) = deferred.iter().position(is_from_reachable) {
            let bytes = deferred.remove(index).unwrap_or_default();
            if let Ok(packet) = Packet::decode(&bytes) {
                self.process_packet(&packet, &bytes);
            }
        }
    }

    /// Processes a received packet. `conn_peer` is the node at the other end of the connection, or `None` for
    /// DC. A packet with another sender than `conn_peer` counts as malformed.
    pub(crate) fn deliver(self: &Arc<Self>, conn_peer: Option<NodeInstance>, bytes: KVec<u8>) {
        let packet = Packet::decode(&bytes).ok();
        let authentic = packet.filter(|packet| conn_peer.is_none_or(|from| packet.sender == from));
        let Some(packet) = authentic else {
            return self.memory_service.stats.malformed_messages.add(1);
        };
        // Held throughout, so packets are processed in order.
        let mut deferred = self.deferred_packets.lock();
        if self.memory_service.cluster.is_reachable(packet.sender) {
            self.deliver_from_members(&mut deferred);
            self.process_packet(&packet, &bytes);
        } else {
            if deferred.len() == MAX_DEFERRED_PACKETS {
                // The oldest packet most likely is of a node that has left.
                drop(deferred.remove(0));
            }
            // Cannot fail: the list has capacity for `MAX_DEFERRED_PACKETS`.
            let _ = deferred.push_within_capacity(bytes);
            self.deliver_from_members(&mut deferred);
        }
    }

    fn process_packet(self: &Arc<Self>, packet: &Packet, bytes: &[u8]) {
        let found = self.state.lock().lookup(packet);
        match (packet.body, found) {
            (PacketBody::WindowUpdate(update), Some(vqp)) => {
                vqp.on_window_update(packet.source_vqp, &update, self.fabric())
            }
            (PacketBody::WindowUpdate(_), None) => {}
            (PacketBody::Message(message), Some(vqp)) => {
                if vqp.on_message(message, bytes) {
                    self.send_update_deferred(&vqp);
                }
            }
            (PacketBody::Message(message), None) => self.on_first_message(packet, message, bytes),
        }
    }

    /// Handles a message to which no endpoint belongs yet: creates an endpoint, or rejects the message.
    fn on_first_message(self: &Arc<Self>, packet: &Packet, message: VqpMessage, bytes: &[u8]) {
        let cluster = &self.memory_service.cluster;
        let Ok(local) = cluster
            .local_node()
            .and_then(|node| cluster.instance_of(node))
        else {
            return;
        };
        let vqpn = self.alloc_vqpn();
        let is_closed = packet.destination_vqp != 0 || self.state.lock().is_in_time_wait(packet);
        let created = match is_closed {
            false => {
                let mut table = self.state.lock();
                // The endpoint of a node that left would never be removed.
                let admission = cluster.admission_of(packet.sender).ok();
                let memcg = table.listener_memcg(message.port);
                admission.zip(memcg).and_then(|(admission, memcg)| {
                    let origin = (local, admission);
                    memcg.with_active(|| table.create_passive(origin, vqpn, packet, &message))
                })
            }
            true => None,
        };
        if let Some(vqp) = created {
            vqp.on_message(message, bytes);
            return;
        }
        // Replies may arrive in any order, so all replies to one source are equal.
        let phase = match is_closed {
            true => VqpPhase::Closed,
            false if self.state.lock().denies(&message) => VqpPhase::Denied,
            false => VqpPhase::Refused,
        };
        let update = WindowUpdate {
            phase,
            credit_limit: 0,
            consumed: 0,
        };
        let reply = Packet {
            sender: local,
            source_vqp: packet.destination_vqp,
            destination_vqp: packet.source_vqp,
            body: PacketBody::WindowUpdate(update),
        };
        self.send_packet_deferred(packet.sender, reply);
    }
}
