// SPDX-License-Identifier: GPL-2.0

//! Send slots, and completion of the work requests posted with them.
//!
//! # Operation
//!
//! A thread acquires a slot and posts up to [`MAX_WRS_PER_SLOT`] work requests. Each work request carries the
//! index and the generation of the slot in its `wr_id`. The thread then waits ([`SlotGuard::wait`]) or polls
//! ([`super::inflight::PolledOp`]). A waiting thread polls the send CQs itself and accounts the completions
//! of all slots, so a short wait needs no context switch. After an adaptive spin the thread arms the CQs and
//! sleeps. The interrupt wakes the poller thread, which polls for all sleepers.
//!
//! A slot belongs to its [`SlotGuard`] until all its work requests have completed. The memory that they name
//! (the buffer of the slot, or attached memory) therefore stays mapped.
//!
//! # Recovery
//!
//! If completions are missing for 15 s, the QP is moved to ERR, which flushes its work requests. After
//! another 15 s, or if the transition fails, the QP is moved to RESET. The RNIC then accesses no memory for
//! the QP, and the remaining work requests are accounted as flushed. If RESET fails too, the slot and the
//! attached memory are leaked, since the RNIC may still access them.
//!
//! # Locking
//!
//! - `SendEngine::poll_lock` (spin lock) serializes polling of the send CQs and accounting of their
//!   completions.
//! - `FreeList::free` (spin lock) protects the list of free slots. `Conn::state` may be held when it is
//!   taken.
//! - No other lock is taken while one of the two is held, except inside completions and CQs.
//! - Both locks are taken in thread context only: a CQ interrupt only wakes the poller thread.
//! - `Slot::pending` is decremented with `Full` and loaded with `Acquire`. A reader of 0 sees `first_error`
//!   and `failed_count` of all completions.
//! - A sleeper sets `has_sleeper`, executes a full barrier, and then reads `pending`. The poller decrements
//!   `pending` with a full barrier and then reads `has_sleeper`. One of the two sees the other's store.

mod guard;
mod pool;

pub(crate) use self::{
    guard::{AttachedMemory, SlotGuard},
    pool::SlotClass,
};

use self::pool::FreeList;
use crate::{
    errno::{TryError, TryResult},
    fabric::recv::wake::ThreadWaker,
    mlx5,
    stats::Stats,
    sys::{
        adaptive_spin::AdaptiveSpin,
        completion::CountingCompletion,
        deadline::{Deadline, WAIT_SLICE_MS},
        pages::{ContiguousPages, MemcgCharge},
    },
    verbs::{
        cq::{Cq, WcStatus, WorkCompletion},
        device::IbDevice,
        dma::DmaPages,
    },
};
use kernel::{
    new_spinlock,
    page::PAGE_SIZE,
    prelude::*,
    sync::{
        atomic::{Acquire, Atomic, Full, Relaxed},
        Arc, SpinLock,
    },
};
use kite_core::{ring::MAX_MESSAGE_BYTES, wrid::WrId};

/// Maximum work requests posted with one slot.
pub(crate) const MAX_WRS_PER_SLOT: u32 = 32;

/// Bytes of the buffer of each slot: the longest ring message, rounded up to pages.
pub(crate) const SLOT_BUFFER_BYTES: usize = MAX_MESSAGE_BYTES.next_multiple_of(PAGE_SIZE);

/// Number of wait slices without completion (15 s) before the QP is moved to ERR. After the same number of
/// further slices, the QP is moved to RESET.
const STUCK_AFTER_SLICES: u32 = 300;

/// [`STUCK_AFTER_SLICES`] in ms, for users that poll.
pub(crate) const STUCK_AFTER_MS: u32 = STUCK_AFTER_SLICES * WAIT_SLICE_MS;

/// Slots reserved for control messages, which therefore never wait for data transfers.
const CONTROL_SLOTS: u32 = 32;

/// QP transition to recover from missing completions.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Recovery {
    /// Move the QP to ERR, which completes its work requests as flushed.
    ToError,
    /// Move the QP to RESET. The RNIC then no longer processes its work requests, completed or not.
    ToReset,
}

/// Accounting and buffer of the work requests of one slot.
#[pin_data]
struct Slot {
    /// Incremented after each successful wait, so that a late completion of earlier work requests is not
    /// matched.
    generation: Atomic<u32>,
    /// Number of work requests posted and not completed.
    pending: Atomic<u32>,
    /// First error, as [`WcStatus::code`]; 0 for none.
    first_error: Atomic<u32>,
    /// Number of failed work requests. They are the last ones, since nothing succeeds on a failed QP.
    failed_count: Atomic<u32>,
    /// 1 while the owner sleeps on `done`.
    has_sleeper: Atomic<u32>,
    /// Completed when `pending` reaches 0 and the owner sleeps.
    #[pin]
    done: CountingCompletion,
    /// Bounce buffer, mapped for the RNIC.
    buffer: DmaPages,
}

/// Slots and send CQs of one RNIC.
#[pin_data]
pub(crate) struct SendEngine {
    device: IbDevice,
    /// Send CQ of all RC QPs and of the setup QP.
    cq: Arc<Cq<ThreadWaker>>,
    /// Send CQ of all DCIs; `None` without DC.
    dc_cq: Option<Arc<mlx5::cq::Mlx5Cq<ThreadWaker>>>,
    /// Held by the thread that polls the CQs.
    #[pin]
    poll_lock: SpinLock<()>,
    slots: KVec<Pin<KBox<Slot>>>,
    data_slots: Pin<KBox<FreeList>>,
    control_slots: Pin<KBox<FreeList>>,
    /// Number of sleeping slot owners, for which the poller thread polls.
    sleepers: Atomic<u32>,
    adaptive_spin: AdaptiveSpin,
    stats: Arc<Stats>,
}

impl SendEngine {
    /// Creates `count` data slots, [`CONTROL_SLOTS`] control slots, and a CQ with an entry for each possible
    /// work request. The CQ size of the RNIC may reduce `count`.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: no memory.
    /// - The error of the RNIC if the CQ cannot be created or a buffer cannot be mapped.
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
                device,
                cq,
                dc_cq,
                poll_lock <- new_spinlock!((), "SendEngine::poll_lock"),
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

    /// Returns the number of free data slots.
    pub(crate) fn free_slots(&self) -> u32 {
        self.data_slots.free.lock().len() as u32
    }

    /// Returns the send CQ of verbs QPs.
    pub(crate) fn cq(&self) -> Arc<Cq<ThreadWaker>> {
        self.cq.clone()
    }

    /// Acquires a slot of `class`. Waits for a free slot if there is a deadline.
    ///
    /// # Errors
    ///
    /// - [`TryError::WouldBlock`]: no slot is free, and there is no deadline.
    /// - `ETIMEDOUT`: the deadline passed.
    /// - `EINTR`: a signal arrived that ends the wait according to the deadline.
    pub(crate) fn acquire_slot(
        self: &Arc<Self>,
        class: SlotClass,
        deadline: Option<Deadline>,
    ) -> TryResult<SlotGuard> {
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
            let deadline = deadline.ok_or(TryError::WouldBlock)?;
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

    /// Polls the CQs unless another thread does. Returns the number of completions.
    pub(crate) fn poll(&self) -> usize {
        let Some(_polling) = self.poll_lock.try_lock() else {
            return 0;
        };
        self.process_completions()
    }

    /// Polls the CQs, after any other polling thread. Returns the number of completions.
    fn poll_blocking(&self) -> usize {
        let _polling = self.poll_lock.lock();
        self.process_completions()
    }

    /// Processes one batch of completions of each CQ, and returns their number. More may be left.
    /// The caller must hold `poll_lock`.
    fn process_completions(&self) -> usize {
        let dc_cq = self.dc_cq.as_ref();
        let dc_count = dc_cq.map_or(0, |cq| cq.poll(|completion| self.on_completion(completion)));
        dc_count + self.cq.poll(|completion| self.on_completion(completion))
    }

    /// Accounts a work request that the RNIC rejected as failed, after [`SlotGuard::account_post`] counted
    /// the request.
    pub(in crate::fabric) fn complete_unposted(&self, wr_id: u64) {
        if let Some(slot) = self.slots.get(WrId::from_u64(wr_id).slot as usize) {
            // Fails if an earlier error is recorded, which stays.
            let _ = slot
                .first_error
                .cmpxchg(0, WcStatus::Flushed.code(), Relaxed);
            slot.failed_count.fetch_add(1u32, Relaxed);
            slot.pending.fetch_sub(1u32, Full);
            self.stats.inflight.sub(1);
        }
    }

    /// Returns `true` if a slot owner sleeps, so that the poller thread must poll.
    pub(crate) fn has_sleepers(&self) -> bool {
        self.sleepers.load(Acquire) != 0
    }

    /// Arms the CQs. Returns `true` if completions may have been missed: the caller must poll before it
    /// sleeps.
    pub(crate) fn arm(&self) -> bool {
        let missed = self.dc_cq.as_ref().is_some_and(|cq| {
            cq.arm();
            self.poll_blocking() != 0
        });
        self.cq.arm() || missed
    }

    /// Accounts a completion to its slot. A completion of a former generation of the slot is only counted.
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
            // Fails if an earlier error is recorded, which stays.
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
