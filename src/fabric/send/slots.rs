// SPDX-License-Identifier: GPL-2.0

//! The send side: slots, and waiting for what was posted with them.
//!
//! A thread claims a slot, posts up to [`MAX_POSTED`] requests that carry the slot's number and
//! generation as their `wr_id`, and waits, or looks now and then ([`super::inflight::Watched`]). It polls the
//! completion queue itself, and whoever polls takes note of everybody's completions; nobody is scheduled
//! for a short wait. After a bounded spin it arms the queue and sleeps: the interrupt wakes the poller
//! thread, which polls for the sleepers.
//!
//! A slot belongs to its claim until all of its requests have completed, so the memory that they name
//! (the slot's buffer, or the user buffer that the claim holds) stays mapped. If completions do not
//! come, the queue pair is made to fail and then reset, after which the RNIC touches nothing any more.

use crate::{
    fabric::recv::wake::ThreadWaker,
    mlx5,
    stats::Stats,
    sys::{
        adaptive_spin::AdaptiveSpin,
        completion::CountingCompletion,
        deadline::Deadline,
        pages::{ContiguousPages, MemcgCharge},
    },
    verbs::{
        cq::{Cq, WcStatus, WorkCompletion},
        device::IbDevice,
        dma::{DmaPages, LongTermDmaMap, RequestDmaMap},
        work::Sge,
    },
};
use kernel::{
    new_spinlock,
    page::PAGE_SIZE,
    prelude::*,
    sync::{
        atomic::{Acquire, Atomic, Full, Relaxed, Release},
        Arc, SpinLock,
    },
};
use kite_core::{ring::MAX_MESSAGE_BYTES, wrid::WrId};

/// Most requests posted with one claim.
pub(crate) const MAX_WRS_PER_SLOT: u32 = 32;

/// Bytes of the buffer of each slot: the longest message of a ring.
pub(crate) const SLOT_BUFFER_BYTES: usize = MAX_MESSAGE_BYTES.next_multiple_of(PAGE_SIZE);

/// How long a sleeper trusts the interrupt before it looks itself.
const WAIT_SLICE_MS: u32 = 50;

/// After this many naps without completion something is wrong with the RNIC; after as many again with
/// its way to fail, too.
const STUCK_AFTER_SLICES: u32 = 300;

/// That in milliseconds, for who looks now and then.
pub(crate) const STUCK_AFTER_MS: u32 = STUCK_AFTER_SLICES * WAIT_SLICE_MS;

/// Slots that only control messages get, so that they pass however many accesses wait for them.
const CONTROL_SLOTS: u32 = 32;

/// What to do about requests that take longer than any RNIC should.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Recovery {
    /// Make them complete as flushed.
    ToError,
    /// See to it that the RNIC does nothing for them any more, completed or not.
    ToReset,
}

/// What a slot is claimed for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum SlotClass {
    /// Reads and writes.
    Data,
    /// Messages between kernels.
    Control,
}

/// The slots of one class that are free.
#[pin_data]
struct FreeList {
    #[pin]
    free: SpinLock<KVec<u32>>,
    #[pin]
    freed: CountingCompletion,
    /// Claimers that wait for `freed`.
    waiters: Atomic<u32>,
}

impl FreeList {
    /// All of `slots` are free.
    fn new(slots: core::ops::Range<u32>) -> Result<Pin<KBox<Self>>> {
        let mut free = KVec::with_capacity(slots.len(), GFP_KERNEL)?;
        for slot in slots {
            free.push(slot, GFP_KERNEL)?;
        }
        KBox::pin_init(
            pin_init!(Self {
                free <- new_spinlock!(free),
                freed <- CountingCompletion::new(),
                waiters: Atomic::new(0u32),
            }),
            GFP_KERNEL,
        )
    }

    fn pop(&self) -> Option<u32> {
        self.free.lock().pop()
    }

    fn push(&self, slot: u32) {
        // The list was made with room for all its slots, so nothing is allocated here.
        let _ = self.free.lock().push(slot, GFP_ATOMIC);
        // The lock orders this after whoever began to wait before the slot was free.
        if self.waiters.load(Acquire) != 0 {
            self.freed.complete();
        }
    }

    fn wait_free(&self, deadline: Deadline) -> Result {
        self.waiters.fetch_add(1u32, Full);
        if !self.free.lock().is_empty() {
            // One came free before it could be known that we wait.
            self.freed.complete();
        }
        let result = self
            .freed
            .wait_interruptible_timeout_ms(deadline.remaining_ms().min(WAIT_SLICE_MS));
        self.waiters.fetch_sub(1u32, Full);
        result.map(|_| ()).or_else(|_| deadline.handle_signal())
    }
}

/// The requests of one claim.
#[pin_data]
struct Slot {
    generation: Atomic<u32>,
    /// Posted and not completed.
    pending: Atomic<u32>,
    /// The first error, as [`Status::code`].
    first_error: Atomic<u32>,
    /// Requests that did not succeed. They are the last ones: nothing succeeds on a queue pair that failed.
    failed_count: Atomic<u32>,
    /// Whether the claimer sleeps on `done`.
    has_sleeper: Atomic<u32>,
    #[pin]
    done: CountingCompletion,
    buffer: DmaPages,
}

/// The slots and the send completion queue of one RNIC.
#[pin_data]
pub(crate) struct SendEngine {
    cq: Arc<Cq<ThreadWaker>>,
    /// That of DC, if the RNIC has it.
    dc_cq: Option<Arc<mlx5::cq::Mlx5Cq<ThreadWaker>>>,
    /// Held by the one thread that polls.
    #[pin]
    poll_lock: SpinLock<()>,
    slots: KVec<Pin<KBox<Slot>>>,
    data_slots: Pin<KBox<FreeList>>,
    control_slots: Pin<KBox<FreeList>>,
    /// Claimers that sleep; the poller thread polls for them.
    sleepers: Atomic<u32>,
    adaptive_spin: AdaptiveSpin,
    stats: Arc<Stats>,
}

impl SendEngine {
    /// Makes `count` slots for accesses and some for control messages, and a completion queue with room
    /// for all they can post.
    pub(crate) fn new(
        device: IbDevice,
        count: u32,
        waker: Arc<ThreadWaker>,
        dc_cq: Option<Arc<mlx5::cq::Mlx5Cq<ThreadWaker>>>,
        stats: Arc<Stats>,
    ) -> Result<Arc<Self>> {
        let max_count = (device.limits().max_cqe / MAX_WRS_PER_SLOT).saturating_sub(CONTROL_SLOTS);
        let count = count.min(max_count).max(1);
        let total = count + CONTROL_SLOTS;
        let cqe_count = total * MAX_WRS_PER_SLOT;
        let cq = Arc::new(Cq::new(device, cqe_count, 0, waker)?, GFP_KERNEL)?;
        let mut slots = KVec::with_capacity(total as usize, GFP_KERNEL)?;
        for _ in 0..total {
            slots.push(Slot::new(device)?, GFP_KERNEL)?;
        }
        let (data_slots, control_slots) = (FreeList::new(0..count)?, FreeList::new(count..total)?);
        Arc::pin_init(
            pin_init!(Self {
                cq,
                dc_cq,
                poll_lock <- new_spinlock!(()),
                slots,
                data_slots,
                control_slots,
                sleepers: Atomic::new(0u32),
                adaptive_spin: AdaptiveSpin::new(),
                stats,
            }),
            GFP_KERNEL,
        )
    }

    /// Slots for accesses that are free.
    pub(crate) fn free_slots(&self) -> u32 {
        self.data_slots.free.lock().len() as u32
    }

    /// The completion queue, for queue pairs to report to.
    pub(crate) fn cq(&self) -> Arc<Cq<ThreadWaker>> {
        self.cq.clone()
    }

    /// Claims a slot; waits while there is none.
    ///
    /// # Errors
    ///
    /// - `EAGAIN` if it would have to wait, and there is no deadline.
    /// - `ETIMEDOUT`; `EINTR` if the deadline is interruptible.
    pub(crate) fn acquire_slot(
        self: &Arc<Self>,
        class: SlotClass,
        deadline: Option<Deadline>,
    ) -> Result<SlotGuard> {
        let free_list = self.free_list(class);
        loop {
            if let Some(index) = free_list.pop() {
                return Ok(SlotGuard {
                    engine: self.clone(),
                    class,
                    index,
                    attached: None,
                });
            }
            let deadline = deadline.ok_or(EAGAIN)?;
            deadline.check()?;
            self.stats.slot_waits.add(1);
            free_list.wait_free(deadline)?;
        }
    }

    fn free_list(&self, class: SlotClass) -> &FreeList {
        match class {
            SlotClass::Data => &self.data_slots,
            SlotClass::Control => &self.control_slots,
        }
    }

    /// Polls unless somebody else does. Returns how many completions there were.
    pub(crate) fn poll(&self) -> usize {
        let Some(_polling) = self.poll_lock.try_lock() else {
            return 0;
        };
        self.process_completions()
    }

    /// Polls, after whoever does. Returns how many completions were left.
    fn poll_blocking(&self) -> usize {
        let _polling = self.poll_lock.lock();
        self.process_completions()
    }

    /// Takes completions, of which there may be more. To be called with `polling`.
    fn process_completions(&self) -> usize {
        let dc_cq = self.dc_cq.as_ref();
        let dc_count = dc_cq.map_or(0, |cq| cq.poll(|completion| self.on_completion(completion)));
        dc_count + self.cq.poll(|completion| self.on_completion(completion))
    }

    /// A request was not posted after all: its claim, which says that it was, fails.
    pub(in crate::fabric) fn complete_unposted(&self, wr_id: u64) {
        if let Some(slot) = self.slots.get(WrId::from_u64(wr_id).slot as usize) {
            let _ = slot
                .first_error
                .cmpxchg(0, WcStatus::Flushed.code(), Relaxed);
            slot.failed_count.fetch_add(1u32, Relaxed);
            slot.pending.fetch_sub(1u32, Full);
            self.stats.inflight.sub(1);
        }
    }

    /// Whether somebody sleeps until the poller thread finds a completion.
    pub(crate) fn has_sleepers(&self) -> bool {
        self.sleepers.load(Acquire) != 0
    }

    /// Asks for an interrupt. Returns whether to poll first.
    pub(crate) fn arm(&self) -> bool {
        let missed = self.dc_cq.as_ref().is_some_and(|cq| {
            cq.arm();
            self.poll_blocking() != 0
        });
        self.cq.arm() || missed
    }

    fn on_completion(&self, completion: WorkCompletion) {
        let id = WrId::from_u64(completion.wr_id);
        let Some(slot) = self.slots.get(id.slot as usize) else {
            return self.stats.unmatched_completions.add(1);
        };
        let is_pending = slot.pending.load(Acquire) != 0;
        if !is_pending || slot.generation.load(Acquire) != id.generation {
            return self.stats.unmatched_completions.add(1);
        }
        if completion.status != WcStatus::Success {
            let _ = slot
                .first_error
                .cmpxchg(0, completion.status.code(), Relaxed);
            slot.failed_count.fetch_add(1u32, Relaxed);
        }
        self.stats.inflight.sub(1);
        if slot.pending.fetch_sub(1u32, Full) == 1 && slot.has_sleeper.load(Acquire) != 0 {
            slot.done.complete();
        }
    }
}

impl Slot {
    fn new(device: IbDevice) -> Result<Pin<KBox<Self>>> {
        let buffer = DmaPages::new(
            device,
            ContiguousPages::new(SLOT_BUFFER_BYTES, MemcgCharge::Kernel)?,
        )?;
        KBox::pin_init(
            pin_init!(Self {
                generation: Atomic::new(0u32),
                pending: Atomic::new(0u32),
                first_error: Atomic::new(0u32),
                failed_count: Atomic::new(0u32),
                has_sleeper: Atomic::new(0u32),
                done <- CountingCompletion::new(),
                buffer,
            }),
            GFP_KERNEL,
        )
    }
}

/// Memory of users that requests name.
pub(crate) enum AttachedMemory {
    /// Boxed, as claims are moved and few have one.
    User(KBox<RequestDmaMap>),
    Arena(Arc<LongTermDmaMap>),
}

/// A slot in use.
pub(crate) struct SlotGuard {
    engine: Arc<SendEngine>,
    class: SlotClass,
    index: u32,
    attached: Option<AttachedMemory>,
}

impl SlotGuard {
    fn slot(&self) -> &Slot {
        // In bounds: indices come from the list of free slots.
        &self.engine.slots[self.index as usize]
    }

    /// What the requests of this claim carry as `wr_id`.
    pub(crate) fn wr_id(&self) -> u64 {
        let generation = self.slot().generation.load(Relaxed);
        WrId {
            slot: self.index,
            generation,
        }
        .to_u64()
    }

    /// The buffer of the slot, mapped for the RNIC.
    pub(crate) fn buffer(&self) -> &DmaPages {
        &self.slot().buffer
    }

    /// Keeps memory of users mapped until the requests have completed.
    pub(crate) fn attach(&mut self, memory: AttachedMemory) {
        self.attached = Some(memory);
    }

    /// The entries of the buffer that it holds.
    pub(crate) fn attached_sges(&self, key: u32) -> impl Iterator<Item = Sge> + '_ {
        let memory = match &self.attached {
            Some(AttachedMemory::User(memory)) => Some(memory),
            _ => None,
        };
        memory.into_iter().flat_map(move |memory| memory.sges(key))
    }

    /// The arena that it holds.
    pub(crate) fn arena(&self) -> Option<&LongTermDmaMap> {
        match &self.attached {
            Some(AttachedMemory::Arena(arena)) => Some(arena),
            _ => None,
        }
    }

    /// Takes note that so many more requests are about to be posted.
    pub(crate) fn account_post(&self, count: u32) {
        self.slot().pending.fetch_add(count, Full);
        self.engine.stats.inflight.add(count.into());
        self.engine.stats.work_requests.add(count.into());
    }

    /// Takes that back: the request was refused.
    pub(crate) fn unaccount_post(&self) {
        self.slot().pending.fetch_sub(1u32, Full);
        self.engine.stats.inflight.sub(1);
    }

    /// Makes [`Self::wait`] report that the queue pair failed: a request could not be posted.
    pub(crate) fn mark_failed(&self) {
        let _ = self
            .slot()
            .first_error
            .cmpxchg(0, WcStatus::Flushed.code(), Relaxed);
    }

    /// Waits until all requests have completed. Returns the first failure, or success, and makes the
    /// claim ready for other requests. `rescue` is called when they do not complete; if it fails too, the
    /// slot and what it holds are given up.
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

    /// Takes note that a request that was to be posted was refused, and so were those after it.
    pub(crate) fn complete_unposted(&self) {
        self.engine.complete_unposted(self.wr_id());
    }

    /// How the first request failed that did, of those that have completed.
    pub(crate) fn first_error(&self) -> WcStatus {
        WcStatus::from_code(self.slot().first_error.load(Relaxed))
    }

    /// Requests that have completed and did not succeed.
    pub(crate) fn failed_count(&self) -> u32 {
        self.slot().failed_count.load(Relaxed)
    }

    /// Polls, for whoever's completions.
    pub(crate) fn poll_cq(&self) {
        self.engine.poll();
    }

    /// Whether all requests have completed.
    pub(crate) fn is_done(&self) -> bool {
        self.slot().pending.load(Acquire) == 0
    }

    fn sleep_until_done(&self, recover: impl Fn(Recovery) -> Result) {
        let (engine, slot) = (&self.engine, self.slot());
        engine.stats.blocked_waits.add(1);
        slot.has_sleeper.store(1, Release);
        engine.sleepers.fetch_add(1u32, Full);
        if !self.sleep_slices() {
            pr_warn!("work requests do not complete: moving their QP to ERR\n");
            if recover(Recovery::ToError).is_err() || !self.sleep_slices() {
                self.force_reset(recover);
            }
        }
        engine.sleepers.fetch_sub(1u32, Full);
        slot.has_sleeper.store(0, Release);
    }

    /// Ends requests whose queue pair was made to fail and does not flush.
    pub(crate) fn force_reset(&self, recover: impl Fn(Recovery) -> Result) {
        pr_err!("failed QP does not flush: moving to RESET\n");
        match recover(Recovery::ToReset) {
            Ok(()) => self.force_complete(),
            Err(error) => pr_err!("QP cannot be moved to RESET: {error:?}\n"),
        }
    }

    /// Sleeps until all requests have completed, but not for ever. Returns whether they have.
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

    /// Takes requests for flushed whose queue pair was reset: what has completed of them is in the
    /// completion queue by now, and nothing is added.
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
            // A failure to post is not to be the next claimer's.
            self.slot().first_error.store(0, Relaxed);
            self.slot().failed_count.store(0, Relaxed);
            return self.engine.free_list(self.class).push(self.index);
        }
        // What the RNIC may still touch is better lost than used again.
        pr_err!("slot released with work requests in flight: slot lost\n");
        core::mem::forget(self.attached.take());
    }
}
