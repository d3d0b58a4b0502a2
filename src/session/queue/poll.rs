// SPDX-License-Identifier: GPL-2.0

//! Progress of an I/O queue's jobs and tasks: how a poll without blocking ended, and how a worker ended.

use kernel::prelude::*;

/// Result of polling a job.
pub(super) enum JobPoll {
    /// Complete.
    Ready(Result<u64>),
    /// Joined the batch that was joined last.
    Batched,
    /// Must be polled again later.
    Pending,
    /// The next step may block.
    NeedsWorker,
}

/// Result of polling a task.
pub(super) enum TaskPoll {
    /// Complete.
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

/// Reason why a worker did not complete a job. `T` is the job or its task.
pub(super) enum JobIncomplete<T> {
    Failed(Error),
    /// The job continues without a worker.
    Resume(T),
}

impl<T> JobIncomplete<T> {
    /// Converts the job.
    pub(super) fn map<U>(self, convert: impl FnOnce(T) -> U) -> JobIncomplete<U> {
        match self {
            Self::Failed(error) => JobIncomplete::Failed(error),
            Self::Resume(job) => JobIncomplete::Resume(convert(job)),
        }
    }
}

impl<T> From<Error> for JobIncomplete<T> {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}
