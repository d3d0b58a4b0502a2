// SPDX-License-Identifier: GPL-2.0

//! I/O queues: submission queue (SQ) and completion queue (CQ) in memory shared with a process, used without
//! system calls.
//!
//! # Operation
//!
//! The process stores submissions in the SQ and takes completions from the CQ. `kite_core::queue` keeps the
//! counters. The poller thread of the RNIC drives each queue ([`poll_client`]), and so does a thread that
//! waits for completions ([`wait`]). One thread at a time drives a queue, in rounds ([`TaskRound`]). A round
//! does not block. Each submission becomes a task ([`task`]) with a job ([`job`]). Short reads and writes are
//! posted in batches ([`batch`], [`reap`]). Requests that may block run on workers ([`worker`]), at most
//! [`MAX_OFFLOADED`](worker::MAX_OFFLOADED) per queue. Requests of virtual queue pairs (VQPs) are passed on
//! to the VQPs ([`push`]). Queues of kernel modules ([`module`]) call a function of the module for each
//! completion.
//!
//! A process can harm only itself by writes to the shared memory. Each submission is copied before its
//! checks, the kernel keeps its own counters, and requests use memory pinned for the queue.
//!
//! # Recovery
//!
//! [`IoQueue::shutdown`] completes all tasks with an error, when the queue is destroyed or the RNIC is
//! removed.
//!
//! # Locking
//!
//! - `state` (mutex): [`IoQueueState`]. The thread that drives the queue holds `state` for a round. Rounds
//!   only try to lock.
//! - `timed_out` (spinlock): batches for workers. Nests inside `state`.
//! - `CompletionRing::producer` (spinlock): the tail of the CQ. Nests inside `state`, and inside the lock of
//!   a VQP.
//!
//! With `state` locked, a round only tries to lock the session's `handles` and `vqps`, and the locks of VQPs.
//! With `state` locked, completions of a module's queue run the module's callback. The poller thread calls a
//! queue with the poll client table of the fabric locked, except for the shutdown at RNIC removal.
//! [`worker`] describes `offloaded`.

mod batch;
mod completions;
mod job;
mod module;
mod poll;
mod poll_client;
mod push;
mod reap;
pub(super) mod table;
mod task;
mod wait;
mod worker;

use self::{
    completions::CompletionRing,
    poll::TaskPoll,
    push::VqpPushQueue,
    reap::TimedOutBatches,
    task::{IoTask, TaskBatches, TaskRound, TaskSlot},
};
use super::{
    source::{QueueProcess, Requester},
    uapi, Session,
};
use crate::{
    bindings, errno,
    fabric::{recv::poll_client::PollHint, Fabric},
    rnic::Rnic,
    sys::{adaptive_spin::AdaptiveSpin, memcg::Memcg},
};
use core::mem::offset_of;
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    new_mutex,
    prelude::*,
    sync::{
        atomic::{Acquire, Atomic},
        Arc, Mutex, SpinLock,
    },
};
use kite_core::queue::IoQueueConsumer;

/// Maximum submissions taken per round, so that other queues and received messages are served.
const MAX_SQES_PER_ROUND: u32 = 64;

/// Maximum tasks per round that failed to start, before the round skips the other tasks not started.
const MAX_BLOCKED_STARTS: u32 = 16;

const SQ_HEAD_OFFSET: usize = offset_of!(bindings::kite_ring_header, sq_head);
const SQ_TAIL_OFFSET: usize = offset_of!(bindings::kite_ring_header, sq_tail);
const CQ_HEAD_OFFSET: usize = offset_of!(bindings::kite_ring_header, cq_head);
const CQ_TAIL_OFFSET: usize = offset_of!(bindings::kite_ring_header, cq_tail);
const FLAGS_OFFSET: usize = offset_of!(bindings::kite_ring_header, flags);
const VERSION_OFFSET: usize = offset_of!(bindings::kite_ring_header, version);

const SQES_OFFSET: usize = bindings::KITE_QUEUE_SQ_OFFSET as usize;

/// Submissions taken from the SQ and not completed.
struct IoQueueState {
    sq_consumer: IoQueueConsumer,
    /// Tasks outside of batches.
    tasks: KVec<KBox<IoTask>>,
    /// Batches. Empty during a round: the [`TaskRound`] holds the batches.
    batches: TaskBatches,
    /// Requests to pass on to VQPs.
    pushes: VqpPushQueue,
    /// Preallocated memory for tasks. Free slots and tasks together never exceed the number of entries.
    free_slots: KVec<TaskSlot>,
    /// Index of the task to poll next.
    next_task: usize,
    /// `true` while `KITE_QUEUE_NEED_WAKEUP` is set: the poller thread does not poll this queue.
    needs_wakeup: bool,
    /// Error of the shutdown, after which no submission is taken.
    close_error: Option<Error>,
}

/// Owner of an I/O queue.
enum IoQueueOwner {
    Process(QueueProcess),
    /// Another kernel module.
    Module,
}

/// I/O queue.
#[pin_data]
struct IoQueue {
    session: Arc<Session>,
    rnic: Arc<Rnic>,
    owner: IoQueueOwner,
    memcg: Memcg,
    completion_ring: Arc<CompletionRing>,
    /// Held by the thread that drives the queue.
    #[pin]
    state: Mutex<IoQueueState>,
    #[pin]
    timed_out: SpinLock<TimedOutBatches>,
    /// Adaptive spin time of threads that wait for completions.
    completion_spin: AdaptiveSpin,
    /// Number of requests on workers.
    offloaded: Atomic<u32>,
}

impl IoQueue {
    /// Creates an I/O queue of a session for a completion ring.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory.
    /// - `ENOTCONN`: the session is not bound.
    /// - Errors of `owner`.
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
            batches: TaskBatches::new()?,
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
                state <- new_mutex!(state, "IoQueue::state"),
                timed_out <- reap::new_timed_out()?,
                completion_spin: AdaptiveSpin::new(),
                offloaded: Atomic::new(0u32),
            }),
            GFP_KERNEL_ACCOUNT,
        )
    }

    fn requester(&self) -> Requester<'_> {
        match &self.owner {
            IoQueueOwner::Process(process) => Requester::QueueOwner(process),
            IoQueueOwner::Module => Requester::KernelModule,
        }
    }

    /// Returns the number of submissions that were not taken.
    fn pending_sqes(&self, state: &IoQueueState) -> u32 {
        state
            .sq_consumer
            .available(self.completion_ring.shared.load_acquire::<SQ_TAIL_OFFSET>())
    }

    /// Returns the number of submissions that can be taken, for which the CQ has room. `batched` is the
    /// number of tasks in batches.
    fn ready_sqes(&self, state: &IoQueueState, batched: u32) -> u32 {
        if state.close_error.is_some() {
            return 0;
        }
        // Read the counters before the CQ. A request completes before the decrement of its counter, so each
        // request counts at least once.
        let held_elsewhere = self.offloaded.load(Acquire) + self.completion_ring.vqp_requests();
        let pending = state.tasks.len() as u32 + state.pushes.len() + batched + held_elsewhere;
        let free_cqes = self
            .completion_ring
            .entries
            .saturating_sub(pending + self.completion_ring.unconsumed());
        self.pending_sqes(state).min(free_cqes)
    }

    /// Takes the next submission. The caller has checked that the SQ is not empty.
    fn pop_sqe(&self, state: &mut IoQueueState) -> Option<bindings::kite_sqe> {
        let size = size_of::<bindings::kite_sqe>();
        let mut bytes = [0; size_of::<bindings::kite_sqe>()];
        let offset = SQES_OFFSET + state.sq_consumer.next_index() as usize * size;
        // The read cannot fail: the offset is within the SQ.
        let _ = self.completion_ring.shared.read(offset, &mut bytes);
        self.completion_ring
            .shared
            .store_release::<SQ_HEAD_OFFSET>(state.sq_consumer.advance());
        uapi::from_bytes(&bytes)
    }

    /// Takes new submissions and starts them. Returns the number of submissions taken.
    fn submit_new(self: &Arc<Self>, state: &mut IoQueueState, round: &mut TaskRound<'_>) -> usize {
        let count = self
            .ready_sqes(state, round.batched_tasks())
            .min(MAX_SQES_PER_ROUND);
        self.rnic.stats.sqes.add(count.into());
        for _ in 0..count {
            let Some(sqe) = self.pop_sqe(state) else {
                break;
            };
            let tag = sqe.tag;
            // A slot is free: the number of tasks never exceeds the number of entries.
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

    /// Polls the tasks in flight. Returns the number of tasks that made progress.
    fn poll_inflight(
        self: &Arc<Self>,
        state: &mut IoQueueState,
        round: &mut TaskRound<'_>,
    ) -> usize {
        // One poll of the CQ serves all tasks, so the search ends with the first.
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
        // The first skipped task is the first task of the next round.
        state.next_task = first_untried.unwrap_or(state.next_task);
        progress
    }

    /// Runs one round, unless another thread drives the queue. Does not block. Returns the amount of
    /// progress.
    fn try_run_round(self: &Arc<Self>, fabric: &Fabric) -> usize {
        let Some(mut state) = self.state.try_lock() else {
            return 0;
        };
        state.pushes.make_progress(fabric) + self.run_round(&mut state, fabric)
    }

    fn run_round(self: &Arc<Self>, state: &mut IoQueueState, fabric: &Fabric) -> usize {
        let mut round = TaskRound::new(fabric, core::mem::take(&mut state.batches));
        let mut progress = self.poll_inflight(state, &mut round);
        progress += self.submit_new(state, &mut round);
        state.batches = round.finish();
        progress += self.submit_pushes(state);
        if progress != 0 {
            self.completion_ring.wake_waiters();
        }
        progress
    }

    /// Cancels the task with this tag, if the task has not started or waits for a reply.
    ///
    /// # Errors
    ///
    /// - `ENOENT`: no such task.
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
        // Complete with `state` locked, before a new submission takes the place of the task.
        self.completion_ring.complete(tag, Err(errno::canceled()));
        drop(state);
        self.completion_ring.wake_waiters();
        Ok(())
    }

    /// Completes all tasks with `error`, and stops taking submissions. Blocks only on the RNIC. On return no
    /// task in `state` uses the RNIC, also if another thread runs the shutdown. Does not wait for workers.
    fn shutdown(&self, error: Error) {
        let mut state = self.state.lock();
        state.close_error.get_or_insert(error);
        self.fail_batches(core::mem::take(&mut state.batches), error);
        let tasks = core::mem::replace(&mut state.tasks, KVec::new());
        for mut task in Iterator::chain(tasks.into_iter(), state.pushes.drain()) {
            let tag = task.tag;
            task.cancel(self);
            drop(task);
            self.completion_ring.complete(tag, Err(error));
        }
        // A process detects that the queue is closed. A module gets a completion for every submission made so
        // far.
        let remaining = match self.owner {
            IoQueueOwner::Process(_) => 0,
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

    /// Returns `true` after the shutdown has started.
    fn is_closed(&self) -> bool {
        self.state.lock().close_error.is_some()
    }
}

impl IoQueueState {
    fn push_task(&mut self, task: KBox<IoTask>) {
        // The vectors have capacity for all entries, so neither this push nor the pushes below allocate.
        let _ = self.tasks.push(task, GFP_ATOMIC);
    }

    fn recycle_task(&mut self, task: KBox<IoTask>) {
        // Capacity suffices, as for `tasks`.
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

    /// Returns how the poller thread must continue for the tasks of the queue.
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
