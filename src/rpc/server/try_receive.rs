// SPDX-License-Identifier: GPL-2.0

//! Receive without waiting, by the poller thread for receives on I/O queues.
//!
//! # Operation
//!
//! Many receives can poll one service. So a poll that finds nothing records the arrival counter. The service
//! is not polled again until the counter changes.
//!
//! # Locking
//!
//! `RpcService::state` (spinlock) protects the counters. `RpcService::clients` is taken with `try_lock`.
//!
//! `polled_receivers` is incremented before a receive reads `arrival_seq`, and read after an arrival has
//! incremented `arrival_seq`. So either the receive observes the arrival, or the arrival wakes the poller
//! thread.

use super::{dequeue::DequeuedCall, RpcDelivery, RpcReceiveError, RpcService};
use crate::{errno, rpc::Rpc, sys::buffer::Buffer};
use kernel::{
    prelude::*,
    sync::{
        atomic::{Acquire, Full},
        Arc,
    },
};

/// Result of a poll for a call.
pub(crate) enum RpcTryReceive {
    Empty,
    /// Another thread is taking a call.
    Busy,
    Delivered(RpcDelivery),
}

/// Receive on an I/O queue that is waiting for calls. While it exists, arrivals wake the poller thread.
pub(crate) struct PolledReceiver(Arc<RpcService>);

impl PolledReceiver {
    /// Returns `true` if a poll, with the same `allow_rendezvous`, found nothing and no call has arrived
    /// since.
    pub(crate) fn is_known_empty(&self, allow_rendezvous: bool) -> bool {
        let state = self.0.state.lock();
        state.empty_at[usize::from(allow_rendezvous)] == Some(state.arrival_seq)
    }

    /// Registers a polled receive: from now on arrivals wake the poller thread.
    pub(crate) fn new(service: Arc<RpcService>) -> Self {
        service.polled_receivers.fetch_add(1u32, Full);
        Self(service)
    }
}

impl Drop for PolledReceiver {
    fn drop(&mut self) {
        self.0.polled_receivers.fetch_sub(1u32, Full);
    }
}

impl RpcService {
    /// Wakes the poller thread if it polls for any receive.
    pub(super) fn wake_poller(&self) {
        if self.polled_receivers.load(Acquire) != 0 {
            self.poller.event.complete();
        }
    }

    /// Takes a call without waiting. Takes rendezvous calls only if `allow_rendezvous`. The caller must then
    /// check their length.
    ///
    /// # Errors
    ///
    /// - `ESTALE`: the service has ended.
    /// - [`RpcReceiveError::BufferTooShort`], [`RpcReceiveError::FaultNeeded`]: the call remains queued.
    pub(crate) fn try_receive(
        &self,
        rpc: &Arc<Rpc>,
        memory: &Buffer,
        buffer_len: u64,
        allow_rendezvous: bool,
    ) -> Result<RpcTryReceive, RpcReceiveError> {
        loop {
            // Read before the poll: an arrival during the poll makes the counter differ.
            let seen_seq = self.state.lock().arrival_seq;
            let Some(mut clients) = self.clients.try_lock() else {
                return Ok(RpcTryReceive::Busy);
            };
            let dequeued = clients.dequeue_next(rpc, allow_rendezvous);
            let has_more = clients.has_ready_call();
            drop(clients);
            if has_more {
                self.arrival_cv.notify_one();
            }
            let Some((channel, call)) = dequeued else {
                self.try_reap_clients(rpc);
                return self.note_empty(seen_seq, allow_rendezvous);
            };
            let delivery = match call {
                DequeuedCall::Rendezvous(rendezvous) => Some(RpcDelivery::Rendezvous(rendezvous)),
                DequeuedCall::Inline(header) => {
                    self.deliver(rpc, &channel, header, memory, buffer_len)?
                }
            };
            if let Some(delivery) = delivery {
                return Ok(RpcTryReceive::Delivered(delivery));
            }
        }
    }

    /// Records that a poll with this `allow_rendezvous` found nothing when the counter was `seen_seq`.
    fn note_empty(
        &self,
        seen_seq: u64,
        allow_rendezvous: bool,
    ) -> Result<RpcTryReceive, RpcReceiveError> {
        let mut state = self.state.lock();
        state.empty_at[usize::from(allow_rendezvous)] = Some(seen_seq);
        if state.closed {
            Err(errno::stale().into())
        } else {
            Ok(RpcTryReceive::Empty)
        }
    }
}
