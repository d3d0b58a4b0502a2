// SPDX-License-Identifier: GPL-2.0

//! A submission under way.
//!
//! Each kind of request goes on by steps that wait for nothing: [`Short`], [`Call`]. What takes longer, or is
//! of another kind, is left to a worker, who does it as the system call would, or gives it back when it need
//! not wait any more. Workers are few: they wait for other nodes, but not for other users.

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

/// What came of a step.
pub(super) enum JobPoll {
    Done(Result<u64>),
    /// It is in the batch that was joined last.
    Batched,
    /// It stands in line for a virtual queue pair.
    QueuePush,
    /// The next is to be tried later.
    Pending,
    /// The rest may have to wait.
    NeedsWorker,
}

/// What is to be done.
pub(super) enum Job {
    Access(AccessJob),
    Call(CallJob),
    Receive(ReceiveJob),
    Push(VqpPushJob),
    Blocking(BlockingJob),
    /// It cannot be.
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

    /// Does what may have to wait. Returns the job if there is more to do that need not.
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

    /// How many bytes it is about, unless it is done at any pace.
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

    /// Whether it was posted by itself, and its completion is to come.
    fn is_inflight(&self) -> bool {
        match self {
            Self::Call(call) => call.is_inflight(),
            _ => false,
        }
    }
}

/// Why a worker did not finish a job.
pub(super) enum JobIncomplete {
    Failed(Error),
    /// It goes on without a worker.
    Resume(Job),
}

impl From<Error> for JobIncomplete {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// What a worker made of a submission.
pub(super) enum WorkerOutcome {
    Done(Result<u64>),
    Resume(IoTask),
}

/// What came of a look at a task.
pub(super) enum TaskPoll {
    Done(Result<u64>),
    /// It is to be put in the batch that was joined last.
    Batched,
    /// It is to stand in line for a virtual queue pair.
    QueuePush,
    /// A worker has it.
    Offloaded,
    /// It is to be looked at again.
    Pending,
}

/// Where a task may be: they are large.
pub(super) type TaskSlot = KBox<MaybeUninit<IoTask>>;

/// A submission.
pub(super) struct IoTask {
    pub(super) tag: u64,
    /// Nothing once a worker has it.
    job: Option<Job>,
    /// When it may go, by the priority and limits of the session.
    ticket: AdmissionTicket,
}

impl IoTask {
    /// Takes a submission on.
    pub(super) fn new(queue: &IoQueue, sqe: &bindings::kite_sqe, slot: TaskSlot) -> KBox<Self> {
        let job = blocking::parse_job(queue.requester(), sqe);
        slot.write(Self {
            tag: sqe.tag,
            job: Some(job.unwrap_or_else(Job::Invalid)),
            ticket: AdmissionTicket::default(),
        })
    }

    /// Whether nothing is to be done before something completes or comes.
    pub(super) fn is_waiting(&self) -> bool {
        match &self.job {
            Some(Job::Call(call)) => call.is_waiting(),
            Some(Job::Receive(receive)) => receive.is_waiting(),
            _ => false,
        }
    }

    /// Whether it was posted or sent, and what comes of that is looked for.
    pub(super) fn is_started(&self) -> bool {
        match &self.job {
            Some(Job::Call(call)) => call.is_started(),
            Some(Job::Receive(receive)) => receive.is_waiting(),
            _ => self.is_inflight(),
        }
    }

    /// What it reads or writes, if it does.
    pub(super) fn access_job(&mut self) -> Option<&mut AccessJob> {
        match &mut self.job {
            Some(Job::Access(short)) => Some(short),
            _ => None,
        }
    }

    /// What it asks of a virtual queue pair, if it does.
    pub(super) fn push_job(&self) -> Option<&VqpPushJob> {
        match &self.job {
            Some(Job::Push(push)) => Some(push),
            _ => None,
        }
    }

    /// As [`Self::push`], to be changed, and its turn.
    pub(super) fn push_job_mut(&mut self) -> Option<(&mut VqpPushJob, &mut AdmissionTicket)> {
        match &mut self.job {
            Some(Job::Push(push)) => Some((push, &mut self.ticket)),
            _ => None,
        }
    }

    /// What came of it, if that was in a batch which has ended.
    pub(super) fn result(&self) -> Option<(u64, Result<u64>)> {
        match &self.job {
            Some(Job::Access(short)) => short.result().map(|result| (self.tag, result)),
            _ => None,
        }
    }

    /// Whether it was posted, and its completion is to come.
    pub(super) fn is_inflight(&self) -> bool {
        self.job.as_ref().is_some_and(Job::is_inflight)
    }

    /// Looks for completions of everybody, if this waits for one. Returns whether it does.
    pub(super) fn poll_cq(&self) -> bool {
        match &self.job {
            Some(Job::Call(call)) => call.poll_cq(),
            _ => false,
        }
    }

    /// Goes on, if that is possible without waiting.
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

    /// Leaves the rest to a worker, if there is one.
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

    /// It will not be done: nobody waits for its turn, nor for an answer that it was to be.
    pub(super) fn cancel(&mut self, queue: &IoQueue) {
        if let Some(Job::Blocking(other)) = &self.job {
            other.abandon(&queue.session);
        }
        if let Ok(tenant) = queue.session.tenant() {
            tenant.cancel(core::mem::take(&mut self.ticket));
        }
    }

    /// Whether a worker may do it now, who is not to wait for that.
    fn try_admit(&mut self, queue: &IoQueue) -> bool {
        let job = self.job.as_ref().filter(|job| !job.is_inflight());
        let Some((len, deadline)) = job.and_then(|job| job.len(&queue.session).zip(job.deadline()))
        else {
            return true;
        };
        let tenant = queue.session.tenant();
        let admitted = tenant.and_then(|tenant| tenant.try_admit(&mut self.ticket, len, deadline));
        // Without memory it is looked at again.
        admitted.unwrap_or(false)
    }

    /// Whether it can be given up: nothing that was posted has to be waited for.
    pub(super) fn can_cancel(&self) -> bool {
        self.job.as_ref().is_some_and(|job| !job.is_inflight())
    }
}

impl IoQueue {
    /// Whether a worker would take one more request.
    pub(super) fn has_free_worker(&self) -> bool {
        self.offloaded.load(Acquire) < MAX_OFFLOADED
    }

    /// Has a worker finish a job.
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
