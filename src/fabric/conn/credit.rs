// SPDX-License-Identifier: GPL-2.0

//! The use of a connection for one thing: requests are posted by it, and its end makes room for others.
//!
//! A queue pair that failed is dropped when the last use of it has ended ([`crate::fabric::conn`]).

use super::Conn;
use crate::{
    fabric::{
        endpoint::Endpoint,
        send::slots::{Recovery, SlotGuard},
    },
    verbs::{
        cq::WcStatus,
        work::{RemoteAddr, SendWr, Sge},
    },
};
use kernel::{prelude::*, sync::Arc};
use kite_core::view::NodeInstance;

/// A queue pair that failed. What was sent by it may still reach the peer's memory, late, until another takes
/// its place.
#[derive(Clone)]
pub(crate) struct StaleQp {
    pub(in crate::fabric) conn: Arc<Conn>,
    pub(in crate::fabric) generation: u32,
    /// The peer.
    pub(crate) instance: NodeInstance,
}

impl StaleQp {
    /// Whether another has taken its place. If the peer leaves the view, none ever does.
    pub(crate) fn is_fenced(&self) -> bool {
        self.conn.is_stale_generation(self.generation)
    }
}

/// The right to post a number of requests on a ready connection.
pub(crate) struct ConnCredit {
    pub(in crate::fabric) conn: Arc<Conn>,
    pub(in crate::fabric) endpoint: Arc<Endpoint>,
    pub(in crate::fabric) generation: u32,
    pub(in crate::fabric) rkey: u32,
    pub(in crate::fabric) wr_count: u32,
    pub(in crate::fabric) control_requests: u32,
    pub(in crate::fabric) segments: u32,
    pub(in crate::fabric) vqp_bytes: u64,
}

impl ConnCredit {
    /// Posts a write of `sges` to `addr` in the peer's memory.
    ///
    /// # Safety
    ///
    /// `sges` must name the buffer of `claim`, or memory that it holds.
    pub(crate) unsafe fn write(&self, slot: &SlotGuard, sges: &[Sge], addr: u64) -> Result {
        let remote = RemoteAddr {
            addr,
            rkey: self.rkey,
        };
        // SAFETY: By the safety requirements.
        unsafe { self.post(slot, &SendWr::write(slot.wr_id(), sges, remote)) }
    }

    /// Posts a write of at most [`crate::verbs::work::INLINE_MAX`] bytes that are copied now: `sges` has
    /// kernel addresses.
    ///
    /// # Safety
    ///
    /// `sges` must name kernel memory that may be read.
    pub(crate) unsafe fn write_inline(&self, slot: &SlotGuard, sges: &[Sge], addr: u64) -> Result {
        let remote = RemoteAddr {
            addr,
            rkey: self.rkey,
        };
        // SAFETY: By the safety requirements; the bytes are copied before the call returns.
        unsafe {
            self.post(
                slot,
                &SendWr::write(slot.wr_id(), sges, remote).with_inline(),
            )
        }
    }

    /// As [`Self::write`], and the peer gets `immediate` when the bytes are there.
    ///
    /// # Safety
    ///
    /// As there.
    pub(crate) unsafe fn write_imm(
        &self,
        slot: &SlotGuard,
        sges: &[Sge],
        addr: u64,
        immediate: u32,
    ) -> Result {
        let remote = RemoteAddr {
            addr,
            rkey: self.rkey,
        };
        let wr = SendWr::write_with_imm(slot.wr_id(), sges, remote, immediate);
        // SAFETY: By the safety requirements.
        unsafe { self.post(slot, &wr) }
    }

    /// Posts a read of `addr` in the peer's memory to `sges`.
    ///
    /// # Safety
    ///
    /// As for [`Self::write`].
    pub(crate) unsafe fn read(&self, slot: &SlotGuard, sges: &[Sge], addr: u64) -> Result {
        let remote = RemoteAddr {
            addr,
            rkey: self.rkey,
        };
        // SAFETY: By the safety requirements.
        unsafe { self.post(slot, &SendWr::read(slot.wr_id(), sges, remote)) }
    }

    /// Posts a message.
    ///
    /// # Safety
    ///
    /// As for [`Self::write`].
    pub(crate) unsafe fn send(&self, slot: &SlotGuard, sges: &[Sge]) -> Result {
        // SAFETY: By the safety requirements.
        unsafe { self.post(slot, &SendWr::send(slot.wr_id(), sges)) }
    }

    /// # Safety
    ///
    /// As for [`Self::write`], of what `work` names.
    unsafe fn post(&self, slot: &SlotGuard, wr: &SendWr<'_>) -> Result {
        slot.account_post(1);
        // SAFETY: The claim keeps the memory mapped until the request completes.
        unsafe { self.endpoint.qp().post(wr) }.inspect_err(|_| slot.unaccount_post())
    }

    /// Reports how a request failed, and with it the queue pair.
    pub(crate) fn report_failure(&self, status: WcStatus) {
        if status == WcStatus::RetryExceeded {
            self.conn.report_no_response(self.generation);
        } else {
            self.conn.report_failure(self.generation);
        }
    }

    /// The failure of its queue pair, to the peer in this life.
    pub(crate) fn stale_qp(&self, instance: NodeInstance) -> StaleQp {
        StaleQp {
            conn: self.conn.clone(),
            generation: self.generation,
            instance,
        }
    }

    /// Bytes that a request can carry itself.
    pub(crate) fn inline_max(&self) -> usize {
        self.endpoint.qp().max_inline_data()
    }

    /// Gives back the room of all but so many requests, which are posted now.
    pub(in crate::fabric) fn release_unused(&mut self, wr_count: u32) {
        let unused = self.wr_count.saturating_sub(wr_count);
        self.wr_count -= unused;
        self.conn.release_unused(wr_count, unused);
    }

    /// Gives back the room of what was posted, all of which has completed; a call stays announced.
    pub(crate) fn release_wrs(&mut self) {
        let wr_count = core::mem::take(&mut self.wr_count);
        self.conn.release_credits(wr_count, 0, (0, 0));
    }

    /// Whether an answer may still come on the queue pair that the request went by.
    pub(crate) fn is_current(&self) -> bool {
        self.conn.is_current(self.generation)
    }

    /// Gives up the queue pair, for want of completions.
    pub(crate) fn recover(&self, recovery: Recovery) -> Result {
        self.conn.report_failure(self.generation);
        match recovery {
            Recovery::ToError => self.endpoint.qp().modify_to_err(),
            Recovery::ToReset => self.endpoint.qp().modify_to_reset(),
        }
    }
}

impl Drop for ConnCredit {
    fn drop(&mut self) {
        let segments_and_bytes = (self.segments, self.vqp_bytes);
        self.conn
            .release_credits(self.wr_count, self.control_requests, segments_and_bytes);
    }
}
