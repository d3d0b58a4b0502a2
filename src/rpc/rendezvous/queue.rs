// SPDX-License-Identifier: GPL-2.0

//! Calls of which the data are in relays, at the end that serves.
//!
//! To fetch them takes the other node, which may not answer. So such a call leaves the ring at once, for those
//! behind it, and is parked if it is not to be fetched now: unless a node has just let one be fetched, there are
//! few at a time, so that it holds up few servers.

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

/// Calls of one link that have left its ring and that no server has.
const MAX_QUEUED_RENDEZVOUS: usize = 32;

/// Fetches at a time from a node that has not let one be done for [`SLOW_MS`].
const MAX_SLOW_FETCHES: usize = 2;
const SLOW_AFTER_MS: i64 = 100;

/// The long calls of a link that have left its ring.
pub(in crate::rpc) struct RendezvousQueue {
    /// Those that are not being fetched. There is room for all.
    parked: KVec<(MsgHeader, RendezvousBufs)>,
    fetching: usize,
    /// Whether those that left the ring have their turn before those that are in it.
    parked_first: bool,
    /// When one was done last.
    last_fetched: Option<Instant<Monotonic>>,
}

/// There are too many: a call stays in the ring.
pub(in crate::rpc) struct RendezvousQueueFull;

impl RendezvousQueue {
    /// None.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
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

    /// Whether those that left the ring come first this time.
    pub(in crate::rpc) fn toggle_parked_first(&mut self) -> bool {
        self.parked_first = !self.parked_first;
        self.parked_first
    }

    /// Whether there is no room for one more.
    pub(in crate::rpc) fn is_full(&self) -> bool {
        self.fetching + self.parked.len() >= MAX_QUEUED_RENDEZVOUS
    }

    /// Lets one leave the ring. Returns whether it is to be fetched now, if it may be; else it is parked.
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
        // Within the capacity: those that are fetched count, too.
        let _ = self.parked.push((header, bufs), GFP_ATOMIC);
    }

    /// Whether one waits that may be fetched.
    pub(in crate::rpc) fn has_fetchable(&self) -> bool {
        self.has_parked() && self.can_fetch()
    }

    /// Whether one waits.
    pub(in crate::rpc) fn has_parked(&self) -> bool {
        !self.parked.is_empty()
    }

    /// Takes one that is not to be fetched any more.
    pub(in crate::rpc) fn pop_parked(&mut self) -> Option<MsgHeader> {
        self.parked.remove(0).ok().map(|(header, _)| header)
    }
}

/// A fetch under way.
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
        // Others may have waited for this; or in the ring, for room.
        if let Some(service) = self
            .channel
            .service()
            .filter(|_| has_parked || self.channel.has_ready_call())
        {
            service.notify_arrival();
        }
    }
}

/// A call or message that has left the ring, and whose data are yet to be read from a relay. If it is neither refused
/// nor had, it is parked: another server is to get it, or the same.
pub(crate) struct RendezvousCall {
    channel: Arc<RpcChannel>,
    pub(in crate::rpc) header: MsgHeader,
    bufs: RendezvousBufs,
    /// Nothing once its data were fetched.
    fetch: Option<FetchGuard>,
    /// It was refused, or had.
    finished: bool,
}

impl RendezvousCall {
    /// The next that left the ring of `link` before, if it is to be fetched now.
    pub(in crate::rpc) fn resume_parked(channel: &Arc<RpcChannel>) -> Option<Self> {
        let parked = channel.rendezvous_queue.lock().resume_parked();
        parked.map(|(header, bufs)| Self::new(channel, header, bufs))
    }

    /// One that leaves the ring of `link`, if it is to be fetched now, and may be.
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

    /// By which it came.
    pub(crate) fn channel(&self) -> Arc<RpcChannel> {
        self.channel.clone()
    }

    /// The region at the caller's node that has the data.
    ///
    /// # Errors
    ///
    /// `EIO` if there is none.
    pub(crate) fn data_region(&self) -> Result<u64> {
        self.bufs.data.ok_or(EIO)
    }

    /// Bytes of its data.
    pub(crate) fn len(&self) -> u64 {
        self.header.len
    }

    /// Nobody gets it.
    pub(crate) fn reject(mut self, rpc: &Arc<Rpc>, error: Error) {
        self.finished = true;
        self.fetch = None;
        send_status(rpc, &self.channel, self.header.call_id, Err(error));
    }

    /// Its data were fetched.
    pub(crate) fn on_fetched(&mut self) {
        if let Some(mut fetch) = self.fetch.take() {
            fetch.succeeded = true;
        }
    }

    /// A server has the data.
    pub(crate) fn complete(mut self, rpc: &Arc<Rpc>) -> ReceivedCall {
        self.finished = true;
        if self.header.msg_type == MsgType::Oneway {
            // Its sender waits for that.
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
