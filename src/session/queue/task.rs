// SPDX-License-Identifier: GPL-2.0

//! A submission under way.
//!
//! Each kind of request goes on by steps that wait for nothing: [`Short`], [`Call`]. What takes longer, or is
//! of another kind, is left to a worker, who finishes it as the system call would.

use super::{call::Call, run, short::Short, Queue, SLOW_MAX};
use crate::bindings;
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
    /// The next is to be tried later.
    Stays,
    /// The rest may have to wait.
    Slow,
}

/// What is to be done.
enum Job {
    Short(Short),
    Call(Call),
    Other(bindings::kite_submission),
    /// It cannot be.
    Wrong(Error),
}

impl Job {
    fn new(queue: &Queue, submission: &bindings::kite_submission) -> Result<Self> {
        if submission.reserved != 0 {
            return Err(EINVAL);
        }
        if let Some(short) = run::short(queue.caller(), submission)? {
            return Ok(Self::Short(short));
        }
        if let Some(call) = run::call(queue.caller(), submission)? {
            return Ok(Self::Call(call));
        }
        Ok(Self::Other(*submission))
    }

    fn step(&mut self, queue: &Queue) -> Step {
        match self {
            Self::Short(short) => short.step(queue),
            Self::Call(call) => call.step(queue),
            Self::Other(_) => Step::Slow,
            Self::Wrong(error) => Step::Done(Err(*error)),
        }
    }

    fn finish(self, queue: &Queue) -> Result<u64> {
        match self {
            Self::Short(short) => short.finish(queue),
            Self::Call(call) => call.finish(queue),
            Self::Other(submission) => run::run(queue, &submission),
            Self::Wrong(error) => Err(error),
        }
    }
}

/// What came of a look at a task.
pub(super) enum Progress {
    Done(Result<u64>),
    /// A worker has it.
    Left,
    /// It is to be looked at again.
    Stays,
}

/// A submission.
pub(super) struct Task {
    pub(super) tag: u64,
    /// Nothing once a worker has it.
    job: Option<Job>,
}

impl Task {
    /// Takes a submission on.
    pub(super) fn new(queue: &Queue, submission: &bindings::kite_submission) -> Self {
        let job = Job::new(queue, submission);
        Self {
            tag: submission.tag,
            job: Some(job.unwrap_or_else(Job::Wrong)),
        }
    }

    /// Whether nothing is to be done before something completes or comes.
    pub(super) fn is_waiting(&self) -> bool {
        match &self.job {
            Some(Job::Short(short)) => short.is_flying(),
            Some(Job::Call(call)) => call.is_waiting(),
            _ => false,
        }
    }

    /// Looks for completions of everybody, if this waits for one. Returns whether it does.
    pub(super) fn look(&self) -> bool {
        match &self.job {
            Some(Job::Short(short)) => short.look(),
            Some(Job::Call(call)) => call.look(),
            _ => false,
        }
    }

    /// Goes on, if that is possible without waiting.
    pub(super) fn advance(&mut self, queue: &Arc<Queue>) -> Progress {
        let step = self.job.as_mut().map(|job| job.step(queue));
        match step {
            Some(Step::Done(result)) => Progress::Done(result),
            Some(Step::Slow) if queue.has_worker() => match self.job.take() {
                Some(job) => queue.spawn(self.tag, job),
                None => Progress::Left,
            },
            Some(_) => Progress::Stays,
            None => Progress::Left,
        }
    }

    /// Whether it can be given up: nothing that was posted has to be waited for.
    pub(super) fn can_cancel(&self) -> bool {
        match &self.job {
            Some(Job::Short(short)) => !short.is_flying(),
            Some(Job::Call(call)) => !call.is_flying(),
            _ => true,
        }
    }
}

impl Queue {
    /// Whether a worker would take one more request.
    fn has_worker(&self) -> bool {
        self.slow.load(Acquire) < SLOW_MAX
    }

    /// Has a worker finish a job.
    fn spawn(self: &Arc<Self>, tag: u64, job: Job) -> Progress {
        self.slow.fetch_add(1u32, Full);
        let queue = self.clone();
        let spawned = self.rnic.spawn(move || {
            let result = queue.payer.pays(|| job.finish(&queue));
            queue.worker_done(tag, result);
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
