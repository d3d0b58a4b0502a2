// SPDX-License-Identifier: GPL-2.0

//! Tasks: submissions of an I/O queue from start to completion.
//!
//! Reads and writes ([`AccessJob`]), calls ([`CallJob`]) and receives ([`ReceiveJob`]) advance by steps that
//! do not block. Longer and other requests run on a worker, as the system call does. A worker returns a task
//! to the queue once the rest need not block. Workers are few: a worker may wait for other nodes, but not for
//! other users.

use super::{
    batch::PollRound,
    blocking::{self, BlockingJob},
    call::CallJob,
    push::VqpPushJob,
    receive::ReceiveJob,
    small::AccessJob,
    IoQueue, MAX_OFFLOADED,
};
use crate::{
    bindings, fabric::qos::tenant::AdmissionTicket, session::Session, sys::deadline::Deadline,
};
use core::mem::MaybeUninit;
use kernel::{
    prelude::*,
    sync::{
        atomic::{Acquire, Full},
        Arc,
    },
};

/// Result of a step of a job.
pub(super) enum JobPoll {
    Done(Result<u64>),
    /// Joined the batch that was joined last.
    Batched,
    /// Must be queued for a virtual queue pair (VQP).
    QueuePush,
    /// Must be polled again later.
    Pending,
    /// The next step may block.
    NeedsWorker,
}

/// Request of a task.
pub(super) enum Job {
    Access(AccessJob),
    Call(CallJob),
    Receive(ReceiveJob),
    Push(VqpPushJob),
    Blocking(BlockingJob),
    /// The submission is invalid.
    Invalid(Error),
}

impl Job {
    fn poll(
        &mut self,
        queue: &IoQueue,
        round: &mut PollRound<'_>,
        ticket: &mut AdmissionTicket,
    ) -> JobPoll {
        match self {
            Self::Access(short) => short.poll(queue, round, ticket),
            Self::Call(call) => call.poll(queue, round, ticket),
            Self::Receive(receive) => receive.poll(queue, round),
            Self::Push(_) => JobPoll::QueuePush,
            Self::Blocking(_) => JobPoll::NeedsWorker,
            Self::Invalid(error) => JobPoll::Done(Err(*error)),
        }
    }

    /// Executes the steps that may block. Returns the job if the other steps do not block.
    fn run_blocking(self, queue: &IoQueue) -> Result<u64, JobIncomplete> {
        match self {
            Self::Access(short) => Ok(short.run_blocking(queue)?),
            Self::Call(call) => call.run_blocking(queue),
            Self::Receive(receive) => receive.run_blocking(queue),
            Self::Blocking(other) => Ok(other.run(&queue.session)?),
            push @ Self::Push(_) => Err(JobIncomplete::Resume(push)),
            Self::Invalid(error) => Err(error.into()),
        }
    }

    /// Returns the number of bytes for admission, or `None` if the job needs no admission by a worker.
    fn len(&self, session: &Session) -> Option<u64> {
        match self {
            Self::Access(short) => Some(short.len()),
            Self::Call(call) => Some(call.len()),
            Self::Blocking(other) => other.len(session),
            Self::Receive(_) | Self::Push(_) | Self::Invalid(_) => None,
        }
    }

    fn deadline(&self) -> Option<Deadline> {
        match self {
            Self::Access(short) => Some(short.deadline()),
            Self::Call(call) => Some(call.deadline()),
            Self::Blocking(other) => Some(other.deadline()),
            Self::Receive(receive) => Some(receive.deadline()),
            Self::Push(_) | Self::Invalid(_) => None,
        }
    }

    /// Returns `true` if the job is posted outside of a batch, and its completion is pending.
    fn is_inflight(&self) -> bool {
        match self {
            Self::Call(call) => call.is_inflight(),
            _ => false,
        }
    }
}

/// Reason why a worker did not complete a job.
pub(super) enum JobIncomplete {
    Failed(Error),
    /// The job continues without a worker.
    Resume(Job),
}

impl From<Error> for JobIncomplete {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// Result of a worker.
pub(super) enum WorkerOutcome {
    Done(Result<u64>),
    Resume(IoTask),
}

/// Result of polling a task.
pub(super) enum TaskPoll {
    Done(Result<u64>),
    /// The caller must add the task to the batch that was joined last.
    Batched,
    /// The caller must queue the task for a VQP.
    QueuePush,
    /// A worker has taken the job.
    Offloaded,
    /// The caller must poll the task again later.
    Pending,
}

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
        let job = blocking::parse_job(queue.requester(), sqe);
        slot.write(Self {
            tag: sqe.tag,
            job: Some(job.unwrap_or_else(Job::Invalid)),
            ticket: AdmissionTicket::default(),
        })
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
    pub(super) fn poll(&mut self, queue: &Arc<IoQueue>, round: &mut PollRound<'_>) -> TaskPoll {
        let ticket = &mut self.ticket;
        match self.job.as_mut().map(|job| job.poll(queue, round, ticket)) {
            Some(JobPoll::Done(result)) => {
                self.cancel(queue);
                TaskPoll::Done(result)
            }
            Some(JobPoll::NeedsWorker) => {
                if queue.has_free_worker() {
                    round.post_all();
                }
                self.offload(queue)
            }
            Some(JobPoll::Batched) => TaskPoll::Batched,
            Some(JobPoll::QueuePush) => TaskPoll::QueuePush,
            Some(JobPoll::Pending) => TaskPoll::Pending,
            None => TaskPoll::Offloaded,
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
            other.abandon(&queue.session);
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

    /// Returns `true` if the task can be cancelled: no posted operation is pending.
    pub(super) fn can_cancel(&self) -> bool {
        self.job.as_ref().is_some_and(|job| !job.is_inflight())
    }
}

impl IoQueue {
    /// Returns `true` if a worker is free.
    pub(super) fn has_free_worker(&self) -> bool {
        self.offloaded.load(Acquire) < MAX_OFFLOADED
    }

    /// Starts a worker that finishes a job.
    fn spawn_worker(self: &Arc<Self>, tag: u64, job: Job, ticket: AdmissionTicket) -> TaskPoll {
        self.offloaded.fetch_add(1u32, Full);
        let queue = self.clone();
        let spawned = self.rnic.spawn(move || {
            let finished = match queue.memcg.with_active(|| job.run_blocking(&queue)) {
                Ok(value) => WorkerOutcome::Done(Ok(value)),
                Err(JobIncomplete::Failed(error)) => WorkerOutcome::Done(Err(error)),
                Err(JobIncomplete::Resume(job)) => WorkerOutcome::Resume(IoTask {
                    tag,
                    job: Some(job),
                    ticket,
                }),
            };
            queue.on_worker_done(tag, finished);
        });
        match spawned {
            Ok(()) => TaskPoll::Offloaded,
            Err(error) => {
                self.offloaded.fetch_sub(1u32, Full);
                TaskPoll::Done(Err(error))
            }
        }
    }
}
