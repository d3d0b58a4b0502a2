// SPDX-License-Identifier: GPL-2.0

//! Rendezvous calls at the serving end, whose data are in a buffer at the caller's node.
//!
//! # Operation
//!
//! A server takes a [`RendezvousCall`], fetches its data, and completes or rejects the call. The end of a
//! fetch notifies the service, since a parked call may wait for that end.
//!
//! # Recovery
//!
//! A call that is dropped before [`RendezvousCall::complete`] or [`RendezvousCall::reject`] is parked again.
//!
//! # Locking
//!
//! Takes `RpcChannel::rendezvous_queue` (spinlock). The service is notified after its release.

use super::queue::RendezvousQueueFull;
use crate::rpc::{
    channel::RpcChannel,
    server::{received::ReceivedCall, reply::send_status},
    Rpc,
};
use kernel::{prelude::*, sync::Arc};
use kite_core::wire::ring::{MsgHeader, MsgType, RendezvousBufs};

/// Slot for one fetch. Released on drop.
struct FetchGuard {
    channel: Arc<RpcChannel>,
    succeeded: bool,
}

impl Drop for FetchGuard {
    fn drop(&mut self) {
        let mut queue = self.channel.rendezvous_queue.lock();
        queue.finish_fetch(self.succeeded);
        let has_parked = queue.has_parked();
        drop(queue);
        // Parked calls may wait for this slot, and calls in the ring for space in the queue.
        if let Some(receiver) = self
            .channel
            .receiver()
            .filter(|_| has_parked || self.channel.has_ready_call())
        {
            receiver.notify_arrival();
        }
    }
}

/// Call or one-way message that has left the ring, and whose data are in a rendezvous buffer. A dropped
/// call is parked for any server, unless the call was rejected or completed.
pub(crate) struct RendezvousCall {
    channel: Arc<RpcChannel>,
    pub(in crate::rpc) header: MsgHeader,
    bufs: RendezvousBufs,
    /// `None` once the data were fetched.
    fetch: Option<FetchGuard>,
    /// Set once the call was rejected or completed.
    finished: bool,
}

impl RendezvousCall {
    /// Takes the oldest parked call of `channel`, if it may be fetched now.
    pub(in crate::rpc) fn resume_parked(channel: &Arc<RpcChannel>) -> Option<Self> {
        let parked = channel.rendezvous_queue.lock().resume_parked();
        parked.map(|(header, bufs)| Self::new(channel, header, bufs))
    }

    /// Admits a call that leaves the ring of `channel`. Returns the call if it must be fetched now, and
    /// `None` if it was parked.
    ///
    /// # Errors
    ///
    /// - [`RendezvousQueueFull`]: the call stays in the ring.
    pub(in crate::rpc) fn admit(
        channel: &Arc<RpcChannel>,
        header: MsgHeader,
        bufs: RendezvousBufs,
        may_fetch: bool,
    ) -> Result<Option<Self>, RendezvousQueueFull> {
        let fetch_now = channel
            .rendezvous_queue
            .lock()
            .admit(header, bufs, may_fetch)?;
        Ok(fetch_now.then(|| Self::new(channel, header, bufs)))
    }

    fn new(channel: &Arc<RpcChannel>, header: MsgHeader, bufs: RendezvousBufs) -> Self {
        let fetch = FetchGuard {
            channel: channel.clone(),
            succeeded: false,
        };
        Self {
            channel: channel.clone(),
            header,
            bufs,
            fetch: Some(fetch),
            finished: false,
        }
    }

    /// Returns the channel of the call.
    pub(crate) fn channel(&self) -> Arc<RpcChannel> {
        self.channel.clone()
    }

    /// Returns the region, at the caller's node, with the data.
    ///
    /// # Errors
    ///
    /// - `EIO`: the call names no such region.
    pub(crate) fn data_region(&self) -> Result<u64> {
        self.bufs.data.ok_or(EIO)
    }

    /// Returns the length of the data in bytes.
    pub(crate) fn len(&self) -> u64 {
        self.header.len
    }

    /// Rejects the call with `error`.
    pub(crate) fn reject(mut self, rpc: &Arc<Rpc>, error: Error) {
        self.finished = true;
        self.fetch = None;
        send_status(rpc, &self.channel, self.header.call_id, Err(error));
    }

    /// Records that the data were fetched.
    pub(crate) fn on_fetched(&mut self) {
        if let Some(mut fetch) = self.fetch.take() {
            fetch.succeeded = true;
        }
    }

    /// Hands the call to a server that has the data.
    pub(crate) fn complete(mut self, rpc: &Arc<Rpc>) -> ReceivedCall {
        self.finished = true;
        if self.header.msg_type == MsgType::Oneway {
            // The sender waits for this status.
            send_status(rpc, &self.channel, self.header.call_id, Ok(()));
        }
        ReceivedCall::new(&self.channel, self.header, self.bufs)
    }
}

impl Drop for RendezvousCall {
    fn drop(&mut self) {
        if !self.finished {
            self.channel
                .rendezvous_queue
                .lock()
                .park(self.header, self.bufs);
        }
    }
}
