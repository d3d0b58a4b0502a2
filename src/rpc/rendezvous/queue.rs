// SPDX-License-Identifier: GPL-2.0

//! Rendezvous calls at the serving end, whose data are in a buffer at the caller's node.
//!
//! # Operation
//!
//! A fetch depends on the caller's node, which may not respond. So a rendezvous call leaves the ring at once,
//! and does not delay the calls behind it. The call is parked if it must not be fetched now. At most
//! [`MAX_SLOW_FETCHES`] fetches run per channel, unless one has completed in the last [`SLOW_AFTER_MS`]. So
//! an unresponsive node blocks few servers.
//!
//! # Recovery
//!
//! A call that is dropped before [`RendezvousCall::complete`] or [`RendezvousCall::reject`] is parked again.
//!
//! # Locking
//!
//! `RpcChannel::rendezvous_queue` (spinlock) protects the queue. The service is notified after its release.

use crate::rpc::{
    channel::RpcChannel,
    server::{reply::send_status, ReceivedCall},
    Rpc,
};
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    prelude::*,
    sync::Arc,
    time::{Instant, Monotonic},
};
use kite_core::wire::ring::{MsgHeader, MsgType, RendezvousBufs};

/// Maximum calls of one channel that have left its ring without being received by a server.
const MAX_QUEUED_RENDEZVOUS: usize = 32;

/// Maximum concurrent fetches of a channel that has completed none for [`SLOW_AFTER_MS`].
const MAX_SLOW_FETCHES: usize = 2;
const SLOW_AFTER_MS: i64 = 100;

/// Rendezvous calls of a channel that have left its ring.
pub(in crate::rpc) struct RendezvousQueue {
    /// Calls that are not being fetched. Allocated for [`MAX_QUEUED_RENDEZVOUS`].
    parked: KVec<(MsgHeader, RendezvousBufs)>,
    fetching: usize,
    /// Set if the last dequeue preferred parked calls to those in the ring.
    parked_first: bool,
    /// Time of the last successful fetch.
    last_fetched: Option<Instant<Monotonic>>,
}

/// The queue is full: the call stays in the ring.
pub(in crate::rpc) struct RendezvousQueueFull;

impl RendezvousQueue {
    /// Creates an empty queue.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: no memory.
    pub(in crate::rpc) fn new() -> Result<Self> {
        Ok(Self {
            parked: KVec::with_capacity(MAX_QUEUED_RENDEZVOUS, GFP_KERNEL_ACCOUNT)?,
            fetching: 0,
            parked_first: false,
            last_fetched: None,
        })
    }

    fn can_fetch(&self) -> bool {
        let is_recent = |done: Instant<Monotonic>| done.elapsed().as_millis() < SLOW_AFTER_MS;
        self.fetching < MAX_SLOW_FETCHES || self.last_fetched.is_some_and(is_recent)
    }

    /// Alternates between parked calls and those in the ring. Returns `true` if parked calls come first this
    /// time.
    pub(in crate::rpc) fn toggle_parked_first(&mut self) -> bool {
        self.parked_first = !self.parked_first;
        self.parked_first
    }

    /// Returns `true` if no further call may leave the ring.
    pub(in crate::rpc) fn is_full(&self) -> bool {
        self.fetching + self.parked.len() >= MAX_QUEUED_RENDEZVOUS
    }

    /// Admits a call that leaves the ring. Returns `true` if it must be fetched now, which requires
    /// `may_fetch`. Otherwise the call is parked.
    fn admit(
        &mut self,
        header: MsgHeader,
        bufs: RendezvousBufs,
        may_fetch: bool,
    ) -> Result<bool, RendezvousQueueFull> {
        if self.is_full() {
            return Err(RendezvousQueueFull);
        }
        let fetch_now = may_fetch && self.can_fetch();
        if fetch_now {
            self.fetching += 1;
        } else {
            self.park(header, bufs);
        }
        Ok(fetch_now)
    }

    fn resume_parked(&mut self) -> Option<(MsgHeader, RendezvousBufs)> {
        let next = self.can_fetch().then(|| self.parked.remove(0).ok());
        self.fetching += usize::from(matches!(next, Some(Some(_))));
        next?
    }

    fn park(&mut self, header: MsgHeader, bufs: RendezvousBufs) {
        // Cannot fail: calls being fetched count against the capacity too.
        let _ = self.parked.push((header, bufs), GFP_ATOMIC);
    }

    /// Returns `true` if a parked call may be fetched now.
    pub(in crate::rpc) fn has_fetchable(&self) -> bool {
        self.has_parked() && self.can_fetch()
    }

    /// Returns `true` if a call is parked.
    pub(in crate::rpc) fn has_parked(&self) -> bool {
        !self.parked.is_empty()
    }

    /// Takes a parked call that will not be fetched.
    pub(in crate::rpc) fn pop_parked(&mut self) -> Option<MsgHeader> {
        self.parked.remove(0).ok().map(|(header, _)| header)
    }
}

/// Slot for one fetch. Released on drop.
struct FetchGuard {
    channel: Arc<RpcChannel>,
    succeeded: bool,
}

impl Drop for FetchGuard {
    fn drop(&mut self) {
        let mut queue = self.channel.rendezvous_queue.lock();
        queue.fetching -= 1;
        if self.succeeded {
            queue.last_fetched = Some(Instant::now());
        }
        let has_parked = queue.has_parked();
        drop(queue);
        // Parked calls may wait for this slot, and calls in the ring for space in the queue.
        if let Some(service) = self
            .channel
            .service()
            .filter(|_| has_parked || self.channel.has_ready_call())
        {
            service.notify_arrival();
        }
    }
}

/// Call or one-way message that has left the ring, and whose data are in a rendezvous buffer. Dropping it
/// parks it for any server, unless it was rejected or completed.
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
