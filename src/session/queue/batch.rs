// SPDX-License-Identifier: GPL-2.0

//! Short reads and writes of a queue that are posted together.
//!
//! In one round of who drives the queue, accesses by one handle that go one way join a batch for as long as they
//! fit. It is posted when one comes that does not, or at the end of the round. What a failed queue pair took with it, and
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

/// Batches of a queue that may be under way, or opened.
const BATCHES_MAX: usize = 64;

/// Batches that may be open: for several handles, or both ways.
const OPEN_MAX: usize = 4;

/// What others may join.
struct Open {
    handle: u64,
    batch: Batch,
    works: Works,
    tasks: Tasks,
}

/// What was posted.
struct Posted {
    flight: Watched<KeptPass>,
    mapping: Arc<Mapping>,
    tasks: Tasks,
}

/// The tasks of a batch.
type Tasks = KVec<KBox<Task>>;

/// The batches of a queue.
#[derive(Default)]
pub(super) struct Batches {
    open: KVec<Open>,
    posted: KVec<Posted>,
    /// The memory of the queue, if it is mapped for the RNIC. That ends with the batches, before the RNIC goes.
    arena: Option<Arc<DmaArena>>,
    /// Tasks in all of them.
    len: u32,
    /// Room for the requests of those that may be opened.
    works: KVec<Works>,
    /// Room for the tasks of those that may be opened.
    lists: KVec<Tasks>,
}

/// What became of an access that was begun.
pub(super) enum Joined {
    Done,
    /// It is in the batch in which its task is to be put.
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
        let mut this = Self {
            open: KVec::with_capacity(OPEN_MAX, GFP_KERNEL_ACCOUNT)?,
            posted: KVec::with_capacity(BATCHES_MAX, GFP_KERNEL_ACCOUNT)?,
            arena: None,
            len: 0,
            works: KVec::with_capacity(OPEN_MAX, GFP_KERNEL_ACCOUNT)?,
            lists: KVec::with_capacity(BATCHES_MAX, GFP_KERNEL_ACCOUNT)?,
        };
        for _ in 0..OPEN_MAX {
            this.works.push(Works::new()?, GFP_KERNEL_ACCOUNT)?;
        }
        for _ in 0..BATCHES_MAX {
            let list = KVec::with_capacity(MOST, GFP_KERNEL_ACCOUNT)?;
            this.lists.push(list, GFP_KERNEL_ACCOUNT)?;
        }
        Ok(this)
    }

    /// Tasks in all of them.
    pub(super) fn len(&self) -> u32 {
        self.len
    }

    /// Whether one has completed.
    pub(super) fn has_ended(&self) -> bool {
        self.posted.iter().any(|posted| posted.flight.is_done())
    }

    /// Takes one out that was posted.
    fn remove(&mut self, at: usize) -> Option<Posted> {
        let posted = self.posted.remove(at).ok()?;
        self.len -= posted.tasks.len() as u32;
        Some(posted)
    }

    /// Puts one back.
    fn put_back(&mut self, posted: Posted) {
        self.len += posted.tasks.len() as u32;
        // There is room, here and below: for as many as there are lists, and for all of these.
        let _ = self.posted.push(posted, GFP_ATOMIC);
    }

    /// Keeps a list of tasks, of which there are none any more, for another batch.
    fn recycle(&mut self, list: Tasks) {
        if self.lists.len() < self.lists.capacity() {
            let _ = self.lists.push(list, GFP_ATOMIC);
        }
    }
}

/// An access of a session, by a handle.
pub(super) struct Wanted<'a> {
    pub(super) session: &'a Session,
    pub(super) handle: u64,
    pub(super) access: &'a Access,
    pub(super) memory: &'a Memory,
}

/// One round of who drives a queue.
pub(super) struct Round<'a> {
    fabric: &'a Fabric,
    /// When it began: that is slow to find out.
    pub(super) now: Instant<Monotonic>,
    batches: Batches,
    /// The batch that was joined last.
    joined: usize,
}

impl<'a> Round<'a> {
    /// Begins one.
    pub(super) fn new(fabric: &'a Fabric, batches: Batches) -> Self {
        Self {
            fabric,
            now: Instant::now(),
            batches,
            joined: 0,
        }
    }

    /// Ends it, and gives the batches back.
    pub(super) fn end(mut self) -> Batches {
        self.post_all();
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

    /// Begins an access. Waits for nothing.
    ///
    /// # Errors
    ///
    /// As for [`Access::begin`].
    pub(super) fn begin(&mut self, wanted: &Wanted<'_>, turn: &mut Turn) -> Result<Joined> {
        let direction = wanted.access.direction;
        let is_alike =
            |open: &Open| open.handle == wanted.handle && open.batch.direction() == direction;
        if let Some(at) = self.batches.open.iter().position(is_alike) {
            if let Some(placed) = self.join(at, wanted, turn)? {
                self.joined = at;
                return Ok(Joined::There(placed));
            }
            self.post(at);
        }
        self.open(wanted, turn)
    }

    /// Has an access join an open batch, if it can.
    fn join(&mut self, at: usize, wanted: &Wanted<'_>, turn: &mut Turn) -> Result<Option<Placed>> {
        let Batches { open, arena, .. } = &mut self.batches;
        let Some(Open { batch, works, .. }) = open.get_mut(at) else {
            return Ok(None);
        };
        let mut looker = Looker {
            tenant: wanted.session.tenant()?,
            turn,
            works,
            arena: arena.as_ref(),
            now: self.now,
        };
        wanted
            .access
            .join(self.fabric, batch, wanted.memory, &mut looker)
    }

    /// Begins an access by which a batch is opened, unless it needs none.
    fn open(&mut self, wanted: &Wanted<'_>, turn: &mut Turn) -> Result<Joined> {
        if self.batches.open.len() == OPEN_MAX {
            self.post(0);
        }
        let (tenant, batches) = (wanted.session.tenant()?, &mut self.batches);
        let Some(tasks) = batches.lists.pop() else {
            return wanted.later(self.now);
        };
        let Some(mut works) = batches.works.pop() else {
            batches.recycle(tasks);
            return wanted.later(self.now);
        };
        let mut looker = Looker {
            tenant,
            turn,
            works: &mut works,
            arena: batches.arena.as_ref(),
            now: self.now,
        };
        let begun = wanted.begin(&mut looker);
        if let Ok(Begun::First(batch, placed)) = begun {
            self.joined = batches.open.len();
            let opened = Open {
                handle: wanted.handle,
                batch,
                works,
                tasks,
            };
            // There is room: one was posted if there was none.
            let _ = batches.open.push(opened, GFP_ATOMIC);
            return Ok(Joined::There(placed));
        }
        let _ = batches.works.push(works, GFP_ATOMIC);
        batches.recycle(tasks);
        begun.map(|begun| match begun {
            Begun::Done => Joined::Done,
            _ => Joined::Long,
        })
    }

    /// Puts a task where its access is: in the batch that was joined last.
    pub(super) fn put(&mut self, task: KBox<Task>) {
        let Some(open) = self.batches.open.get_mut(self.joined) else {
            return;
        };
        // There is room: a batch has no more accesses than requests.
        let _ = open.tasks.push(task, GFP_ATOMIC);
        self.batches.len += 1;
        if open.batch.is_full() {
            self.post(self.joined);
        }
    }

    /// Posts all open batches. To be called before anything that may take its time.
    pub(super) fn post_all(&mut self) {
        while !self.batches.open.is_empty() {
            self.post(0);
        }
    }

    /// Posts an open batch.
    fn post(&mut self, at: usize) {
        let batches = &mut self.batches;
        let Ok(mut open) = batches.open.remove(at) else {
            return;
        };
        let posted = Posted {
            mapping: open.batch.mapping().clone(),
            flight: open.batch.post(self.fabric, &mut open.works, self.now),
            tasks: open.tasks,
        };
        // There is room: it was opened with a list and with this, which others may have now.
        let _ = batches.posted.push(posted, GFP_ATOMIC);
        let _ = batches.works.push(open.works, GFP_ATOMIC);
    }
}

impl Wanted<'_> {
    fn begin(&self, looker: &mut Looker<'_>) -> Result<Begun> {
        let Self {
            session,
            handle,
            access,
            memory,
        } = self;
        session.begin(*handle, access, memory, looker)
    }

    /// It is to be tried again, unless that is too late.
    fn later(&self, now: Instant<Monotonic>) -> Result<Joined> {
        if !self.access.deadline.passed_at(now) {
            return Err(EAGAIN);
        }
        self.session.rnic()?.stats.errors.add(1);
        Err(ETIMEDOUT)
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
            let stuck = !done && flight.is_stuck(round.now) && self.has_worker();
            if !done && !stuck {
                at += 1;
                continue;
            }
            let Some(posted) = round.batches.remove(at) else {
                break;
            };
            if !done {
                if let Some(posted) = self.leave_stuck(posted) {
                    round.batches.put_back(posted);
                    break;
                }
                continue;
            }
            let mut tasks = self.settle(posted);
            ended += tasks.len();
            work.take_back(&mut tasks);
            round.batches.recycle(tasks);
        }
        ended
    }

    /// Ends a batch, and waits for that if need be. Returns its tasks, of which those are completed that did
    /// not fail with their queue pair.
    fn settle(&self, posted: Posted) -> Tasks {
        let Posted {
            flight,
            mapping,
            mut tasks,
        } = posted;
        let stats = &self.rnic.stats;
        let settled = flight.settle_batch(stats, |claim, done| {
            shorts(&mut tasks).for_each(|short| short.land(claim, done));
        });
        match settled {
            Ok(None) => {}
            Ok(Some(failed)) => shorts(&mut tasks).for_each(|short| short.fail(&failed)),
            Err(error) => shorts(&mut tasks).for_each(|short| short.end(Err(error))),
        }
        shorts(&mut tasks).for_each(|short| short.count(&mapping, stats));
        self.completions
            .complete_all(tasks.iter().filter_map(|task| task.result()));
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
        // It need not be the same, if others are left to workers that are yet to begin.
        let left = self.stuck.lock().0.pop();
        let count = left.as_ref().map_or(0, |posted| posted.tasks.len());
        self.slow.fetch_sub(count as u32, Full);
        left
    }

    fn settle_stuck(&self) {
        let Some(posted) = self.stuck.lock().0.pop() else {
            return;
        };
        let mut tasks = self.settle(posted);
        let count = tasks.len() as u32;
        let mut work = self.work.lock();
        match work.over {
            None => {
                work.take_back(&mut tasks);
                work.batches.recycle(tasks);
            }
            Some(why) => {
                let failed = tasks.iter().filter(|task| task.result().is_none());
                self.completions
                    .complete_all(failed.map(|task| (task.tag, Err(why))));
            }
        }
        drop(work);
        self.workers_have_less(count);
    }

    /// Ends all batches, which were given up for some reason, when the RNIC has let go of them.
    pub(super) fn give_up(&self, batches: Batches, why: Error) {
        for posted in batches.posted {
            drop(posted.flight);
            self.completions
                .complete_all(posted.tasks.iter().map(|task| (task.tag, Err(why))));
        }
    }
}

impl Work {
    /// Of tasks that were in a batch, those go on that failed; of others the room is free again.
    fn take_back(&mut self, tasks: &mut Tasks) {
        for task in tasks.drain_all() {
            match task.result() {
                Some(_) => self.clear(task),
                None => self.add(task),
            }
        }
    }
}
