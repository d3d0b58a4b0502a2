// SPDX-License-Identifier: GPL-2.0

//! The send side: slots, and waiting for what was posted with them.
//!
//! A thread claims a slot, posts up to [`MAX_POSTED`] requests that carry the slot's number and
//! generation as their `wr_id`, and waits, or looks now and then ([`super::flight::Watched`]). It polls the
//! completion queue itself, and whoever polls takes note of everybody's completions; nobody is scheduled
//! for a short wait. After a bounded spin it arms the queue and sleeps: the interrupt wakes the poller
//! thread, which polls for the sleepers.
//!
//! A slot belongs to its claim until all of its requests have completed, so the memory that they name
//! (the slot's buffer, or the user buffer that the claim holds) stays mapped. If completions do not
//! come, the queue pair is made to fail and then reset, after which the RNIC touches nothing any more.

use super::wake::Wake;
use crate::{
    dc,
    stats::Stats,
    sys::{
        deadline::Deadline,
        event::Event,
        pages::{Charge, Pages},
        patience::Patience,
    },
    verbs::{
        cq::{Completion, Cq, Status},
        device::Device,
        dma::{DmaArena, DmaPages, DmaUser},
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
use kite_core::{ring::MESSAGE_MAX, wrid::WrId};

/// Most requests posted with one claim.
pub(crate) const MAX_POSTED: u32 = 32;

/// Bytes of the buffer of each slot: the longest message of a ring.
pub(crate) const BUFFER_SIZE: usize = MESSAGE_MAX.next_multiple_of(PAGE_SIZE);

/// How long a sleeper trusts the interrupt before it looks itself.
const NAP_MS: u32 = 50;

/// After this many naps without completion something is wrong with the RNIC; after as many again with
/// its way to fail, too.
const MAX_NAPS: u32 = 300;

/// That in milliseconds, for who looks now and then.
pub(crate) const PATIENCE_MS: u32 = MAX_NAPS * NAP_MS;

/// Slots that only control messages get, so that they pass however many accesses wait for them.
const CONTROL_SLOTS: u32 = 32;

/// What to do about requests that take longer than any RNIC should.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rescue {
    /// Make them complete as flushed.
    Fail,
    /// See to it that the RNIC does nothing for them any more, completed or not.
    Reset,
}

/// What a slot is claimed for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Class {
    /// Reads and writes.
    Data,
    /// Messages between kernels.
    Control,
}

/// The slots of one class that are free.
#[pin_data]
struct Pool {
    #[pin]
    free: SpinLock<KVec<u32>>,
    #[pin]
    freed: Event,
    /// Claimers that wait for `freed`.
    waiting: Atomic<u32>,
}

impl Pool {
    /// All of `slots` are free.
    fn new(slots: core::ops::Range<u32>) -> Result<Pin<KBox<Self>>> {
        let mut free = KVec::with_capacity(slots.len(), GFP_KERNEL)?;
        for slot in slots {
            free.push(slot, GFP_KERNEL)?;
        }
        KBox::pin_init(
            pin_init!(Self {
                free <- new_spinlock!(free),
                freed <- Event::new(),
                waiting: Atomic::new(0u32),
            }),
            GFP_KERNEL,
        )
    }

    fn take(&self) -> Option<u32> {
        self.free.lock().pop()
    }

    fn give(&self, slot: u32) {
        // The list was made with room for all its slots, so nothing is allocated here.
        let _ = self.free.lock().push(slot, GFP_ATOMIC);
        // The lock orders this after whoever began to wait before the slot was free.
        if self.waiting.load(Acquire) != 0 {
            self.freed.signal();
        }
    }

    fn wait(&self, deadline: Deadline) -> Result {
        self.waiting.fetch_add(1u32, Full);
        if !self.free.lock().is_empty() {
            // One came free before it could be known that we wait.
            self.freed.signal();
        }
        let woken = self
            .freed
            .wait_interruptible(deadline.left_ms().min(NAP_MS));
        self.waiting.fetch_sub(1u32, Full);
        woken.map(|_| ()).or_else(|_| deadline.on_signal())
    }
}

/// The requests of one claim.
#[pin_data]
struct Slot {
    generation: Atomic<u32>,
    /// Posted and not completed.
    pending: Atomic<u32>,
    /// The first error, as [`Status::code`].
    failure: Atomic<u32>,
    /// Requests that did not succeed. They are the last ones: nothing succeeds on a queue pair that failed.
    failed: Atomic<u32>,
    /// Whether the claimer sleeps on `done`.
    asleep: Atomic<u32>,
    #[pin]
    done: Event,
    buffer: DmaPages,
}

/// The slots and the send completion queue of one RNIC.
#[pin_data]
pub(crate) struct Sender {
    cq: Arc<Cq<Wake>>,
    /// That of DC, if the RNIC has it.
    dynamic: Option<Arc<dc::cq::Cq<Wake>>>,
    /// Held by the one thread that polls.
    #[pin]
    polling: SpinLock<()>,
    slots: KVec<Pin<KBox<Slot>>>,
    data: Pin<KBox<Pool>>,
    control: Pin<KBox<Pool>>,
    /// Claimers that sleep; the poller thread polls for them.
    sleepers: Atomic<u32>,
    patience: Patience,
    stats: Arc<Stats>,
}

impl Sender {
    /// Makes `count` slots for accesses and some for control messages, and a completion queue with room
    /// for all they can post.
    pub(crate) fn new(
        device: Device,
        count: u32,
        wake: Arc<Wake>,
        dynamic: Option<Arc<dc::cq::Cq<Wake>>>,
        stats: Arc<Stats>,
    ) -> Result<Arc<Self>> {
        let most = (device.limits().cqe / MAX_POSTED).saturating_sub(CONTROL_SLOTS);
        let count = count.min(most).max(1);
        let all = count + CONTROL_SLOTS;
        let entries = all * MAX_POSTED;
        let cq = Arc::new(Cq::new(device, entries, 0, wake)?, GFP_KERNEL)?;
        let mut slots = KVec::with_capacity(all as usize, GFP_KERNEL)?;
        for _ in 0..all {
            slots.push(Slot::new(device)?, GFP_KERNEL)?;
        }
        let (data, control) = (Pool::new(0..count)?, Pool::new(count..all)?);
        Arc::pin_init(
            pin_init!(Self {
                cq,
                dynamic,
                polling <- new_spinlock!(()),
                slots,
                data,
                control,
                sleepers: Atomic::new(0u32),
                patience: Patience::new(),
                stats,
            }),
            GFP_KERNEL,
        )
    }

    /// Slots for accesses that are free.
    pub(crate) fn free_slots(&self) -> u32 {
        self.data.free.lock().len() as u32
    }

    /// The completion queue, for queue pairs to report to.
    pub(crate) fn cq(&self) -> Arc<Cq<Wake>> {
        self.cq.clone()
    }

    /// Claims a slot; waits while there is none.
    ///
    /// # Errors
    ///
    /// - `EAGAIN` if it would have to wait, and there is no deadline.
    /// - `ETIMEDOUT`; `EINTR` if the deadline is interruptible.
    pub(crate) fn claim(
        self: &Arc<Self>,
        class: Class,
        deadline: Option<Deadline>,
    ) -> Result<Claim> {
        let pool = self.pool(class);
        loop {
            if let Some(index) = pool.take() {
                return Ok(Claim {
                    sender: self.clone(),
                    class,
                    index,
                    user: None,
                });
            }
            let deadline = deadline.ok_or(EAGAIN)?;
            deadline.check()?;
            self.stats.slot_waits.add(1);
            pool.wait(deadline)?;
        }
    }

    fn pool(&self, class: Class) -> &Pool {
        match class {
            Class::Data => &self.data,
            Class::Control => &self.control,
        }
    }

    /// Polls unless somebody else does. Returns how many completions there were.
    pub(crate) fn poll(&self) -> usize {
        let Some(_polling) = self.polling.try_lock() else {
            return 0;
        };
        self.take()
    }

    /// Polls, after whoever does. Returns how many completions were left.
    fn poll_in_turn(&self) -> usize {
        let _polling = self.polling.lock();
        self.take()
    }

    /// Takes completions, of which there may be more. To be called with `polling`.
    fn take(&self) -> usize {
        let dynamic = self.dynamic.as_ref();
        let dynamic = dynamic.map_or(0, |cq| cq.poll(|completion| self.complete(completion)));
        dynamic + self.cq.poll(|completion| self.complete(completion))
    }

    /// A request was not posted after all: its claim, which says that it was, fails.
    pub(super) fn refused(&self, wr_id: u64) {
        if let Some(slot) = self.slots.get(WrId::from_u64(wr_id).slot as usize) {
            let _ = slot.failure.cmpxchg(0, Status::Flushed.code(), Relaxed);
            slot.failed.fetch_add(1u32, Relaxed);
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
        let missed = self.dynamic.as_ref().is_some_and(|cq| {
            cq.arm();
            self.poll_in_turn() != 0
        });
        self.cq.arm() || missed
    }

    fn complete(&self, completion: Completion) {
        let id = WrId::from_u64(completion.wr_id);
        let Some(slot) = self.slots.get(id.slot as usize) else {
            return self.stats.stray_completions.add(1);
        };
        let posted = slot.pending.load(Acquire) != 0;
        if !posted || slot.generation.load(Acquire) != id.generation {
            return self.stats.stray_completions.add(1);
        }
        if completion.status != Status::Success {
            let _ = slot.failure.cmpxchg(0, completion.status.code(), Relaxed);
            slot.failed.fetch_add(1u32, Relaxed);
        }
        self.stats.inflight.sub(1);
        if slot.pending.fetch_sub(1u32, Full) == 1 && slot.asleep.load(Acquire) != 0 {
            slot.done.signal();
        }
    }
}

impl Slot {
    fn new(device: Device) -> Result<Pin<KBox<Self>>> {
        let buffer = DmaPages::new(device, Pages::new(BUFFER_SIZE, Charge::Kernel)?)?;
        KBox::pin_init(
            pin_init!(Self {
                generation: Atomic::new(0u32),
                pending: Atomic::new(0u32),
                failure: Atomic::new(0u32),
                failed: Atomic::new(0u32),
                asleep: Atomic::new(0u32),
                done <- Event::new(),
                buffer,
            }),
            GFP_KERNEL,
        )
    }
}

/// Memory of users that requests name.
pub(crate) enum Held {
    /// Boxed, as claims are moved and few have one.
    User(KBox<DmaUser>),
    Arena(Arc<DmaArena>),
}

/// A slot in use.
pub(crate) struct Claim {
    sender: Arc<Sender>,
    class: Class,
    index: u32,
    user: Option<Held>,
}

impl Claim {
    fn slot(&self) -> &Slot {
        // In bounds: indices come from the list of free slots.
        &self.sender.slots[self.index as usize]
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
    pub(crate) fn hold(&mut self, user: Held) {
        self.user = Some(user);
    }

    /// The entries of the buffer that it holds.
    pub(crate) fn held(&self, key: u32) -> impl Iterator<Item = Sge> + '_ {
        let user = match &self.user {
            Some(Held::User(user)) => Some(user),
            _ => None,
        };
        user.into_iter().flat_map(move |user| user.sges(key))
    }

    /// The arena that it holds.
    pub(crate) fn arena(&self) -> Option<&DmaArena> {
        match &self.user {
            Some(Held::Arena(arena)) => Some(arena),
            _ => None,
        }
    }

    /// Takes note that so many more requests are about to be posted.
    pub(crate) fn before_post(&self, count: u32) {
        self.slot().pending.fetch_add(count, Full);
        self.sender.stats.inflight.add(count.into());
        self.sender.stats.work_requests.add(count.into());
    }

    /// Takes that back: the request was refused.
    pub(crate) fn not_posted(&self) {
        self.slot().pending.fetch_sub(1u32, Full);
        self.sender.stats.inflight.sub(1);
    }

    /// Makes [`Self::wait`] report that the queue pair failed: a request could not be posted.
    pub(crate) fn fail(&self) {
        let _ = self
            .slot()
            .failure
            .cmpxchg(0, Status::Flushed.code(), Relaxed);
    }

    /// Waits until all requests have completed. Returns the first failure, or success, and makes the
    /// claim ready for other requests. `rescue` is called when they do not complete; if it fails too, the
    /// slot and what it holds are given up.
    #[must_use]
    pub(crate) fn wait(&self, rescue: impl Fn(Rescue) -> Result) -> Status {
        let done = || {
            while !self.is_done() && self.sender.poll() != 0 {}
            self.is_done()
        };
        if let Some(_impatient) = self.sender.patience.poll(done) {
            self.sleep(rescue);
        }
        let slot = self.slot();
        if !self.is_done() {
            return Status::Stuck;
        }
        slot.generation.fetch_add(1u32, Relaxed);
        Status::from_code(slot.failure.xchg(0, Relaxed))
    }

    /// Takes note that a request that was to be posted was refused, and so were those after it.
    pub(crate) fn refused(&self) {
        self.sender.refused(self.wr_id());
    }

    /// How the first request failed that did, of those that have completed.
    pub(crate) fn failure(&self) -> Status {
        Status::from_code(self.slot().failure.load(Relaxed))
    }

    /// Requests that have completed and did not succeed.
    pub(crate) fn failed(&self) -> u32 {
        self.slot().failed.load(Relaxed)
    }

    /// Polls, for whoever's completions.
    pub(crate) fn look(&self) {
        self.sender.poll();
    }

    /// Whether all requests have completed.
    pub(crate) fn is_done(&self) -> bool {
        self.slot().pending.load(Acquire) == 0
    }

    fn sleep(&self, rescue: impl Fn(Rescue) -> Result) {
        let (sender, slot) = (&self.sender, self.slot());
        sender.stats.sleeps.add(1);
        slot.asleep.store(1, Release);
        sender.sleepers.fetch_add(1u32, Full);
        if !self.nap() {
            pr_warn!("requests do not complete: giving up their queue pair\n");
            if rescue(Rescue::Fail).is_err() || !self.nap() {
                self.end(rescue);
            }
        }
        sender.sleepers.fetch_sub(1u32, Full);
        slot.asleep.store(0, Release);
    }

    /// Ends requests whose queue pair was made to fail and does not flush.
    pub(crate) fn end(&self, rescue: impl Fn(Rescue) -> Result) {
        pr_err!("a failed queue pair does not flush: resetting it\n");
        match rescue(Rescue::Reset) {
            Ok(()) => self.write_off(),
            Err(error) => pr_err!("a queue pair does not stop: {error:?}\n"),
        }
    }

    /// Sleeps until all requests have completed, but not for ever. Returns whether they have.
    fn nap(&self) -> bool {
        for _ in 0..MAX_NAPS {
            while self.sender.arm() && self.sender.poll_in_turn() != 0 {}
            if self.is_done() {
                return true;
            }
            self.slot().done.wait_timeout(NAP_MS);
            self.sender.poll();
            if self.is_done() {
                return true;
            }
        }
        false
    }

    /// Takes requests for flushed whose queue pair was reset: what has completed of them is in the
    /// completion queue by now, and nothing is added.
    fn write_off(&self) {
        let (sender, slot) = (&self.sender, self.slot());
        let _polling = sender.polling.lock();
        while sender.take() != 0 {}
        let lost = slot.pending.xchg(0, Full);
        slot.failed.fetch_add(lost, Relaxed);
        sender.stats.inflight.sub(lost.into());
        self.fail();
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if self.is_done() {
            // A failure to post is not to be the next claimer's.
            self.slot().failure.store(0, Relaxed);
            self.slot().failed.store(0, Relaxed);
            return self.sender.pool(self.class).give(self.index);
        }
        // What the RNIC may still touch is better lost than used again.
        pr_err!("a slot was left with requests under way: it is lost\n");
        core::mem::forget(self.user.take());
    }
}
