// SPDX-License-Identifier: GPL-2.0

//! How packets find the ends of virtual queue pairs that they are for.
//!
//! What nobody wants is answered, so that its sender learns. What comes from a node that is not in our view is kept
//! until the next: views do not come to all at the same time.

use crate::vqp::table::{VqpTable, MAX_DEFERRED_PACKETS};
use kernel::{prelude::*, sync::Arc};
use kite_core::{
    view::NodeInstance,
    wire::packet::{Packet, PacketBody, VqpMessage, VqpPhase, WindowUpdate},
};

impl VqpTable {
    /// The view has changed: what has come from nodes that were not in it before is taken now. Others may be in the next.
    pub(crate) fn deliver_deferred(self: &Arc<Self>) {
        self.deliver_from_members(&mut self.deferred_packets.lock());
    }

    /// Takes what has come from nodes that are in the view by now, in its order.
    fn deliver_from_members(self: &Arc<Self>, deferred: &mut KVec<KVec<u8>>) {
        let is_from_member = |bytes: &KVec<u8>| {
            let packet = Packet::decode(bytes);
            packet.is_ok_and(|packet| self.lmr.cluster.is_member(packet.sender))
        };
        while let Some(index) = deferred.iter().position(is_from_member) {
            let bytes = deferred.remove(index).unwrap_or_default();
            if let Ok(packet) = Packet::decode(&bytes) {
                self.process_packet(&packet, &bytes);
            }
        }
    }

    /// A packet has come, by a connection only from who is at its other end.
    pub(crate) fn deliver(self: &Arc<Self>, conn_peer: Option<NodeInstance>, bytes: KVec<u8>) {
        let packet = Packet::decode(&bytes).ok();
        let authentic = packet.filter(|packet| conn_peer.is_none_or(|from| packet.sender == from));
        let Some(packet) = authentic else {
            return self.lmr.stats.malformed_messages.add(1);
        };
        // Held meanwhile, so that packets are taken in their order.
        let mut deferred = self.deferred_packets.lock();
        if self.lmr.cluster.is_member(packet.sender) {
            self.deliver_from_members(&mut deferred);
            self.process_packet(&packet, &bytes);
        } else {
            if deferred.len() == MAX_DEFERRED_PACKETS {
                // Most likely of one that has left.
                drop(deferred.remove(0));
            }
            let _ = deferred.push_within_capacity(bytes);
            self.deliver_from_members(&mut deferred);
        }
    }

    fn process_packet(self: &Arc<Self>, packet: &Packet, bytes: &[u8]) {
        let found = self.state.lock().lookup(packet);
        match (packet.body, found) {
            (PacketBody::WindowUpdate(update), Some(vqp)) => {
                vqp.on_window_update(packet.source_vqp, &update, self)
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

    /// A message has come that is for nobody yet.
    fn on_first_message(self: &Arc<Self>, packet: &Packet, message: VqpMessage, bytes: &[u8]) {
        let cluster = &self.lmr.cluster;
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
                // Nobody prunes what is made for who has left.
                let is_member = cluster.is_member(packet.sender);
                let memcg = table.listener_memcg(message.port).filter(|_| is_member);
                memcg.and_then(|memcg| {
                    memcg.with_active(|| table.create_passive(local, vqpn, packet, &message))
                })
            }
            true => None,
        };
        if let Some(vqp) = created {
            vqp.on_message(message, bytes);
            return;
        }
        // Answers to several may come in any order, so it is the same for all.
        let phase = match is_closed {
            false => VqpPhase::Refused,
            true => VqpPhase::Closed,
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
