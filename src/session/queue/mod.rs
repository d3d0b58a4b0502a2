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
pub(crate) mod blocking;
mod call;
mod completions;
mod module;
mod push;
mod receive;
pub(crate) mod small;
pub(super) mod table;
mod task;
mod wait;

use self::{
    batch::{IoQueueBatches, PollRound, TimedOutBatches},
    completions::{ring_bytes, CompletionRing},
    push::VqpPushQueue,
    task::{IoTask, TaskPoll, TaskSlot, WorkerOutcome},
};
use super::{
    source::{QueueMemory, Requester},
    uapi, Session,
};
use crate::{
    bindings, errno,
    fabric::{
        recv::poller::{PollClient, PollHint},
        Fabric,
    },
    rnic::Rnic,
    sys::{adaptive_spin::AdaptiveSpin, memcg::Memcg},
};
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
use kite_core::queue::IoQueueConsumer;

/// Submissions taken at a time, so that other queues, and messages, have their turns.
const MAX_SQES_PER_ROUND: u32 = 64;

/// Tasks that could not be begun before others like them are left for later.
const MAX_BLOCKED_STARTS: u32 = 16;

/// Requests of one queue that workers do at a time, besides those of the last batch that one waits for.
const MAX_OFFLOADED: u32 = 8;

const SQ_HEAD_OFFSET: usize = offset_of!(bindings::kite_ring_header, sq_head);
const SQ_TAIL_OFFSET: usize = offset_of!(bindings::kite_ring_header, sq_tail);
const CQ_HEAD_OFFSET: usize = offset_of!(bindings::kite_ring_header, cq_head);
const CQ_TAIL_OFFSET: usize = offset_of!(bindings::kite_ring_header, cq_tail);
const FLAGS_OFFSET: usize = offset_of!(bindings::kite_ring_header, flags);

const SQES_OFFSET: usize = bindings::KITE_QUEUE_SQ_OFFSET as usize;

/// What was taken and is to be completed.
struct IoQueueState {
    sq_consumer: IoQueueConsumer,
    /// Those that are in no batch.
    tasks: KVec<KBox<IoTask>>,
    /// Nothing is in them while somebody drives the queue: it is in the round.
    batches: IoQueueBatches,
    /// Those that are to be handed on to virtual queue pairs.
    pushes: VqpPushQueue,
    /// Room for more: there is as much for all together as there are entries.
    free_slots: KVec<TaskSlot>,
    /// The task to look at next.
    next_task: usize,
    /// The process was told that the poller does not look.
    needs_wakeup: bool,
    /// Nothing is taken any more, for this reason.
    close_error: Option<Error>,
}

/// Whose queue pair it is.
enum IoQueueOwner {
    /// That of a process of this user, whose requests use this memory.
    Process { uid: u32, memory: QueueMemory },
    /// That of another kernel module.
    Module,
}

/// A queue pair.
#[pin_data]
struct IoQueue {
    session: Arc<Session>,
    rnic: Arc<Rnic>,
    owner: IoQueueOwner,
    memcg: Memcg,
    completion_ring: Arc<CompletionRing>,
    /// Held by who drives the queue.
    #[pin]
    state: Mutex<IoQueueState>,
    #[pin]
    timed_out: SpinLock<TimedOutBatches>,
    /// Of those who wait for completions.
    completion_spin: AdaptiveSpin,
    /// Requests that workers have.
    offloaded: Atomic<u32>,
}

/// Pins the memory that requests by a queue use.
fn pin_queue_memory(session: &Session, addr: u64, len: u64) -> Result<QueueMemory> {
    if len == 0 || len > bindings::KITE_QUEUE_MEMORY_MAX.into() {
        return Err(EINVAL);
    }
    let user_addr = usize::try_from(addr).map_err(|_| EFAULT)?;
    let pinned = session.pin_long_term(user_addr, len as usize)?;
    Ok(QueueMemory {
        user_addr,
        pinned: Arc::new(pinned, GFP_KERNEL_ACCOUNT)?,
    })
}

impl IoQueue {
    /// A queue pair of a session, with these completions.
    ///
    /// # Errors
    ///
    /// Those of `owner`; `ENOMEM`.
    fn new(
        session: Arc<Session>,
        completion_ring: Arc<CompletionRing>,
        owner: impl FnOnce() -> Result<IoQueueOwner>,
    ) -> Result<Arc<Self>> {
        let entries = completion_ring.entries;
        let count = entries as usize;
        let mut free_slots = KVec::with_capacity(count, GFP_KERNEL_ACCOUNT)?;
        for _ in 0..count {
            free_slots.push(KBox::new_uninit(GFP_KERNEL_ACCOUNT)?, GFP_KERNEL_ACCOUNT)?;
        }
        let state = IoQueueState {
            sq_consumer: IoQueueConsumer::new(entries),
            tasks: KVec::with_capacity(count, GFP_KERNEL_ACCOUNT)?,
            free_slots,
            batches: IoQueueBatches::new()?,
            pushes: VqpPushQueue::new(count)?,
            next_task: 0,
            needs_wakeup: false,
            close_error: None,
        };
        Arc::pin_init(
            try_pin_init!(Self {
                rnic: session.rnic()?.clone(),
                session,
                owner: owner()?,
                memcg: Memcg::current(),
                completion_ring,
                state <- new_mutex!(state),
                timed_out <- batch::new_timed_out()?,
                completion_spin: AdaptiveSpin::new(),
                offloaded: Atomic::new(0u32),
            }),
            GFP_KERNEL_ACCOUNT,
        )
    }

    fn requester(&self) -> Requester<'_> {
        match &self.owner {
            IoQueueOwner::Process { uid, memory } => Requester::QueueOwner { uid: *uid, memory },
            IoQueueOwner::Module => Requester::KernelModule,
        }
    }

    /// Submissions that were not taken.
    fn pending_sqes(&self, state: &IoQueueState) -> u32 {
        state
            .sq_consumer
            .available(self.completion_ring.shared.load_acquire::<SQ_TAIL_OFFSET>())
    }

    /// How many submissions there are that can be taken: there is room for their completions, too. So many
    /// were taken that are in batches.
    fn ready_sqes(&self, state: &IoQueueState, batched: u32) -> u32 {
        if state.close_error.is_some() {
            return 0;
        }
        // In this order, as others complete what they have before they have it no more.
        let held_elsewhere = self.offloaded.load(Acquire) + self.completion_ring.vqp_requests();
        let pending = state.tasks.len() as u32 + state.pushes.len() + batched + held_elsewhere;
        let free_cqes = self
            .completion_ring
            .entries
            .saturating_sub(pending + self.completion_ring.unconsumed());
        self.pending_sqes(state).min(free_cqes)
    }

    /// Takes the next submission, which is there.
    fn pop_sqe(&self, state: &mut IoQueueState) -> Option<bindings::kite_sqe> {
        let size = size_of::<bindings::kite_sqe>();
        let mut bytes = [0; size_of::<bindings::kite_sqe>()];
        let offset = SQES_OFFSET + state.sq_consumer.next_index() as usize * size;
        // It is there, as above.
        let _ = self.completion_ring.shared.read(offset, &mut bytes);
        self.completion_ring
            .shared
            .store_release::<SQ_HEAD_OFFSET>(state.sq_consumer.advance());
        uapi::from_bytes(&bytes)
    }

    /// Takes what was submitted, and begins it.
    fn submit_new(self: &Arc<Self>, state: &mut IoQueueState, round: &mut PollRound<'_>) -> usize {
        let count = self
            .ready_sqes(state, round.batched_tasks())
            .min(MAX_SQES_PER_ROUND);
        self.rnic.stats.sqes.add(count.into());
        for _ in 0..count {
            let Some(sqe) = self.pop_sqe(state) else {
                break;
            };
            let tag = sqe.tag;
            // There is room: no more are taken than there are entries.
            let Some(slot) = state.free_slots.pop() else {
                self.completion_ring.complete(tag, Err(ENOMEM));
                continue;
            };
            let mut task = IoTask::new(self, &sqe, slot);
            match task.poll(self, round) {
                TaskPoll::Batched => round.add_task(task),
                TaskPoll::QueuePush => state.pushes.push_back(task),
                TaskPoll::Pending => state.push_task(task),
                TaskPoll::Done(result) => {
                    state.recycle_task(task);
                    self.completion_ring.complete(tag, result);
                }
                TaskPoll::Offloaded => state.recycle_task(task),
            }
        }
        count as usize
    }

    /// Goes on with what was begun.
    fn poll_inflight(
        self: &Arc<Self>,
        state: &mut IoQueueState,
        round: &mut PollRound<'_>,
    ) -> usize {
        let _ = round.poll_cq() || state.tasks.iter().any(|task| task.poll_cq());
        let (mut progress, mut blocked_starts) = (self.reap_batches(state, round), 0);
        let mut first_untried = None;
        for _ in 0..state.tasks.len() {
            let index = state.next_task % state.tasks.len().max(1);
            let Some(task) = state.tasks.get_mut(index) else {
                break;
            };
            state.next_task = index + 1;
            if blocked_starts >= MAX_BLOCKED_STARTS && !task.is_started() {
                first_untried.get_or_insert(index);
                continue;
            }
            match task.poll(self, round) {
                TaskPoll::Pending => {
                    blocked_starts += u32::from(!task.is_started());
                    continue;
                }
                TaskPoll::Done(result) => {
                    let tag = task.tag;
                    state.remove_and_recycle(index);
                    self.completion_ring.complete(tag, result);
                }
                TaskPoll::Batched => state
                    .remove_task(index)
                    .into_iter()
                    .for_each(|task| round.add_task(task)),
                TaskPoll::QueuePush => state
                    .remove_task(index)
                    .into_iter()
                    .for_each(|task| state.pushes.push_back(task)),
                TaskPoll::Offloaded => state.remove_and_recycle(index),
            }
            progress += 1;
        }
        // It is the first to be tried next time.
        state.next_task = first_untried.unwrap_or(state.next_task);
        progress
    }

    /// Goes on with all that can go on, unless somebody else does. Waits for nothing. Returns how much that was.
    fn try_run_round(self: &Arc<Self>, fabric: &Fabric) -> usize {
        let Some(mut state) = self.state.try_lock() else {
            return 0;
        };
        state.pushes.make_progress(fabric) + self.run_round(&mut state, fabric)
    }

    fn run_round(self: &Arc<Self>, state: &mut IoQueueState, fabric: &Fabric) -> usize {
        let mut round = PollRound::new(fabric, core::mem::take(&mut state.batches));
        let mut progress = self.poll_inflight(state, &mut round);
        progress += self.submit_new(state, &mut round);
        state.batches = round.finish();
        progress += self.submit_pushes(state);
        if progress != 0 {
            self.completion_ring.wake_waiters();
        }
        progress
    }

    /// Gives up a submission of that tag that was taken, but waits to be begun or for a reply.
    ///
    /// # Errors
    ///
    /// `ENOENT` if there is none.
    fn cancel(&self, tag: u64) -> Result {
        let mut state = self.state.lock();
        let is_match = |task: &KBox<IoTask>| task.tag == tag && task.can_cancel();
        let found = match state.tasks.iter().position(is_match) {
            Some(index) => state.remove_task(index),
            None => state.pushes.remove(tag),
        };
        let mut task = found.ok_or(ENOENT)?;
        task.cancel(self);
        state.recycle_task(task);
        self.rnic.stats.errors.add(1);
        // Before another is taken in its place.
        self.completion_ring.complete(tag, Err(errno::canceled()));
        drop(state);
        self.completion_ring.wake_waiters();
        Ok(())
    }

    /// Ends what is under way for some reason, and takes nothing any more. Waits for the RNIC alone: when this
    /// returns nothing of it is used by any task, also if somebody else is ending them.
    fn shutdown(&self, error: Error) {
        let mut state = self.state.lock();
        state.close_error.get_or_insert(error);
        self.abandon_batches(core::mem::take(&mut state.batches), error);
        let tasks = core::mem::replace(&mut state.tasks, KVec::new());
        for mut task in Iterator::chain(tasks.into_iter(), state.pushes.drain()) {
            let tag = task.tag;
            task.cancel(self);
            drop(task);
            self.completion_ring.complete(tag, Err(error));
        }
        // A process sees that it is over, but to modules all is completed that they have submitted so far.
        let remaining = match self.owner {
            IoQueueOwner::Process { .. } => 0,
            IoQueueOwner::Module => self.pending_sqes(&state),
        };
        for _ in 0..remaining {
            if let Some(sqe) = self.pop_sqe(&mut state) {
                self.completion_ring.complete(sqe.tag, Err(error));
            }
        }
        drop(state);
        self.completion_ring.wake_waiters();
    }

    /// Waits until workers have nothing of it any more.
    fn wait_workers_done(&self) {
        let mut producer = self.completion_ring.producer.lock();
        while self.offloaded.load(Acquire) != 0 {
            self.completion_ring.ready_cv.wait(&mut producer);
        }
    }

    /// Whether nothing is taken any more.
    fn is_closed(&self) -> bool {
        self.state.lock().close_error.is_some()
    }

    /// A worker has no more to do for a submission: it is done, or the task goes on without waiting.
    fn on_worker_done(self: &Arc<Self>, tag: u64, finished: WorkerOutcome) {
        match finished {
            WorkerOutcome::Done(result) => self.completion_ring.complete(tag, result),
            WorkerOutcome::Resume(task) => self.requeue_task(task),
        }
        self.release_workers(1);
    }

    fn release_workers(&self, count: u32) {
        {
            // Who waits for that has not gone to sleep, or has.
            let _producer = self.completion_ring.producer.lock();
            self.offloaded.fetch_sub(count, Full);
        }
        self.completion_ring.wake_waiters();
        // There is one more to look after, or room for one more.
        self.completion_ring.poller.event.complete();
    }

    fn requeue_task(&self, task: IoTask) {
        let mut state = self.state.lock();
        if let Some(error) = state.close_error {
            return self.completion_ring.complete(task.tag, Err(error));
        }
        // There is room: it still counts as a worker's.
        match state.free_slots.pop() {
            Some(slot) => state.push_task(slot.write(task)),
            None => self.completion_ring.complete(task.tag, Err(ENOMEM)),
        }
    }
}

/// What the poller thread does for a queue.
struct IoQueuePollClient(Arc<IoQueue>);

impl PollClient for IoQueuePollClient {
    fn poll_work(&self, fabric: &Fabric) -> usize {
        let Some(mut state) = self.0.state.try_lock() else {
            return 0;
        };
        if core::mem::take(&mut state.needs_wakeup) {
            self.0
                .completion_ring
                .shared
                .store_release::<FLAGS_OFFSET>(0);
        }
        self.0.run_round(&mut state, fabric)
    }

    fn poll_hint(&self) -> PollHint {
        let Some(mut state) = self.0.state.try_lock() else {
            return PollHint::Busy;
        };
        let hint = state.poll_hint();
        if hint < PollHint::Posted {
            state.needs_wakeup = true;
            self.0
                .completion_ring
                .shared
                .store_release::<FLAGS_OFFSET>(bindings::KITE_QUEUE_NEED_WAKEUP);
            // The process adds a submission and then looks at the flag.
            crate::sys::compat::smp_mb();
        }
        if self.0.ready_sqes(&state, state.batches.len()) != 0 {
            PollHint::Busy
        } else {
            hint
        }
    }

    fn on_device_removed(&self) {
        self.0.shutdown(ENODEV);
    }
}

impl IoQueueState {
    fn push_task(&mut self, task: KBox<IoTask>) {
        // Nothing is allocated here, nor below.
        let _ = self.tasks.push(task, GFP_ATOMIC);
    }

    fn recycle_task(&mut self, task: KBox<IoTask>) {
        let _ = self.free_slots.push(KBox::drop_contents(task), GFP_ATOMIC);
    }

    fn remove_and_recycle(&mut self, index: usize) {
        if let Some(task) = self.remove_task(index) {
            self.recycle_task(task);
        }
    }

    fn remove_task(&mut self, index: usize) -> Option<KBox<IoTask>> {
        let last = self.tasks.len() - 1;
        self.tasks.swap(index, last);
        self.tasks.pop()
    }

    /// What the poller has to do for what was taken.
    fn poll_hint(&mut self) -> PollHint {
        self.tasks_poll_hint().max(self.pushes.poll_hint())
    }

    fn tasks_poll_hint(&self) -> PollHint {
        if self.batches.has_completed() || self.tasks.iter().any(|task| !task.is_waiting()) {
            PollHint::Soon
        } else if self.batches.len() != 0 || self.tasks.iter().any(|task| task.is_inflight()) {
            PollHint::Posted
        } else if !self.tasks.is_empty() {
            PollHint::Waiting
        } else {
            PollHint::Idle
        }
    }
}
