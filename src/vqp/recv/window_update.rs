// SPDX-License-Identifier: GPL-2.0

//! Updates between the endpoints of a VQP: accepted, messages consumed, closed.
//!
//! # Operation
//!
//! A process that has received a message sends the update itself. The poller must not wait for other nodes,
//! so all other updates are sent by workers.
//!
//! # Recovery
//!
//! A failed update is sent again by a worker, for as long as both endpoints exist.
//!
//! # Locking
//!
//! All state is under `Vqp::state`, which is not held while an update is sent.

use crate::{
    fabric::send::one_shot::OneShot,
    sys::deadline::{retry_until, Deadline},
    vqp::{table::VqpTable, Vqp},
};
use kernel::{
    prelude::*,
    sync::Arc,
    time::{delay::fsleep, Delta},
};
use kite_core::{
    view::NodeInstance,
    wire::packet::{Packet, PacketBody, VqpPhase},
};

/// Timeout of one attempt to send an update, and delay before the next attempt, both in milliseconds.
const UPDATE_TIMEOUT_MS: u32 = 3000;
const UPDATE_RETRY_MS: i64 = 500;

/// Maximum time in milliseconds that a process waits for the update after it has received its message.
const INLINE_UPDATE_TIMEOUT_MS: u32 = 100;

impl VqpTable {
    /// Sends a packet to a node, and waits until the packet has arrived.
    ///
    /// # Errors
    ///
    /// See [`crate::cluster::Cluster::resolve_address`] and [`OneShot::send_packet`].
    fn send_packet(&self, peer: NodeInstance, packet: &Packet, deadline: Deadline) -> Result {
        let (bytes, cluster) = (packet.encode(), &self.memory_service.cluster);
        retry_until(deadline, || {
            let address = cluster.resolve_address(peer, deadline)?;
            OneShot::new(&cluster.fabric, (peer, &address), deadline).send_packet(&bytes)
        })
    }

    /// Sends a packet on a worker. The packet is not sent again after a failure. The peer endpoint receives
    /// another reply when it sends its next message.
    pub(in crate::vqp) fn send_packet_deferred(
        self: &Arc<Self>,
        peer: NodeInstance,
        packet: Packet,
    ) {
        let table = self.clone();
        // Without memory the packet counts as not sent.
        let _ = self.defer(move || {
            let deadline = Deadline::after_ms(UPDATE_TIMEOUT_MS);
            // No retry: the number of retries of packets to unresponsive nodes would have no bound.
            let _ = table.send_packet(peer, &packet, deadline);
        });
    }

    /// Sends the state of `vqp` to the peer endpoint, now, or on a worker if that fails.
    pub(in crate::vqp) fn send_update_or_defer(self: &Arc<Self>, vqp: &Arc<Vqp>) {
        if self
            .send_update(vqp, Deadline::after_ms(INLINE_UPDATE_TIMEOUT_MS))
            .is_err()
        {
            self.send_update_deferred(vqp);
        }
    }

    fn send_update(&self, vqp: &Vqp, deadline: Deadline) -> Result {
        let packet = vqp.make_window_update();
        self.send_packet(vqp.peer, &packet, deadline)?;
        vqp.on_update_sent(&packet);
        Ok(())
    }

    /// Sends the state of `vqp` to the peer endpoint on a worker, until it succeeds or one endpoint is gone.
    /// Has no effect if an update is queued already.
    pub(in crate::vqp) fn send_update_deferred(self: &Arc<Self>, vqp: &Arc<Vqp>) {
        if !vqp.try_mark_update_queued() {
            return;
        }
        let (table, owned_vqp) = (self.clone(), vqp.clone());
        let queued = self.updates_wq.try_spawn(GFP_KERNEL, move || {
            // Later changes queue another update.
            owned_vqp.clear_update_queued();
            let deadline = Deadline::after_ms(UPDATE_TIMEOUT_MS);
            if table.send_update(&owned_vqp, deadline).is_err() && owned_vqp.has_live_peer(&table) {
                fsleep(Delta::from_millis(UPDATE_RETRY_MS));
                // Requeued behind all other updates, which may be to nodes that respond.
                table.send_update_deferred(&owned_vqp);
            }
        });
        if queued.is_err() {
            vqp.clear_update_queued();
        }
    }
}

impl Vqp {
    /// Returns the update packet with the present state of this endpoint.
    fn make_window_update(&self) -> Packet {
        let state = self.state.lock();
        let phase = match state.closed_with {
            None => VqpPhase::Open,
            Some(_) => VqpPhase::Closed,
        };
        state.make_update_packet(phase)
    }

    /// Marks an update as queued. Returns `true` if none was queued before.
    fn try_mark_update_queued(&self) -> bool {
        !core::mem::replace(&mut self.state.lock().update_queued, true)
    }

    fn clear_update_queued(&self) {
        self.state.lock().update_queued = false;
    }

    fn on_update_sent(&self, packet: &Packet) {
        if let PacketBody::WindowUpdate(update) = &packet.body {
            self.state
                .lock()
                .recv_queue
                .recv_window
                .on_advertised(update);
        }
    }

    /// Returns `true` if the peer endpoint is not known to be closed, and its node is a member.
    fn has_live_peer(&self, table: &VqpTable) -> bool {
        !self.state.lock().peer_closed
            && table
                .memory_service
                .cluster
                .is_connected(self.peer, self.admission)
    }
}
