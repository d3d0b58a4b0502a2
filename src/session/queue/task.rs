// SPDX-License-Identifier: GPL-2.0

//! Tasks: submissions of an I/O queue from start to completion.
//!
//! # Operation
//!
//! The thread that drives the queue polls each task, which does not block. If the next step of the job may
//! block, the task passes the job to a worker ([`super::worker`]), as soon as a worker is free and the
//! session's priority and limits admit the job.
//!
//! # Recovery
//!
//! A task that cannot start before its deadline completes with `ETIMEDOUT`. A canceled task returns its
//! admission ticket, and aborts the call that a reply would have answered.

use super::{
    batch::{Batches, PollRound},
    job::{access::AccessJob, parse_job, push::VqpPushJob, Job},
    poll::{JobPoll, TaskPoll},
    IoQueue,
};
use crate::{bindings, fabric::qos::tenant::AdmissionTicket};
use core::mem::MaybeUninit;
use kernel::{prelude::*, sync::Arc};

/// Batches of tasks.
pub(super) type TaskBatches = Batches<KBox<IoTask>>;

/// One round of driving a queue.
pub(super) type TaskRound<'a> = PollRound<'a, KBox<IoTask>>;

/// Preallocated memory for a task. Tasks are large.
pub(super) type TaskSlot = KBox<MaybeUninit<IoTask>>;

/// Submission in progress.
pub(super) struct IoTask {
    pub(super) tag: u64,
    /// `None` once a worker has taken the job.
    job: Option<Job>,
    /// Admission by the priority and limits of the session.
    ticket: AdmissionTicket,
}

impl IoTask {
    /// Parses a submission and returns its task.
    pub(super) fn new(queue: &IoQueue, sqe: &bindings::kite_sqe, slot: TaskSlot) -> KBox<Self> {
        let job = parse_job(queue.requester(), sqe);
        slot.write(Self {
            tag: sqe.tag,
            job: Some(job.unwrap_or_else(Job::Invalid)),
            ticket: AdmissionTicket::default(),
        })
    }

    /// Returns the task of a job that a worker returned to the queue.
    pub(super) fn resumed(tag: u64, job: Job, ticket: AdmissionTicket) -> Self {
        Self {
            tag,
            job: Some(job),
            ticket,
        }
    }

    /// Returns `true` if no progress is possible before a completion or an arrival.
    pub(super) fn is_waiting(&self) -> bool {
        match &self.job {
            Some(Job::Call(call)) => call.is_waiting(),
            Some(Job::Receive(receive)) => receive.is_waiting(),
            _ => false,
        }
    }

    /// Returns `true` if the task was posted or sent, or if a receive found nothing to receive.
    pub(super) fn is_started(&self) -> bool {
        match &self.job {
            Some(Job::Call(call)) => call.is_started(),
            Some(Job::Receive(receive)) => receive.is_waiting(),
            _ => self.is_inflight(),
        }
    }

    /// Returns the read or write of the task, if any.
    pub(super) fn access_job(&mut self) -> Option<&mut AccessJob> {
        match &mut self.job {
            Some(Job::Access(short)) => Some(short),
            _ => None,
        }
    }

    /// Returns the VQP request of the task, if any.
    pub(super) fn push_job(&self) -> Option<&VqpPushJob> {
        match &self.job {
            Some(Job::Push(push)) => Some(push),
            _ => None,
        }
    }

    /// Like [`Self::push_job`], but mutable and with the admission ticket.
    pub(super) fn push_job_mut(&mut self) -> Option<(&mut VqpPushJob, &mut AdmissionTicket)> {
        match &mut self.job {
            Some(Job::Push(push)) => Some((push, &mut self.ticket)),
            _ => None,
        }
    }

    /// Returns the tag and the result, if the task was in a completed batch.
    pub(super) fn result(&self) -> Option<(u64, Result<u64>)> {
        match &self.job {
            Some(Job::Access(short)) => short.result().map(|result| (self.tag, result)),
            _ => None,
        }
    }

    /// Returns `true` if the task is posted outside of a batch, and its completion is pending.
    pub(super) fn is_inflight(&self) -> bool {
        self.job.as_ref().is_some_and(Job::is_inflight)
    }

    /// Polls the CQ of the RNIC, for all waiters, if the task waits for a completion. Returns `true` if so.
    pub(super) fn poll_cq(&self) -> bool {
        match &self.job {
            Some(Job::Call(call)) => call.poll_cq(),
            _ => false,
        }
    }

    /// Makes progress without blocking.
    pub(super) fn poll(&mut self, queue: &Arc<IoQueue>, round: &mut TaskRound<'_>) -> TaskPoll {
        let ticket = &mut self.ticket;
        let polled = match &mut self.job {
            Some(Job::Push(_)) => return TaskPoll::QueuePush,
            Some(job) => job.poll(queue, round, ticket),
            None => return TaskPoll::Offloaded,
        };
        match polled {
            JobPoll::Ready(result) => {
                self.cancel(queue);
                TaskPoll::Done(result)
            }
            JobPoll::NeedsWorker => {
                if queue.has_free_worker() {
                    round.post_all();
                }
                self.offload(queue)
            }
            JobPoll::Batched => TaskPoll::Batched,
            JobPoll::Pending => TaskPoll::Pending,
        }
    }

    /// Passes the job to a worker, if a worker is free and the session's limits admit the job.
    fn offload(&mut self, queue: &Arc<IoQueue>) -> TaskPoll {
        if queue.has_free_worker() && self.try_admit(queue) {
            let ticket = core::mem::take(&mut self.ticket);
            let job = self.job.take();
            return job.map_or(TaskPoll::Offloaded, |job| {
                queue.spawn_worker(self.tag, job, ticket)
            });
        }
        let has_expired = |job: &Job| {
            !job.is_inflight()
                && job
                    .deadline()
                    .is_some_and(|deadline| deadline.has_expired())
        };
        if self.job.as_ref().is_some_and(has_expired) {
            queue.rnic.stats.errors.add(1);
            self.cancel(queue);
            return TaskPoll::Done(Err(ETIMEDOUT));
        }
        TaskPoll::Pending
    }

    /// Cancels the task: returns its admission ticket, and aborts the call that a reply would have answered.
    pub(super) fn cancel(&mut self, queue: &IoQueue) {
        if let Some(Job::Blocking(other)) = &self.job {
            other.abort(&queue.session);
        }
        if let Ok(tenant) = queue.session.tenant() {
            tenant.cancel(core::mem::take(&mut self.ticket));
        }
    }

    /// Returns `true` if the session's priority and limits admit the job now. The worker does not wait for
    /// admission.
    fn try_admit(&mut self, queue: &IoQueue) -> bool {
        let job = self.job.as_ref().filter(|job| !job.is_inflight());
        let Some((len, deadline)) = job.and_then(|job| job.len(&queue.session).zip(job.deadline()))
        else {
            return true;
        };
        let tenant = queue.session.tenant();
        let admitted = tenant.and_then(|tenant| tenant.try_admit(&mut self.ticket, len, deadline));
        // Out of memory: try again in a later round.
        admitted.unwrap_or(false)
    }

    /// Returns `true` if the task can be canceled: no posted operation is pending.
    pub(super) fn can_cancel(&self) -> bool {
        self.job.as_ref().is_some_and(|job| !job.is_inflight())
    }
}
