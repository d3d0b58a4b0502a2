// SPDX-License-Identifier: GPL-2.0

//! Looking for calls without waiting, as the poller thread does for who receives by a queue.
//!
//! Many may receive from one service, and each would look when the poller passes. So a look that finds nothing is
//! noted, and nobody looks again before something has come.

use super::{RpcDelivery, RpcReceiveError, RpcService};
use crate::{
    errno,
    rpc::{channel::DequeuedCall, Rpc},
    sys::buffer::Buffer,
};
use kernel::{
    prelude::*,
    sync::{
        atomic::{Acquire, Full},
        Arc,
    },
};

/// What a look for a call came to.
pub(crate) enum RpcTryReceive {
    Empty,
    /// Somebody else is just looking.
    Busy,
    Delivered(RpcDelivery),
}

/// A receive by a queue, as long as it waits for calls.
pub(crate) struct PolledReceiver(Arc<RpcService>);

impl PolledReceiver {
    /// Whether somebody has looked, for `longs` as well or not, and nothing has come since.
    pub(crate) fn is_known_empty(&self, allow_rendezvous: bool) -> bool {
        let state = self.0.state.lock();
        state.empty_at[usize::from(allow_rendezvous)] == Some(state.arrival_seq)
    }

    /// From now on the poller thread is woken.
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
    /// Has the poller thread look, if it does that for anybody.
    pub(super) fn wake_poller(&self) {
        if self.polled_receivers.load(Acquire) != 0 {
            self.poller.event.complete();
        }
    }

    /// Looks for a call, and waits for nothing. Long ones are taken if `longs`, and are yet to be judged.
    ///
    /// # Errors
    ///
    /// `ESTALE` if the service has ended.
    pub(crate) fn try_receive(
        &self,
        rpc: &Arc<Rpc>,
        memory: &Buffer,
        buffer_len: u64,
        allow_rendezvous: bool,
    ) -> Result<RpcTryReceive, RpcReceiveError> {
        loop {
            // Before the look: what comes meanwhile is looked for again.
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
                self.reap_clients(rpc);
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

    /// Nobody needs to look, for `longs` as well or not, until more have come than `arrivals`.
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
