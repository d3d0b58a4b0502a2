// SPDX-License-Identifier: GPL-2.0

//! Slot in use: accounting of its work requests, and the wait for their completion.
//!
//! # Operation
//!
//! [`SlotGuard::wait`] polls the CQs for an adaptive time. The thread then arms the CQs and sleeps, in slices
//! of [`WAIT_SLICE_MS`], each followed by a poll.
//!
//! # Recovery
//!
//! If work requests are still pending after [`super::STUCK_AFTER_MS`], the caller's `recover` moves their QP
//! to ERR. If the transition fails, or the QP does not flush them in the same time, `recover` moves the QP to
//! RESET, and the pending work requests are accounted as flushed. If RESET fails, the drop of the guard leaks
//! the slot and the attached memory.
//!
//! # Locking
//!
//! - `SendEngine::poll_lock` (spin lock) is only tried for a poll. It is taken before a sleep, and to account
//!   the work requests of a QP in RESET.
//! - `FreeList::free` (spin lock) is taken by the drop.
//! - [`SlotGuard::wait`] sleeps, so the caller must hold no spin lock.

use super::{pool::SlotClass, Recovery, SendEngine, Slot, STUCK_AFTER_SLICES};
use crate::{
    errno::{TryError, TryResult},
    sys::{deadline::WAIT_SLICE_MS, thread::without_preemption},
    verbs::{
        cq::WcStatus,
        dma::{DmaPages, LongTermDmaMap, RequestDmaMap},
        log::{rnic_err, rnic_warn},
        work::Sge,
    },
};
use kernel::{
    prelude::*,
    sync::{
        atomic::{Acquire, Full, Relaxed, Release},
        Arc,
    },
};
use kite_core::wrid::WrId;

/// User memory that work requests of a slot name.
pub(crate) enum AttachedMemory {
    /// Pages pinned for one request. Boxed, since guards are moved and few have such a mapping.
    User(KBox<RequestDmaMap>),
    /// Memory that stays mapped for its owner.
    Arena(Arc<LongTermDmaMap>),
}

/// Slot in use. Dropping frees the slot, or leaks it if work requests are still pending.
pub(crate) struct SlotGuard {
    pub(super) engine: Arc<SendEngine>,
    pub(super) class: SlotClass,
    pub(super) index: u32,
    pub(super) attached: Option<AttachedMemory>,
}

impl SlotGuard {
    fn slot(&self) -> &Slot {
        // The index is in bounds, since it comes from the list of free slots.
        &self.engine.slots[self.index as usize]
    }

    /// Returns the `wr_id` for work requests of the slot.
    pub(crate) fn wr_id(&self) -> u64 {
        let generation = self.slot().generation.load(Relaxed);
        WrId {
            slot: self.index,
            generation,
        }
        .to_u64()
    }

    /// Returns the buffer of the slot, which is mapped for the RNIC.
    pub(crate) fn buffer(&self) -> &DmaPages {
        &self.slot().buffer
    }

    /// Attaches user memory, which stays mapped until the slot is freed.
    pub(crate) fn attach(&mut self, memory: AttachedMemory) {
        self.attached = Some(memory);
    }

    /// Returns the SGEs of attached [`AttachedMemory::User`] memory; none if there is none.
    pub(crate) fn attached_sges(&self, key: u32) -> impl Iterator<Item = Sge> + '_ {
        let memory = match &self.attached {
            Some(AttachedMemory::User(memory)) => Some(memory),
            _ => None,
        };
        memory.into_iter().flat_map(move |memory| memory.sges(key))
    }

    /// Returns the attached arena.
    pub(crate) fn arena(&self) -> Option<&LongTermDmaMap> {
        match &self.attached {
            Some(AttachedMemory::Arena(arena)) => Some(arena),
            _ => None,
        }
    }

    /// Accounts `count` work requests that are about to be posted.
    pub(crate) fn account_post(&self, count: u32) {
        self.slot().pending.fetch_add(count, Full);
        self.engine.stats.inflight.add(count.into());
        self.engine.stats.work_requests.add(count.into());
    }

    /// Reverts [`Self::account_post`] for `count` work requests that were not posted.
    pub(crate) fn unaccount_post(&self, count: u32) {
        self.slot().pending.fetch_sub(count, Full);
        self.engine.stats.inflight.sub(count.into());
    }

    /// Calls `post` to post `count` work requests, if `is_admitted` returns `true`. Returns the number of posted
    /// work requests.
    ///
    /// Both are called with preemption disabled. So no other task runs between a check that limits the time
    /// of the requests and their doorbell.
    ///
    /// # Errors
    ///
    /// - [`TryError::WouldBlock`]: `is_admitted` returned `false`.
    pub(crate) fn post_if(
        &self,
        count: u32,
        is_admitted: impl FnOnce() -> bool,
        post: impl FnOnce() -> usize,
    ) -> TryResult<usize> {
        self.account_post(count);
        let posted = without_preemption(|| is_admitted().then(post));
        posted.ok_or_else(|| {
            self.unaccount_post(count);
            TryError::WouldBlock
        })
    }

    /// Makes [`Self::wait`] return [`WcStatus::Flushed`] unless an earlier error is recorded: posting failed.
    pub(crate) fn mark_failed(&self) {
        // Fails if an earlier error is recorded, which stays.
        let _ = self
            .slot()
            .first_error
            .cmpxchg(0, WcStatus::Flushed.code(), Relaxed);
    }

    /// Waits until all work requests have completed, and returns the first error or success. The slot can
    /// then be used for further work requests.
    ///
    /// `recover` is called if completions are missing. If recovery fails, returns [`WcStatus::TimedOut`], and
    /// dropping the guard leaks the slot and the attached memory.
    #[must_use]
    pub(crate) fn wait(&self, recover: impl Fn(Recovery) -> Result) -> WcStatus {
        let poll_done = || {
            while !self.is_done() && self.engine.poll() != 0 {}
            self.is_done()
        };
        if let Some(_spin_sample) = self.engine.adaptive_spin.spin_until(poll_done) {
            self.sleep_until_done(recover);
        }
        let slot = self.slot();
        if !self.is_done() {
            return WcStatus::TimedOut;
        }
        slot.generation.fetch_add(1u32, Relaxed);
        WcStatus::from_code(slot.first_error.xchg(0, Relaxed))
    }

    /// Accounts one work request that was not posted as failed. The caller calls this once for the rejected
    /// work request and for each one after it.
    pub(crate) fn complete_unposted(&self) {
        self.engine.complete_unposted(self.wr_id());
    }

    /// Returns the first error of the completed work requests, or success.
    pub(crate) fn first_error(&self) -> WcStatus {
        WcStatus::from_code(self.slot().first_error.load(Relaxed))
    }

    /// Returns the number of work requests that completed with an error.
    pub(crate) fn failed_count(&self) -> u32 {
        self.slot().failed_count.load(Relaxed)
    }

    /// Polls the CQs. Processes completions of all slots.
    pub(crate) fn poll_cq(&self) {
        self.engine.poll();
    }

    /// Returns `true` if all work requests have completed.
    pub(crate) fn is_done(&self) -> bool {
        self.slot().pending.load(Acquire) == 0
    }

    /// Sleeps until all work requests have completed, and recovers the QP if completions are missing.
    fn sleep_until_done(&self, recover: impl Fn(Recovery) -> Result) {
        let (engine, slot) = (&self.engine, self.slot());
        engine.stats.blocked_waits.add(1);
        slot.has_sleeper.store(1, Release);
        engine.sleepers.fetch_add(1u32, Full);
        if !self.sleep_slices() {
            self.warn_stuck();
            if recover(Recovery::ToError).is_err() || !self.sleep_slices() {
                self.force_reset(recover);
            }
        }
        engine.sleepers.fetch_sub(1u32, Full);
        slot.has_sleeper.store(0, Release);
    }

    /// Logs that the QP of the work requests is moved to ERR.
    pub(crate) fn warn_stuck(&self) {
        rnic_warn!(
            self.engine.device,
            "work requests do not complete: moving their QP to ERR\n"
        );
    }

    /// Resets a QP in ERR that does not flush, and completes the work requests of the slot.
    pub(crate) fn force_reset(&self, recover: impl Fn(Recovery) -> Result) {
        rnic_err!(
            self.engine.device,
            "failed QP does not flush: moving to RESET\n"
        );
        match recover(Recovery::ToReset) {
            Ok(()) => self.force_complete(),
            Err(error) => rnic_err!(
                self.engine.device,
                "QP cannot be moved to RESET: {error:?}\n"
            ),
        }
    }

    /// Sleeps until all work requests have completed, for at most [`super::STUCK_AFTER_MS`]. Returns `true`
    /// on completion.
    fn sleep_slices(&self) -> bool {
        for _ in 0..STUCK_AFTER_SLICES {
            while self.engine.arm() && self.engine.poll_blocking() != 0 {}
            if self.is_done() {
                return true;
            }
            self.slot().done.wait_timeout_ms(WAIT_SLICE_MS);
            self.engine.poll();
            if self.is_done() {
                return true;
            }
        }
        false
    }

    /// Accounts the pending work requests of a reset QP as flushed. The CQ has the completions of all other
    /// work requests, and receives no further ones.
    fn force_complete(&self) {
        let (engine, slot) = (&self.engine, self.slot());
        let _polling = engine.poll_lock.lock();
        while engine.process_completions() != 0 {}
        let flushed = slot.pending.xchg(0, Full);
        slot.failed_count.fetch_add(flushed, Relaxed);
        engine.stats.inflight.sub(flushed.into());
        self.mark_failed();
    }
}

impl Drop for SlotGuard {
    fn drop(&mut self) {
        if self.is_done() {
            // The next owner must not see errors of this one.
            self.slot().first_error.store(0, Relaxed);
            self.slot().failed_count.store(0, Relaxed);
            return self.engine.free_list(self.class).push(self.index);
        }
        // Leak the slot and its memory: the RNIC may still access both.
        rnic_err!(
            self.engine.device,
            "slot released with work requests in flight: slot lost\n"
        );
        core::mem::forget(self.attached.take());
    }
}
