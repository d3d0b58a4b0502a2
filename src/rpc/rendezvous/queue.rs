// SPDX-License-Identifier: GPL-2.0

//! Queue of the rendezvous calls of a channel that have left its ring.
//!
//! # Operation
//!
//! A fetch depends on the caller's node, which may not respond. So a rendezvous call leaves the ring at once,
//! and does not delay the calls behind it. The call is parked if it must not be fetched now. At most
//! [`MAX_SLOW_FETCHES`] fetches run per channel, unless one has completed in the last [`SLOW_AFTER_MS`]. So
//! an unresponsive node blocks few servers.
//!
//! # Locking
//!
//! `RpcChannel::rendezvous_queue` (spinlock) protects the queue.

use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    prelude::*,
    time::{Instant, Monotonic},
};
use kite_core::wire::ring::{MsgHeader, RendezvousBufs};

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
    pub(super) fn admit(
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

    /// Takes the oldest parked call, if it may be fetched now.
    pub(super) fn resume_parked(&mut self) -> Option<(MsgHeader, RendezvousBufs)> {
        let next = self.can_fetch().then(|| self.parked.remove(0).ok());
        self.fetching += usize::from(matches!(next, Some(Some(_))));
        next?
    }

    /// Parks a call, which a server may fetch later.
    pub(super) fn park(&mut self, header: MsgHeader, bufs: RendezvousBufs) {
        // Cannot fail: calls being fetched count against the capacity too.
        let _ = self.parked.push((header, bufs), GFP_ATOMIC);
    }

    /// Ends a fetch.
    pub(super) fn finish_fetch(&mut self, succeeded: bool) {
        self.fetching -= 1;
        if succeeded {
            self.last_fetched = Some(Instant::now());
        }
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
