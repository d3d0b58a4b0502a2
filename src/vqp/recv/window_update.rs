// SPDX-License-Identifier: GPL-2.0

//! What ends of virtual queue pairs tell each other: that they were accepted, what they have taken, that they are over.
//!
//! It is told again until it was, for as long as both are there. What may wait for other nodes is for workers, as
//! packets come by the poller.

use crate::{
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

/// How long to try to tell somebody, and to wait before that is tried again.
const UPDATE_TIMEOUT_MS: u32 = 3000;
const UPDATE_RETRY_MS: i64 = 500;

/// How long a process may wait for that, which has its message already.
const INLINE_UPDATE_TIMEOUT_MS: u32 = 100;

impl VqpTable {
    /// Sends a packet to a node, and waits until it has come.
    ///
    /// # Errors
    ///
    /// As for [`crate::cluster::Cluster::reach`] and [`crate::fabric::Fabric::send_packet`].
    fn send_packet(&self, peer: NodeInstance, packet: &Packet, deadline: Deadline) -> Result {
        let (bytes, cluster) = (packet.encode(), &self.lmr.cluster);
        retry_until(deadline, || {
            let address = cluster.resolve_address(peer, deadline)?;
            cluster
                .fabric
                .send_packet((peer, &address), &bytes, deadline)
        })
    }

    /// Has a worker send one. If it cannot, the other end is not told, and learns when it sends something.
    pub(in crate::vqp) fn send_packet_deferred(
        self: &Arc<Self>,
        peer: NodeInstance,
        packet: Packet,
    ) {
        let table = self.clone();
        let _ = self.defer(move || {
            let deadline = Deadline::after_ms(UPDATE_TIMEOUT_MS);
            let _ = table.send_packet(peer, &packet, deadline);
        });
    }

    /// Tells the other end how this one is: now, if that works, or else a worker does.
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

    /// Has a worker tell the other end how this one is, for as long as both are there, unless one does that already.
    pub(in crate::vqp) fn send_update_deferred(self: &Arc<Self>, vqp: &Arc<Vqp>) {
        if !vqp.try_mark_update_queued() {
            return;
        }
        let (table, owned_vqp) = (self.clone(), vqp.clone());
        let queued = self.updates_wq.try_spawn(GFP_KERNEL, move || {
            // What changes from here on is told anew.
            owned_vqp.clear_update_queued();
            let deadline = Deadline::after_ms(UPDATE_TIMEOUT_MS);
            if table.send_update(&owned_vqp, deadline).is_err() && owned_vqp.has_live_peer(&table) {
                fsleep(Delta::from_millis(UPDATE_RETRY_MS));
                // Behind all others: they may be for nodes that answer.
                table.send_update_deferred(&owned_vqp);
            }
        });
        if queued.is_err() {
            vqp.clear_update_queued();
        }
    }
}

impl Vqp {
    /// What to say to a message that is not kept.
    fn make_window_update(&self) -> Packet {
        let state = self.state.lock();
        let phase = match state.closed_with {
            None => VqpPhase::Open,
            Some(_) => VqpPhase::Closed,
        };
        state.make_update_packet(phase)
    }

    /// Somebody is to tell the other end. Returns whether nobody was.
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

    /// Whether there still is somebody to tell.
    fn has_live_peer(&self, table: &VqpTable) -> bool {
        !self.state.lock().peer_closed && table.lmr.cluster.is_member(self.peer)
    }
}
