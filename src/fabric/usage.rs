// SPDX-License-Identifier: GPL-2.0

//! The use of a connection for one thing: requests are posted by it, and its end makes room for others.
//!
//! A queue pair that failed is dropped when the last use of it has ended ([`super::conn`]).

use super::{
    channel::Channel,
    conn::Conn,
    sender::{Claim, Rescue},
};
use crate::verbs::{
    cq::Status,
    work::{Remote, SendWork, Sge},
};
use kernel::{prelude::*, sync::Arc};
use kite_core::view::Life;

/// A queue pair that failed. What was sent by it may still reach the peer's memory, late, until another takes
/// its place.
#[derive(Clone)]
pub(crate) struct Failure {
    pub(super) conn: Arc<Conn>,
    pub(super) generation: u32,
    /// The peer.
    pub(crate) life: Life,
}

impl Failure {
    /// Whether another has taken its place. If the peer leaves the view, none ever does.
    pub(crate) fn is_over(&self) -> bool {
        self.conn.was_replaced(self.generation)
    }
}

/// The right to post a number of requests on a ready connection.
pub(crate) struct Use {
    pub(super) conn: Arc<Conn>,
    pub(super) channel: Arc<Channel>,
    pub(super) generation: u32,
    pub(super) key: u32,
    pub(super) count: u32,
    pub(super) calls: u32,
    pub(super) parts: u32,
    pub(super) bytes: u64,
}

impl Use {
    /// Posts a write of `sges` to `addr` in the peer's memory.
    ///
    /// # Safety
    ///
    /// `sges` must name the buffer of `claim`, or memory that it holds.
    pub(crate) unsafe fn write(&self, claim: &Claim, sges: &[Sge], addr: u64) -> Result {
        let remote = Remote {
            addr,
            key: self.key,
        };
        // SAFETY: By the safety requirements.
        unsafe { self.post(claim, &SendWork::write(claim.wr_id(), sges, remote)) }
    }

    /// Posts a write of at most [`crate::verbs::work::INLINE_MAX`] bytes that are copied now: `sges` has
    /// kernel addresses.
    ///
    /// # Safety
    ///
    /// `sges` must name kernel memory that may be read.
    pub(crate) unsafe fn write_inline(&self, claim: &Claim, sges: &[Sge], addr: u64) -> Result {
        let remote = Remote {
            addr,
            key: self.key,
        };
        // SAFETY: By the safety requirements; the bytes are copied before the call returns.
        unsafe {
            self.post(
                claim,
                &SendWork::write(claim.wr_id(), sges, remote).inline(),
            )
        }
    }

    /// As [`Self::write`], and the peer gets `immediate` when the bytes are there.
    ///
    /// # Safety
    ///
    /// As there.
    pub(crate) unsafe fn write_with(
        &self,
        claim: &Claim,
        sges: &[Sge],
        addr: u64,
        immediate: u32,
    ) -> Result {
        let remote = Remote {
            addr,
            key: self.key,
        };
        let work = SendWork::write_with(claim.wr_id(), sges, remote, immediate);
        // SAFETY: By the safety requirements.
        unsafe { self.post(claim, &work) }
    }

    /// Posts a read of `addr` in the peer's memory to `sges`.
    ///
    /// # Safety
    ///
    /// As for [`Self::write`].
    pub(crate) unsafe fn read(&self, claim: &Claim, sges: &[Sge], addr: u64) -> Result {
        let remote = Remote {
            addr,
            key: self.key,
        };
        // SAFETY: By the safety requirements.
        unsafe { self.post(claim, &SendWork::read(claim.wr_id(), sges, remote)) }
    }

    /// Posts a message.
    ///
    /// # Safety
    ///
    /// As for [`Self::write`].
    pub(crate) unsafe fn send(&self, claim: &Claim, sges: &[Sge]) -> Result {
        // SAFETY: By the safety requirements.
        unsafe { self.post(claim, &SendWork::send(claim.wr_id(), sges)) }
    }

    /// # Safety
    ///
    /// As for [`Self::write`], of what `work` names.
    unsafe fn post(&self, claim: &Claim, work: &SendWork<'_>) -> Result {
        claim.before_post(1);
        // SAFETY: The claim keeps the memory mapped until the request completes.
        unsafe { self.channel.qp().post(work) }.inspect_err(|_| claim.not_posted())
    }

    /// Reports how a request failed, and with it the queue pair.
    pub(crate) fn failed(&self, status: Status) {
        if status == Status::NoAnswer {
            self.conn.unanswered(self.generation);
        } else {
            self.conn.failed(self.generation);
        }
    }

    /// The failure of its queue pair, to the peer in this life.
    pub(crate) fn failure(&self, life: Life) -> Failure {
        Failure {
            conn: self.conn.clone(),
            generation: self.generation,
            life,
        }
    }

    /// Bytes that a request can carry itself.
    pub(crate) fn inline_max(&self) -> usize {
        self.channel.qp().inline_max()
    }

    /// Gives back the room of all but so many requests, which are posted now.
    pub(super) fn keep(&mut self, count: u32) {
        let spare = self.count.saturating_sub(count);
        self.count -= spare;
        self.conn.keep(count, spare);
    }

    /// Gives back the room of what was posted, all of which has completed; a call stays announced.
    pub(crate) fn sent(&mut self) {
        let count = core::mem::take(&mut self.count);
        self.conn.give_back(count, 0, (0, 0));
    }

    /// Whether an answer may still come on the queue pair that the request went by.
    pub(crate) fn is_current(&self) -> bool {
        self.conn.is_current(self.generation)
    }

    /// Gives up the queue pair, for want of completions.
    pub(crate) fn rescue(&self, how: Rescue) -> Result {
        self.conn.failed(self.generation);
        match how {
            Rescue::Fail => self.channel.qp().fail(),
            Rescue::Reset => self.channel.qp().reset(),
        }
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        let parts = (self.parts, self.bytes);
        self.conn.give_back(self.count, self.calls, parts);
    }
}
