// SPDX-License-Identifier: GPL-2.0

//! Workers of an I/O queue: threads that execute the steps of jobs that may block.
//!
//! # Operation
//!
//! Each queue has at most [`MAX_OFFLOADED`] requests on workers. A worker executes a request as the system
//! call does. The worker returns a task to the queue once the rest need not block. Workers are few: a worker
//! may wait for other nodes, but not for other users.
//!
//! # Locking
//!
//! `offloaded` is decremented with `CompletionRing::producer` locked, so that [`IoQueue::wait_workers_done`]
//! misses no wakeup. If a worker fails to start, its thread decrements `offloaded` with `IoQueue::state`
//! locked. No worker executes a job with `IoQueue::state`
//! locked; the round of the queue polls jobs with it.

use super::{
    job::Job,
    poll::{JobIncomplete, TaskPoll},
    task::IoTask,
    IoQueue,
};
use crate::fabric::qos::tenant::AdmissionTicket;
use kernel::{
    prelude::*,
    sync::{
        atomic::{Acquire, Full},
        Arc,
    },
};

/// Maximum requests of one queue on workers. A timed-out batch counts with all its requests, so the last one
/// may exceed the limit.
pub(super) const MAX_OFFLOADED: u32 = 8;

impl IoQueue {
    /// Returns `true` if a worker is free.
    pub(super) fn has_free_worker(&self) -> bool {
        self.offloaded.load(Acquire) < MAX_OFFLOADED
    }

    /// Starts a worker that finishes a job.
    pub(super) fn spawn_worker(
        self: &Arc<Self>,
        tag: u64,
        job: Job,
        ticket: AdmissionTicket,
    ) -> TaskPoll {
        self.offloaded.fetch_add(1u32, Full);
        let queue = self.clone();
        let spawned = self.rnic.spawn(move || {
            let finished = queue.memcg.with_active(|| job.run_blocking(&queue));
            let to_task = |incomplete: JobIncomplete<Job>| {
                incomplete.map(|job| IoTask::resumed(tag, job, ticket))
            };
            queue.on_worker_done(tag, finished.map_err(to_task));
        });
        match spawned {
            Ok(()) => TaskPoll::Offloaded,
            Err(error) => {
                self.offloaded.fetch_sub(1u32, Full);
                TaskPoll::Done(Err(error))
            }
        }
    }

    /// Completes a request that a worker has finished, or returns the task to the queue.
    fn on_worker_done(self: &Arc<Self>, tag: u64, finished: Result<u64, JobIncomplete<IoTask>>) {
        match finished {
            Ok(value) => self.completion_ring.complete(tag, Ok(value)),
            Err(JobIncomplete::Failed(error)) => self.completion_ring.complete(tag, Err(error)),
            Err(JobIncomplete::Resume(task)) => self.requeue_task(task),
        }
        self.release_workers(1);
    }

    /// Releases `count` workers, and wakes the poller thread and all waiters.
    pub(super) fn release_workers(&self, count: u32) {
        {
            // With `producer` locked, a thread in `wait_workers_done` has either not yet checked the counter,
            // or sleeps on `ready_cv`.
            let _producer = self.completion_ring.producer.lock();
            self.offloaded.fetch_sub(count, Full);
        }
        self.completion_ring.wake_waiters();
        // The queue has one more task to poll, or one more free worker.
        self.completion_ring.poller.event.complete();
    }

    fn requeue_task(&self, task: IoTask) {
        let mut state = self.state.lock();
        if let Some(error) = state.close_error {
            return self.completion_ring.complete(task.tag, Err(error));
        }
        // A slot is free: the task still counts in `offloaded`.
        match state.free_slots.pop() {
            Some(slot) => state.push_task(slot.write(task)),
            None => self.completion_ring.complete(task.tag, Err(ENOMEM)),
        }
    }

    /// Waits until no worker holds a request of the queue.
    pub(super) fn wait_workers_done(&self) {
        let mut producer = self.completion_ring.producer.lock();
        while self.offloaded.load(Acquire) != 0 {
            self.completion_ring.ready_cv.wait(&mut producer);
        }
    }
}
