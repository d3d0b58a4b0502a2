// SPDX-License-Identifier: GPL-2.0

//! What ends of virtual queue pairs tell each other: that they were accepted, what they have taken, that they are over.
//!
//! It is told again until it was, for as long as both are there. What may wait for other nodes is for workers, as
//! packets come by the poller.

use super::{exchange::Exchange, Vqp};
use crate::sys::deadline::{settle, Deadline};
use kernel::{
    prelude::*,
    sync::Arc,
    time::{delay::fsleep, Delta},
};
use kite_core::{
    view::Life,
    wire::packet::{Body, Packet, Phase},
};

/// How long to try to tell somebody, and to wait before that is tried again.
const TELL_MS: u32 = 3000;
const AGAIN_MS: i64 = 500;

/// How long a process may wait for that, which has its message already.
const NOW_MS: u32 = 100;

impl Exchange {
    /// Sends a packet to a node, and waits until it has come.
    ///
    /// # Errors
    ///
    /// As for [`crate::cluster::Cluster::reach`] and [`crate::fabric::Fabric::send_packet`].
    fn send(&self, life: Life, packet: &Packet, deadline: Deadline) -> Result {
        let (bytes, cluster) = (packet.encode(), &self.lmr.cluster);
        settle(deadline, || {
            let reach = cluster.reach(life, deadline)?;
            cluster.fabric.send_packet((life, &reach), &bytes, deadline)
        })
    }

    /// Has a worker send one. If it cannot, the other end is not told, and learns when it sends something.
    pub(super) fn send_later(self: &Arc<Self>, life: Life, packet: Packet) {
        let exchange = self.clone();
        let _ = self.later(move || {
            let deadline = Deadline::after_ms(TELL_MS);
            let _ = exchange.send(life, &packet, deadline);
        });
    }

    /// Tells the other end how this one is: now, if that works, or else a worker does.
    pub(super) fn tell(self: &Arc<Self>, vqp: &Arc<Vqp>) {
        if self.try_tell(vqp, Deadline::after_ms(NOW_MS)).is_err() {
            self.tell_later(vqp);
        }
    }

    fn try_tell(&self, vqp: &Vqp, deadline: Deadline) -> Result {
        let packet = vqp.answer();
        self.send(vqp.life, &packet, deadline)?;
        vqp.note_told(&packet);
        Ok(())
    }

    /// Has a worker tell the other end how this one is, for as long as both are there, unless one does that already.
    pub(super) fn tell_later(self: &Arc<Self>, vqp: &Arc<Vqp>) {
        if !vqp.begin_to_tell() {
            return;
        }
        let (exchange, told) = (self.clone(), vqp.clone());
        let queued = self.tellers.try_spawn(GFP_KERNEL, move || {
            // What changes from here on is told anew.
            told.end_to_tell();
            let deadline = Deadline::after_ms(TELL_MS);
            if exchange.try_tell(&told, deadline).is_err() && told.has_other(&exchange) {
                fsleep(Delta::from_millis(AGAIN_MS));
                // Behind all others: they may be for nodes that answer.
                exchange.tell_later(&told);
            }
        });
        if queued.is_err() {
            vqp.end_to_tell();
        }
    }
}

impl Vqp {
    /// What to say to a message that is not kept.
    fn answer(&self) -> Packet {
        let state = self.state.lock();
        let phase = match state.over {
            None => Phase::Open,
            Some(_) => Phase::Closed,
        };
        state.packet(phase)
    }

    /// Somebody is to tell the other end. Returns whether nobody was.
    fn begin_to_tell(&self) -> bool {
        !core::mem::replace(&mut self.state.lock().telling, true)
    }

    fn end_to_tell(&self) {
        self.state.lock().telling = false;
    }

    fn note_told(&self, packet: &Packet) {
        if let Body::State(state) = &packet.body {
            self.state.lock().inbox.incoming.note_told(state);
        }
    }

    /// Whether there still is somebody to tell.
    fn has_other(&self, exchange: &Exchange) -> bool {
        !self.state.lock().left && exchange.lmr.cluster.has(self.life)
    }
}
