// SPDX-License-Identifier: GPL-2.0

//! The queue pairs of a session: requests without system calls.
//!
//! The process adds submissions to one queue and takes completions from another, both in memory that it
//! shares with the kernel; `kite_core::queue` counts. The poller thread of the RNIC takes submissions, and
//! so does who waits for completions ([`wait`]), one at a time. Short reads and writes ([`batch`]), and calls,
//! are posted and looked after there ([`task`]); what may have to wait is done by a few workers. Requests of virtual
//! queue pairs are handed on to these ([`push`]).
//!
//! Whatever the process writes to that memory harms itself at most: a submission is copied before it is
//! checked, the kernel counts its ends itself, and requests use memory that is pinned for them.

mod batch;
mod call;
mod completions;
mod module;
mod push;
mod receive;
mod run;
mod short;
pub(super) mod table;
mod task;
mod wait;

use super::{
    abi,
    caller::{Arena, Caller},
    Session,
};
use crate::{
    bindings, errno,
    fabric::{
        poller::{Driven, Rest},
        Fabric,
    },
    rnic::Rnic,
    sys::{patience::Patience, payer::Payer},
};
use batch::{Batches, Round, Stuck};
use completions::{size, Completions};
use core::mem::offset_of;
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    new_mutex,
    prelude::*,
    sync::{
        atomic::{Acquire, Atomic, Full},
        Arc, Mutex, SpinLock,
    },
};
use kite_core::queue::Consumer;
use push::Pushes;
use task::{Finished, Progress, Room, Task};

/// Submissions taken at a time, so that other queues, and messages, have their turns.
const TAKE_MAX: u32 = 64;

/// Tasks that could not be begun before others like them are left for later.
const TRIES_MAX: u32 = 16;

/// Requests of one queue that workers do at a time, besides those of the last batch that one waits for.
const SLOW_MAX: u32 = 8;

const SQ_HEAD: usize = offset_of!(bindings::kite_queue_words, sq_head);
const SQ_TAIL: usize = offset_of!(bindings::kite_queue_words, sq_tail);
const CQ_HEAD: usize = offset_of!(bindings::kite_queue_words, cq_head);
const CQ_TAIL: usize = offset_of!(bindings::kite_queue_words, cq_tail);
const FLAGS: usize = offset_of!(bindings::kite_queue_words, flags);

const SUBMISSIONS: usize = bindings::KITE_QUEUE_SUBMISSIONS as usize;

/// What was taken and is to be completed.
struct Work {
    taken: Consumer,
    /// Those that are in no batch.
    tasks: KVec<KBox<Task>>,
    /// Nothing is in them while somebody drives the queue: it is in the round.
    batches: Batches,
    /// Those that are to be handed on to virtual queue pairs.
    pushes: Pushes,
    /// Room for more: there is as much for all together as there are entries.
    rooms: KVec<Room>,
    /// The task to look at next.
    next: usize,
    /// The process was told that the poller does not look.
    asleep: bool,
    /// Nothing is taken any more, for this reason.
    over: Option<Error>,
}

/// Whose queue pair it is.
enum Owner {
    /// That of a process of this user, whose requests use this memory.
    Process { uid: u32, arena: Arena },
    /// That of another kernel module.
    Module,
}

/// A queue pair.
#[pin_data]
struct Queue {
    session: Arc<Session>,
    rnic: Arc<Rnic>,
    owner: Owner,
    payer: Payer,
    completions: Arc<Completions>,
    /// Held by who drives the queue.
    #[pin]
    work: Mutex<Work>,
    #[pin]
    stuck: SpinLock<Stuck>,
    /// Of those who wait for completions.
    patience: Patience,
    /// Requests that workers have.
    slow: Atomic<u32>,
}

/// Pins the memory that requests by a queue use.
fn pin(session: &Session, addr: u64, len: u64) -> Result<Arena> {
    if len == 0 || len > bindings::KITE_QUEUE_MEMORY_MAX.into() {
        return Err(EINVAL);
    }
    let base = usize::try_from(addr).map_err(|_| EFAULT)?;
    let pinned = session.pin_long(base, len as usize)?;
    Ok(Arena {
        base,
        pinned: Arc::new(pinned, GFP_KERNEL_ACCOUNT)?,
    })
}

impl Queue {
    /// A queue pair of a session, with these completions.
    ///
    /// # Errors
    ///
    /// Those of `owner`; `ENOMEM`.
    fn new(
        session: Arc<Session>,
        completions: Arc<Completions>,
        owner: impl FnOnce() -> Result<Owner>,
    ) -> Result<Arc<Self>> {
        let entries = completions.entries;
        let count = entries as usize;
        let mut rooms = KVec::with_capacity(count, GFP_KERNEL_ACCOUNT)?;
        for _ in 0..count {
            rooms.push(KBox::new_uninit(GFP_KERNEL_ACCOUNT)?, GFP_KERNEL_ACCOUNT)?;
        }
        let work = Work {
            taken: Consumer::new(entries),
            tasks: KVec::with_capacity(count, GFP_KERNEL_ACCOUNT)?,
            rooms,
            batches: Batches::new()?,
            pushes: Pushes::new(count)?,
            next: 0,
            asleep: false,
            over: None,
        };
        Arc::pin_init(
            try_pin_init!(Self {
                rnic: session.rnic()?.clone(),
                session,
                owner: owner()?,
                payer: Payer::current(),
                completions,
                work <- new_mutex!(work),
                stuck <- batch::none_stuck()?,
                patience: Patience::new(),
                slow: Atomic::new(0u32),
            }),
            GFP_KERNEL_ACCOUNT,
        )
    }

    fn caller(&self) -> Caller<'_> {
        match &self.owner {
            Owner::Process { uid, arena } => Caller::Queue { uid: *uid, arena },
            Owner::Module => Caller::Module,
        }
    }

    /// Submissions that were not taken.
    fn added(&self, work: &Work) -> u32 {
        work.taken
            .available(self.completions.shared.load::<SQ_TAIL>())
    }

    /// How many submissions there are that can be taken: there is room for their completions, too. So many
    /// were taken that are in batches.
    fn may_take(&self, work: &Work, batched: u32) -> u32 {
        if work.over.is_some() {
            return 0;
        }
        // In this order, as others complete what they have before they have it no more.
        let others = self.slow.load(Acquire) + self.completions.pushed();
        let pending = work.tasks.len() as u32 + work.pushes.len() + batched + others;
        let room = self
            .completions
            .entries
            .saturating_sub(pending + self.completions.ready());
        self.added(work).min(room)
    }

    /// Takes the next submission, which is there.
    fn take(&self, work: &mut Work) -> Option<bindings::kite_submission> {
        let size = size_of::<bindings::kite_submission>();
        let mut bytes = [0; size_of::<bindings::kite_submission>()];
        let at = SUBMISSIONS + work.taken.index() as usize * size;
        // It is there, as above.
        let _ = self.completions.shared.read(at, &mut bytes);
        self.completions
            .shared
            .store::<SQ_HEAD>(work.taken.advance());
        abi::parse(&bytes)
    }

    /// Takes what was submitted, and begins it.
    fn begin_more(self: &Arc<Self>, work: &mut Work, round: &mut Round<'_>) -> usize {
        let count = self.may_take(work, round.batched()).min(TAKE_MAX);
        self.rnic.stats.submissions.add(count.into());
        for _ in 0..count {
            let Some(submission) = self.take(work) else {
                break;
            };
            let tag = submission.tag;
            // There is room: no more are taken than there are entries.
            let Some(room) = work.rooms.pop() else {
                self.completions.complete(tag, Err(ENOMEM));
                continue;
            };
            let mut task = Task::new(self, &submission, room);
            match task.advance(self, round) {
                Progress::Joined => round.put(task),
                Progress::Lines => work.pushes.add(task),
                Progress::Stays => work.add(task),
                Progress::Done(result) => {
                    work.clear(task);
                    self.completions.complete(tag, result);
                }
                Progress::Left => work.clear(task),
            }
        }
        count as usize
    }

    /// Goes on with what was begun.
    fn go_on(self: &Arc<Self>, work: &mut Work, round: &mut Round<'_>) -> usize {
        let _ = round.look() || work.tasks.iter().any(|task| task.look());
        let (mut progress, mut tries) = (self.end_batches(work, round), 0);
        let mut untried = None;
        for _ in 0..work.tasks.len() {
            let at = work.next % work.tasks.len().max(1);
            let Some(task) = work.tasks.get_mut(at) else {
                break;
            };
            work.next = at + 1;
            if tries >= TRIES_MAX && !task.is_begun() {
                untried.get_or_insert(at);
                continue;
            }
            match task.advance(self, round) {
                Progress::Stays => {
                    tries += u32::from(!task.is_begun());
                    continue;
                }
                Progress::Done(result) => {
                    let tag = task.tag;
                    work.remove(at);
                    self.completions.complete(tag, result);
                }
                Progress::Joined => work
                    .take_out(at)
                    .into_iter()
                    .for_each(|task| round.put(task)),
                Progress::Lines => work
                    .take_out(at)
                    .into_iter()
                    .for_each(|task| work.pushes.add(task)),
                Progress::Left => work.remove(at),
            }
            progress += 1;
        }
        // It is the first to be tried next time.
        work.next = untried.unwrap_or(work.next);
        progress
    }

    /// Goes on with all that can go on, unless somebody else does. Waits for nothing. Returns how much that was.
    fn try_drive(self: &Arc<Self>, fabric: &Fabric) -> usize {
        let Some(mut work) = self.work.try_lock() else {
            return 0;
        };
        work.pushes.look(fabric) + self.drive(&mut work, fabric)
    }

    fn drive(self: &Arc<Self>, work: &mut Work, fabric: &Fabric) -> usize {
        let mut round = Round::new(fabric, core::mem::take(&mut work.batches));
        let mut progress = self.go_on(work, &mut round);
        progress += self.begin_more(work, &mut round);
        work.batches = round.end();
        progress += self.push_all(work);
        if progress != 0 {
            self.completions.announce();
        }
        progress
    }

    /// Gives up a submission of that tag that was taken, but waits to be begun or for a reply.
    ///
    /// # Errors
    ///
    /// `ENOENT` if there is none.
    fn cancel(&self, tag: u64) -> Result {
        let mut work = self.work.lock();
        let wanted = |task: &KBox<Task>| task.tag == tag && task.can_cancel();
        let found = match work.tasks.iter().position(wanted) {
            Some(at) => work.take_out(at),
            None => work.pushes.take(tag),
        };
        let mut task = found.ok_or(ENOENT)?;
        task.give_up(self);
        work.clear(task);
        self.rnic.stats.errors.add(1);
        // Before another is taken in its place.
        self.completions.complete(tag, Err(errno::canceled()));
        drop(work);
        self.completions.announce();
        Ok(())
    }

    /// Ends what is under way for some reason, and takes nothing any more. Waits for the RNIC alone: when this
    /// returns nothing of it is used by any task, also if somebody else is ending them.
    fn wind_up(&self, why: Error) {
        let mut work = self.work.lock();
        work.over.get_or_insert(why);
        self.give_up(core::mem::take(&mut work.batches), why);
        let tasks = core::mem::replace(&mut work.tasks, KVec::new());
        for mut task in Iterator::chain(tasks.into_iter(), work.pushes.take_all()) {
            let tag = task.tag;
            task.give_up(self);
            drop(task);
            self.completions.complete(tag, Err(why));
        }
        // A process sees that it is over, but to modules all is completed that they have submitted so far.
        let left = match self.owner {
            Owner::Process { .. } => 0,
            Owner::Module => self.added(&work),
        };
        for _ in 0..left {
            if let Some(submission) = self.take(&mut work) {
                self.completions.complete(submission.tag, Err(why));
            }
        }
        drop(work);
        self.completions.announce();
    }

    /// Waits until workers have nothing of it any more.
    fn await_workers(&self) {
        let mut completed = self.completions.completed.lock();
        while self.slow.load(Acquire) != 0 {
            self.completions.more.wait(&mut completed);
        }
    }

    /// Whether nothing is taken any more.
    fn is_over(&self) -> bool {
        self.work.lock().over.is_some()
    }

    /// A worker has no more to do for a submission: it is done, or the task goes on without waiting.
    fn worker_done(self: &Arc<Self>, tag: u64, finished: Finished) {
        match finished {
            Finished::Done(result) => self.completions.complete(tag, result),
            Finished::Back(task) => self.put_back(task),
        }
        self.workers_have_less(1);
    }

    fn workers_have_less(&self, count: u32) {
        {
            // Who waits for that has not gone to sleep, or has.
            let _completed = self.completions.completed.lock();
            self.slow.fetch_sub(count, Full);
        }
        self.completions.announce();
        // There is one more to look after, or room for one more.
        self.completions.poller.event.signal();
    }

    fn put_back(&self, task: Task) {
        let mut work = self.work.lock();
        if let Some(why) = work.over {
            return self.completions.complete(task.tag, Err(why));
        }
        // There is room: it still counts as a worker's.
        match work.rooms.pop() {
            Some(room) => work.add(room.write(task)),
            None => self.completions.complete(task.tag, Err(ENOMEM)),
        }
    }
}

/// What the poller thread does for a queue.
struct Driver(Arc<Queue>);

impl Driven for Driver {
    fn drive(&self, fabric: &Fabric) -> usize {
        let Some(mut work) = self.0.work.try_lock() else {
            return 0;
        };
        if core::mem::take(&mut work.asleep) {
            self.0.completions.shared.store::<FLAGS>(0);
        }
        self.0.drive(&mut work, fabric)
    }

    fn rest(&self) -> Rest {
        let Some(mut work) = self.0.work.try_lock() else {
            return Rest::Busy;
        };
        let rest = work.rest();
        if rest < Rest::Posted {
            work.asleep = true;
            self.0
                .completions
                .shared
                .store::<FLAGS>(bindings::KITE_QUEUE_ASLEEP);
            // The process adds a submission and then looks at the flag.
            crate::sys::compat::smp_mb();
        }
        if self.0.may_take(&work, work.batches.len()) != 0 {
            Rest::Busy
        } else {
            rest
        }
    }

    fn end(&self) {
        self.0.wind_up(ENODEV);
    }
}

impl Work {
    fn add(&mut self, task: KBox<Task>) {
        // Nothing is allocated here, nor below.
        let _ = self.tasks.push(task, GFP_ATOMIC);
    }

    fn clear(&mut self, task: KBox<Task>) {
        let _ = self.rooms.push(KBox::drop_contents(task), GFP_ATOMIC);
    }

    fn remove(&mut self, at: usize) {
        if let Some(task) = self.take_out(at) {
            self.clear(task);
        }
    }

    fn take_out(&mut self, at: usize) -> Option<KBox<Task>> {
        let last = self.tasks.len() - 1;
        self.tasks.swap(at, last);
        self.tasks.pop()
    }

    /// What the poller has to do for what was taken.
    fn rest(&mut self) -> Rest {
        self.rest_of_tasks().max(self.pushes.rest())
    }

    fn rest_of_tasks(&self) -> Rest {
        if self.batches.has_ended() || self.tasks.iter().any(|task| !task.is_waiting()) {
            Rest::Soon
        } else if self.batches.len() != 0 || self.tasks.iter().any(|task| task.is_posted()) {
            Rest::Posted
        } else if !self.tasks.is_empty() {
            Rest::Waiting
        } else {
            Rest::Idle
        }
    }
}
