// SPDX-License-Identifier: GPL-2.0

//! A submission under way.
//!
//! Each kind of request goes on by steps that wait for nothing: [`Short`], [`Call`]. What takes longer, or is
//! of another kind, is left to a worker, who does it as the system call would, or gives it back when it need
//! not wait any more. Workers are few: they wait for other nodes, but not for other users.

use super::{
    super::Session,
    batch::Round,
    call::Call,
    push::Push,
    receive::Receive,
    run::{self, Other},
    short::Short,
    Queue, SLOW_MAX,
};
use crate::{bindings, fabric::qos::tenant::Turn, sys::deadline::Deadline};
use core::mem::MaybeUninit;
use kernel::{
    prelude::*,
    sync::{
        atomic::{Acquire, Full},
        Arc,
    },
};

/// What came of a step.
pub(super) enum Step {
    Done(Result<u64>),
    /// It is in the batch that was joined last.
    Joined,
    /// It stands in line for a virtual queue pair.
    Lines,
    /// The next is to be tried later.
    Stays,
    /// The rest may have to wait.
    Slow,
}

/// What is to be done.
pub(super) enum Job {
    Short(Short),
    Call(Call),
    Receive(Receive),
    Push(Push),
    Other(Other),
    /// It cannot be.
    Wrong(Error),
}

impl Job {
    fn step(&mut self, queue: &Queue, round: &mut Round<'_>, turn: &mut Turn) -> Step {
        match self {
            Self::Short(short) => short.step(queue, round, turn),
            Self::Call(call) => call.step(queue, round, turn),
            Self::Receive(receive) => receive.step(queue, round),
            Self::Push(_) => Step::Lines,
            Self::Other(_) => Step::Slow,
            Self::Wrong(error) => Step::Done(Err(*error)),
        }
    }

    /// Does what may have to wait. Returns the job if there is more to do that need not.
    fn finish(self, queue: &Queue) -> Result<u64, Unfinished> {
        match self {
            Self::Short(short) => Ok(short.finish(queue)?),
            Self::Call(call) => call.finish(queue),
            Self::Receive(receive) => receive.finish(queue),
            Self::Other(other) => Ok(other.run(&queue.session)?),
            push @ Self::Push(_) => Err(Unfinished::Back(push)),
            Self::Wrong(error) => Err(error.into()),
        }
    }

    /// How many bytes it is about, unless it is done at any pace.
    fn len(&self, session: &Session) -> Option<u64> {
        match self {
            Self::Short(short) => Some(short.len()),
            Self::Call(call) => Some(call.len()),
            Self::Other(other) => other.len(session),
            Self::Receive(_) | Self::Push(_) | Self::Wrong(_) => None,
        }
    }

    fn deadline(&self) -> Option<Deadline> {
        match self {
            Self::Short(short) => Some(short.deadline()),
            Self::Call(call) => Some(call.deadline()),
            Self::Other(other) => Some(other.deadline()),
            Self::Receive(receive) => Some(receive.deadline()),
            Self::Push(_) | Self::Wrong(_) => None,
        }
    }

    /// Whether it was posted by itself, and its completion is to come.
    fn is_flying(&self) -> bool {
        match self {
            Self::Call(call) => call.is_flying(),
            _ => false,
        }
    }
}

/// Why a worker did not finish a job.
pub(super) enum Unfinished {
    Failed(Error),
    /// It goes on without a worker.
    Back(Job),
}

impl From<Error> for Unfinished {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// What a worker made of a submission.
pub(super) enum Finished {
    Done(Result<u64>),
    Back(Task),
}

/// What came of a look at a task.
pub(super) enum Progress {
    Done(Result<u64>),
    /// It is to be put in the batch that was joined last.
    Joined,
    /// It is to stand in line for a virtual queue pair.
    Lines,
    /// A worker has it.
    Left,
    /// It is to be looked at again.
    Stays,
}

/// Where a task may be: they are large.
pub(super) type Room = KBox<MaybeUninit<Task>>;

/// A submission.
pub(super) struct Task {
    pub(super) tag: u64,
    /// Nothing once a worker has it.
    job: Option<Job>,
    /// When it may go, by the priority and limits of the session.
    turn: Turn,
}

impl Task {
    /// Takes a submission on.
    pub(super) fn new(
        queue: &Queue,
        submission: &bindings::kite_submission,
        room: Room,
    ) -> KBox<Self> {
        let job = run::job(queue.caller(), submission);
        room.write(Self {
            tag: submission.tag,
            job: Some(job.unwrap_or_else(Job::Wrong)),
            turn: Turn::default(),
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
    pub(super) fn is_begun(&self) -> bool {
        match &self.job {
            Some(Job::Call(call)) => call.is_begun(),
            Some(Job::Receive(receive)) => receive.is_waiting(),
            _ => self.is_posted(),
        }
    }

    /// What it reads or writes, if it does.
    pub(super) fn short(&mut self) -> Option<&mut Short> {
        match &mut self.job {
            Some(Job::Short(short)) => Some(short),
            _ => None,
        }
    }

    /// What it asks of a virtual queue pair, if it does.
    pub(super) fn push(&self) -> Option<&Push> {
        match &self.job {
            Some(Job::Push(push)) => Some(push),
            _ => None,
        }
    }

    /// As [`Self::push`], to be changed, and its turn.
    pub(super) fn push_mut(&mut self) -> Option<(&mut Push, &mut Turn)> {
        match &mut self.job {
            Some(Job::Push(push)) => Some((push, &mut self.turn)),
            _ => None,
        }
    }

    /// What came of it, if that was in a batch which has ended.
    pub(super) fn result(&self) -> Option<(u64, Result<u64>)> {
        match &self.job {
            Some(Job::Short(short)) => short.result().map(|result| (self.tag, result)),
            _ => None,
        }
    }

    /// Whether it was posted, and its completion is to come.
    pub(super) fn is_posted(&self) -> bool {
        self.job.as_ref().is_some_and(Job::is_flying)
    }

    /// Looks for completions of everybody, if this waits for one. Returns whether it does.
    pub(super) fn look(&self) -> bool {
        match &self.job {
            Some(Job::Call(call)) => call.look(),
            _ => false,
        }
    }

    /// Goes on, if that is possible without waiting.
    pub(super) fn advance(&mut self, queue: &Arc<Queue>, round: &mut Round<'_>) -> Progress {
        let turn = &mut self.turn;
        match self.job.as_mut().map(|job| job.step(queue, round, turn)) {
            Some(Step::Done(result)) => {
                self.give_up(queue);
                Progress::Done(result)
            }
            Some(Step::Slow) => {
                if queue.has_worker() {
                    round.post_all();
                }
                self.leave(queue)
            }
            Some(Step::Joined) => Progress::Joined,
            Some(Step::Lines) => Progress::Lines,
            Some(Step::Stays) => Progress::Stays,
            None => Progress::Left,
        }
    }

    /// Leaves the rest to a worker, if there is one.
    fn leave(&mut self, queue: &Arc<Queue>) -> Progress {
        if queue.has_worker() && self.may_go(queue) {
            let turn = core::mem::take(&mut self.turn);
            let job = self.job.take();
            return job.map_or(Progress::Left, |job| queue.spawn(self.tag, job, turn));
        }
        let late = |job: &Job| !job.is_flying() && job.deadline().is_some_and(|at| at.passed());
        if self.job.as_ref().is_some_and(late) {
            queue.rnic.stats.errors.add(1);
            self.give_up(queue);
            return Progress::Done(Err(ETIMEDOUT));
        }
        Progress::Stays
    }

    /// It will not be done: nobody waits for its turn, nor for an answer that it was to be.
    pub(super) fn give_up(&mut self, queue: &Queue) {
        if let Some(Job::Other(other)) = &self.job {
            other.give_up(&queue.session);
        }
        if let Ok(tenant) = queue.session.tenant() {
            tenant.give_back(core::mem::take(&mut self.turn));
        }
    }

    /// Whether a worker may do it now, who is not to wait for that.
    fn may_go(&mut self, queue: &Queue) -> bool {
        let job = self.job.as_ref().filter(|job| !job.is_flying());
        let Some((len, deadline)) = job.and_then(|job| job.len(&queue.session).zip(job.deadline()))
        else {
            return true;
        };
        let tenant = queue.session.tenant();
        let may_go = tenant.and_then(|tenant| tenant.may_go(&mut self.turn, len, deadline));
        // Without memory it is looked at again.
        may_go.unwrap_or(false)
    }

    /// Whether it can be given up: nothing that was posted has to be waited for.
    pub(super) fn can_cancel(&self) -> bool {
        self.job.as_ref().is_some_and(|job| !job.is_flying())
    }
}

impl Queue {
    /// Whether a worker would take one more request.
    pub(super) fn has_worker(&self) -> bool {
        self.slow.load(Acquire) < SLOW_MAX
    }

    /// Has a worker finish a job.
    fn spawn(self: &Arc<Self>, tag: u64, job: Job, turn: Turn) -> Progress {
        self.slow.fetch_add(1u32, Full);
        let queue = self.clone();
        let spawned = self.rnic.spawn(move || {
            let finished = match queue.payer.pays(|| job.finish(&queue)) {
                Ok(value) => Finished::Done(Ok(value)),
                Err(Unfinished::Failed(error)) => Finished::Done(Err(error)),
                Err(Unfinished::Back(job)) => Finished::Back(Task {
                    tag,
                    job: Some(job),
                    turn,
                }),
            };
            queue.worker_done(tag, finished);
        });
        match spawned {
            Ok(()) => Progress::Left,
            Err(error) => {
                self.slow.fetch_sub(1u32, Full);
                Progress::Done(Err(error))
            }
        }
    }
}
