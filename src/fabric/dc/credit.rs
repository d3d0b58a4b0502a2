// SPDX-License-Identifier: GPL-2.0

//! Right to post a number of work requests on a DCI.
//!
//! # Recovery
//!
//! A failure marks the DCI as failed, and the DCI accepts no new users. The drop of the last credit wakes the
//! connector, which restarts the DCI ([`DcTransport::recover`]).
//!
//! # Locking
//!
//! `Dci::state` (spin lock) is held for a few instructions, and this file takes no lock while it is held.
//! Posts and QP transitions run without it, since a transition sleeps.

use super::{DcTransport, Dci};
use crate::{
    errno::TryResult,
    fabric::send::slots::{Recovery, SlotGuard},
    mlx5::wr::Mlx5SendWr,
    verbs::cq::WcStatus,
};
use kernel::{
    prelude::*,
    sync::Arc,
    time::{Instant, Monotonic},
};
use kite_core::view::NodeInstance;

/// The right to post a number of work requests on a DCI. Dropping the credit returns them.
pub(crate) struct DciCredit {
    pub(super) transport: Arc<DcTransport>,
    pub(super) dci: Arc<Dci>,
    /// Index of the DCI.
    pub(crate) dci_index: usize,
    pub(super) wr_count: u32,
    pub(super) bytes: u64,
}

impl DciCredit {
    /// Posts work requests of this credit with one doorbell, if `is_admitted` returns `true`. See
    /// [`PostCredit::post`](crate::fabric::send::post_credit::PostCredit::post). Requests that the hardware
    /// rejects complete as flushed, and fail the slot.
    ///
    /// # Safety
    ///
    /// The local memory that `wrs` address must stay mapped while `slot` has requests in flight.
    pub(crate) unsafe fn post(
        &self,
        slot: &SlotGuard,
        wrs: &[Mlx5SendWr<'_>],
        is_admitted: impl Fn() -> bool,
    ) -> TryResult {
        // SAFETY: By the safety requirements of this function.
        let post = || unsafe { self.dci.qp.post(wrs) };
        let posted = slot.post_if(wrs.len() as u32, is_admitted, post)?;
        if posted < wrs.len() {
            // The hardware has failed: the credit guarantees capacity, and the requests are well formed.
            self.fail();
            (posted..wrs.len()).for_each(|_| slot.complete_unposted());
        }
        Ok(())
    }

    /// Marks the DCI as failed, because a request to `peer` completed with `status`. `Flushed` does not
    /// identify the cause, so `peer` is not recorded then.
    pub(crate) fn report_failure(&self, status: WcStatus, peer: NodeInstance) {
        let mut state = self.dci.state.lock();
        let was_healthy = state.mark_failed();
        if status != WcStatus::Flushed {
            state.failed_by = Some((peer, status));
        }
        drop(state);
        self.transport.stats.dci_errors.add(was_healthy.into());
        self.transport.stats.dcis.sub(was_healthy.into());
    }

    /// Returns the peer of the request that failed the DCI, and the status. `None` until the cause is found.
    pub(crate) fn failed_by(&self) -> Option<(NodeInstance, WcStatus)> {
        self.dci.state.lock().failed_by
    }

    /// Returns the time of the last progress on the DCI, and the bytes in flight.
    pub(in crate::fabric) fn last_progress(&self) -> (Instant<Monotonic>, u64) {
        self.dci.state.lock().usage.last_progress()
    }

    /// Marks the DCI as failed, and counts the failure.
    fn fail(&self) {
        let was_healthy = self.transport.fail_dci(&self.dci);
        self.transport.stats.dci_errors.add(was_healthy.into());
    }

    /// Fails the DCI, because completions are missing.
    ///
    /// # Errors
    ///
    /// - `EIO`: the hardware rejected the change of state.
    pub(crate) fn recover(&self, recovery: Recovery) -> Result {
        self.fail();
        match recovery {
            Recovery::ToError => self.dci.qp.fail(),
            Recovery::ToReset => self.dci.qp.reset(),
        }
    }
}

impl Drop for DciCredit {
    fn drop(&mut self) {
        let mut state = self.dci.state.lock();
        state.usage.remove_completed(self.wr_count, self.bytes);
        let drained = state.failed && state.is_idle();
        drop(state);
        if drained {
            self.transport.connector_waker.event.complete();
        }
    }
}
