// SPDX-License-Identifier: GPL-2.0

//! Short reads and writes of a queue that are posted together.
//!
//! In one round of who drives the queue, accesses by one handle join a batch for as long as they fit. It is
//! posted when one comes that does not, or at the end of the round. What a failed queue pair took with it, and
//! what takes longer than any RNIC should, is left to workers.

use super::{super::Session, short::Short, task::Task, Owner, Queue, Work, SLOW_MAX};
use crate::{
    fabric::{
        batch::{Placed, Works, MOST},
        flight::Watched,
        qos::tenant::Turn,
        Fabric,
    },
    lmr::{
        batch::Batch,
        io::{Access, Begun, Looker},
        mapping::{KeptPass, Mapping},
    },
    sys::memory::Memory,
    verbs::{device::Device, dma::DmaArena},
};
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    new_spinlock,
    prelude::*,
    sync::{atomic::Full, Arc, SpinLock},
    time::{Instant, Monotonic},
};

/// Batches of a queue that may be under way.
const BATCHES_MAX: usize = 64;

/// What others may join.
struct Open {
    handle: u64,
    batch: Batch,
    tasks: KVec<KBox<Task>>,
}

/// What was posted.
struct Posted {
    flight: Watched<KeptPass>,
    mapping: Arc<Mapping>,
    tasks: KVec<KBox<Task>>,
}

/// The batches of a queue.
#[derive(Default)]
pub(super) struct Batches {
    open: Option<Open>,
    posted: KVec<Posted>,
    works: Works,
    /// The memory of the queue, if it is mapped for the RNIC. That ends with the batches, before the RNIC goes.
    arena: Option<Arc<DmaArena>>,
    /// Room for the tasks of one more.
    spare: Option<KVec<KBox<Task>>>,
    /// Tasks in all of them.
    len: u32,
}

/// What became of an access that was begun.
pub(super) enum Joined {
    Done,
    /// It is in the open batch, where its task is to be put.
    There(Placed),
    Long,
}

impl Batches {
    /// None.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(super) fn new() -> Result<Self> {
        Ok(Self {
            open: None,
            posted: KVec::with_capacity(BATCHES_MAX, GFP_KERNEL_ACCOUNT)?,
            works: Works::new()?,
            arena: None,
            spare: None,
            len: 0,
        })
    }

    /// Tasks in all of them.
    pub(super) fn len(&self) -> u32 {
        self.len
    }

    /// Whether one has completed.
    pub(super) fn has_ended(&self) -> bool {
        self.posted.iter().any(|posted| posted.flight.is_done())
    }
}

/// One round of who drives a queue.
pub(super) struct Round<'a> {
    fabric: &'a Fabric,
    /// When it began: that is slow to find out.
    pub(super) now: Instant<Monotonic>,
    batches: Batches,
}

impl<'a> Round<'a> {
    /// Begins one.
    pub(super) fn new(fabric: &'a Fabric, batches: Batches) -> Self {
        Self {
            fabric,
            now: Instant::now(),
            batches,
        }
    }

    /// Ends it, and gives the batches back.
    pub(super) fn end(mut self) -> Batches {
        self.post();
        self.batches
    }

    /// Tasks in batches.
    pub(super) fn batched(&self) -> u32 {
        self.batches.len
    }

    /// Looks for completions of everybody, if a batch waits for some. Returns whether one does.
    pub(super) fn look(&self) -> bool {
        let first = self.batches.posted.first();
        first.map(|posted| posted.flight.look()).is_some()
    }

    /// Begins an access by a handle. Waits for nothing.
    ///
    /// # Errors
    ///
    /// As for [`Access::begin`].
    pub(super) fn begin(
        &mut self,
        session: &Session,
        handle: u64,
        (access, memory): (&Access, &Memory),
        turn: &mut Turn,
    ) -> Result<Joined> {
        let Batches {
            open, works, arena, ..
        } = &mut self.batches;
        let mut looker = Looker {
            tenant: session.tenant()?,
            turn,
            works,
            arena: arena.as_ref(),
            now: self.now,
        };
        if let Some(open) = open.as_mut().filter(|open| open.handle == handle) {
            let joined = access.join(self.fabric, &mut open.batch, memory, &mut looker)?;
            if let Some(placed) = joined {
                return Ok(Joined::There(placed));
            }
        }
        self.post();
        self.open(session, handle, (access, memory), turn)
    }

    /// Begins an access by which a batch is opened, unless it needs none.
    fn open(
        &mut self,
        session: &Session,
        handle: u64,
        (access, memory): (&Access, &Memory),
        turn: &mut Turn,
    ) -> Result<Joined> {
        let batches = &mut self.batches;
        if batches.posted.len() == BATCHES_MAX {
            return Err(EAGAIN);
        }
        let tasks = match batches.spare.take() {
            Some(tasks) => tasks,
            None => KVec::with_capacity(MOST, GFP_KERNEL_ACCOUNT)?,
        };
        let mut looker = Looker {
            tenant: session.tenant()?,
            turn,
            works: &mut batches.works,
            arena: batches.arena.as_ref(),
            now: self.now,
        };
        let (joined, batch) = match session.begin(handle, access, memory, &mut looker) {
            Ok(Begun::First(batch, placed)) => (Ok(Joined::There(placed)), Some(batch)),
            Ok(Begun::Done) => (Ok(Joined::Done), None),
            Ok(Begun::Long) => (Ok(Joined::Long), None),
            Err(error) => (Err(error), None),
        };
        match batch {
            Some(batch) => {
                batches.open = Some(Open {
                    handle,
                    batch,
                    tasks,
                })
            }
            None => batches.spare = Some(tasks),
        }
        joined
    }

    /// Puts a task where its access is: in the open batch.
    pub(super) fn join(&mut self, task: KBox<Task>) {
        let Some(open) = &mut self.batches.open else {
            return;
        };
        // There is room: a batch has no more accesses than requests.
        let _ = open.tasks.push(task, GFP_ATOMIC);
        self.batches.len += 1;
        if open.batch.is_full() {
            self.post();
        }
    }

    /// Posts the open batch. To be called before anything that may take its time.
    pub(super) fn post(&mut self) {
        let batches = &mut self.batches;
        let Some(open) = batches.open.take() else {
            return;
        };
        let posted = Posted {
            mapping: open.batch.mapping().clone(),
            flight: open.batch.post(self.fabric, &mut batches.works, self.now),
            tasks: open.tasks,
        };
        // There is room: it was opened when there was.
        let _ = batches.posted.push(posted, GFP_ATOMIC);
    }

    /// Takes a batch out that was posted.
    fn remove(&mut self, at: usize) -> Option<Posted> {
        let posted = self.batches.posted.remove(at).ok()?;
        self.batches.len -= posted.tasks.len() as u32;
        Some(posted)
    }

    /// Puts one back.
    fn put_back(&mut self, posted: Posted) {
        self.batches.len += posted.tasks.len() as u32;
        let _ = self.batches.posted.push(posted, GFP_ATOMIC);
    }
}

/// The accesses of a batch.
fn shorts(tasks: &mut [KBox<Task>]) -> impl Iterator<Item = &mut Short> {
    tasks.iter_mut().filter_map(|task| task.short())
}

/// Batches that workers wait for, or are about to.
pub(super) fn none_stuck() -> Result<impl PinInit<SpinLock<Stuck>>> {
    let stuck = KVec::with_capacity(SLOW_MAX as usize, GFP_KERNEL_ACCOUNT)?;
    Ok(new_spinlock!(Stuck(stuck)))
}

/// Batches that take too long.
pub(super) struct Stuck(KVec<Posted>);

impl Queue {
    /// Maps the memory of the queue for an RNIC that does not go meanwhile. If that cannot be, what short
    /// accesses move is copied.
    pub(super) fn map(&self, device: Device) {
        let Owner::Process { arena, .. } = &self.owner else {
            return;
        };
        let mapped = DmaArena::new(device, arena.pinned.clone()).ok();
        let mut work = self.work.lock();
        if work.over.is_none() {
            work.batches.arena = mapped;
        }
    }

    /// Ends the batches that have completed. Returns how many tasks were in them.
    pub(super) fn end_batches(self: &Arc<Self>, work: &mut Work, round: &mut Round<'_>) -> usize {
        let (mut ended, mut at) = (0, 0);
        while let Some(Posted { flight, .. }) = round.batches.posted.get(at) {
            let done = flight.is_done();
            if !done && !(flight.is_stuck(round.now) && self.has_worker()) {
                at += 1;
                continue;
            }
            let Some(posted) = round.remove(at) else {
                break;
            };
            if !done {
                if let Some(posted) = self.leave_stuck(posted) {
                    round.put_back(posted);
                    break;
                }
                continue;
            }
            let mut tasks = self.settle(posted);
            ended += tasks.len();
            work.take_back(&mut tasks);
            round.batches.spare = Some(tasks);
        }
        ended
    }

    /// Ends a batch, and waits for that if need be. Returns its tasks, of which those are completed that did
    /// not fail with their queue pair.
    fn settle(&self, posted: Posted) -> KVec<KBox<Task>> {
        let Posted {
            flight,
            mapping,
            mut tasks,
        } = posted;
        let stats = &self.rnic.stats;
        let settled = flight.settle(stats, |claim, _| {
            shorts(&mut tasks).for_each(|short| short.land(claim));
            Ok(())
        });
        match settled {
            Ok(None) => {}
            Ok(Some(failed)) => shorts(&mut tasks).for_each(|short| short.fail(&failed)),
            Err(error) => shorts(&mut tasks).for_each(|short| short.end(Err(error))),
        }
        shorts(&mut tasks).for_each(|short| short.count(&mapping, stats));
        self.complete_all(tasks.iter().filter_map(|task| task.result()));
        tasks
    }

    /// Has a worker wait for a batch. Returns it if none can.
    fn leave_stuck(self: &Arc<Self>, posted: Posted) -> Option<Posted> {
        let count = posted.tasks.len() as u32;
        // There is room: each has a worker, or is about to.
        let _ = self.stuck.lock().0.push(posted, GFP_ATOMIC);
        self.slow.fetch_add(count, Full);
        let queue = self.clone();
        if self.rnic.spawn(move || queue.settle_stuck()).is_ok() {
            return None;
        }
        self.slow.fetch_sub(count, Full);
        self.stuck.lock().0.pop()
    }

    fn settle_stuck(&self) {
        let Some(posted) = self.stuck.lock().0.pop() else {
            return;
        };
        let mut tasks = self.settle(posted);
        let count = tasks.len() as u32;
        let mut work = self.work.lock();
        match work.over {
            None => work.take_back(&mut tasks),
            Some(why) => {
                let failed = tasks.iter().filter(|task| task.result().is_none());
                self.complete_all(failed.map(|task| (task.tag, Err(why))));
            }
        }
        drop(work);
        self.workers_have_less(count);
    }

    /// Ends all batches, which were given up for some reason, when the RNIC has let go of them.
    pub(super) fn give_up(&self, batches: Batches, why: Error) {
        for posted in batches.posted {
            drop(posted.flight);
            self.complete_all(posted.tasks.iter().map(|task| (task.tag, Err(why))));
        }
    }
}

impl Work {
    /// Of tasks that were in a batch, those go on that failed; of others the room is free again.
    fn take_back(&mut self, tasks: &mut KVec<KBox<Task>>) {
        for task in tasks.drain_all() {
            match task.result() {
                Some(_) => self.clear(task),
                None => self.add(task),
            }
        }
    }
}
