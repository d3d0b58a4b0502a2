// SPDX-License-Identifier: GPL-2.0

//! Order in which the calls of one channel are taken by servers.
//!
//! # Operation
//!
//! Inline calls wait in the ring. A rendezvous call leaves the ring at once. The call is parked if its data
//! must not be fetched now ([`crate::rpc::rendezvous::queue`]).
//!
//! # Locking
//!
//! Takes `RpcChannel::rx_ring` and `RpcChannel::rendezvous_queue`, one after the other, with
//! `RpcService::clients` held.

use crate::rpc::{
    channel::RpcChannel,
    rendezvous::{call::RendezvousCall, queue::RendezvousQueueFull},
    Rpc,
};
use kernel::sync::Arc;
use kite_core::wire::ring::MsgHeader;

/// Call that was taken from a channel.
pub(super) enum DequeuedCall {
    /// The data are in the ring until the slot is freed.
    Inline(MsgHeader),
    Rendezvous(RendezvousCall),
}

impl RpcChannel {
    /// Takes the next call. The oldest parked call and the oldest call in the ring come first in turns.
    /// Skips rendezvous calls that must not be fetched now. If `allow_rendezvous` is `false`, skips all of
    /// them, and parks those in the ring.
    pub(super) fn dequeue(
        self: &Arc<Self>,
        rpc: &Arc<Rpc>,
        allow_rendezvous: bool,
    ) -> Option<DequeuedCall> {
        if !allow_rendezvous {
            return self.dequeue_from_ring(rpc, allow_rendezvous);
        }
        let resume = || RendezvousCall::resume_parked(self).map(DequeuedCall::Rendezvous);
        let parked_first = self.rendezvous_queue.lock().toggle_parked_first();
        let first = parked_first.then(resume).flatten();
        first
            .or_else(|| self.dequeue_from_ring(rpc, allow_rendezvous))
            .or_else(resume)
    }

    fn dequeue_from_ring(
        self: &Arc<Self>,
        rpc: &Arc<Rpc>,
        allow_rendezvous: bool,
    ) -> Option<DequeuedCall> {
        loop {
            let (header, ring) = self.pop()?;
            if !header.has_data_buffer() {
                return Some(DequeuedCall::Inline(header));
            }
            // Cannot fail: the message was checked on arrival.
            let bufs = self
                .read_rendezvous_bufs(&ring, &header)
                .unwrap_or_default();
            match RendezvousCall::admit(self, header, bufs, allow_rendezvous) {
                Ok(call) => {
                    self.free_slots(rpc, &header.slot);
                    if let Some(call) = call {
                        return Some(DequeuedCall::Rendezvous(call));
                    }
                }
                Err(RendezvousQueueFull) => {
                    self.requeue(&header);
                    // The end of a fetch notifies the service if calls remain in the ring. A fetch that has
                    // ended before the requeue may have missed this call: retry.
                    if self.rendezvous_queue.lock().is_full() {
                        return None;
                    }
                }
            }
        }
    }
}
