// SPDX-License-Identifier: GPL-2.0

//! Reads and writes submitted through an I/O queue.
//!
//! # Operation
//!
//! A short access to one chunk joins a batch ([`super::super::batch`]) as soon as a batch has room. Longer
//! accesses run on a worker.
//!
//! # Recovery
//!
//! A worker retries an access whose QP failed, after the QP was replaced.

use crate::{
    errno::TryError,
    fabric::{
        qos::tenant::AdmissionTicket,
        send::{
            batch::BatchedSegment,
            inflight::{copy_out, FailedOp},
            slots::SlotGuard,
        },
    },
    region::map::{access::AccessRequest, Mapping},
    session::queue::{
        batch::{BatchCandidate, BatchJoinResult, PollRound},
        poll::JobPoll,
        IoQueue,
    },
    stats::Stats,
    sys::{buffer::Buffer, deadline::Deadline},
};
use kernel::prelude::*;

/// State of an access.
enum AccessJobState {
    New,
    /// In a batch.
    Posted(BatchedSegment),
    /// The QP of the batch failed.
    QpFailed(FailedOp),
    Done(Result),
}

/// Read or write.
pub(in crate::session::queue) struct AccessJob {
    handle_id: u64,
    access: AccessRequest,
    memory: Buffer,
    state: AccessJobState,
}

impl AccessJob {
    /// Returns a new access.
    pub(super) fn new(handle_id: u64, (access, memory): (AccessRequest, Buffer)) -> Self {
        Self {
            handle_id,
            access,
            memory,
            state: AccessJobState::New,
        }
    }

    /// Returns the length in bytes.
    pub(super) fn len(&self) -> u64 {
        self.access.len
    }

    /// Returns the deadline.
    pub(super) fn deadline(&self) -> Deadline {
        self.access.deadline
    }

    /// Returns the result, if the access was in a batch and is complete.
    pub(in crate::session::queue) fn result(&self) -> Option<Result<u64>> {
        match &self.state {
            AccessJobState::Done(result) => Some(result.map(|()| 0)),
            _ => None,
        }
    }

    /// Starts the access without blocking.
    pub(super) fn poll<T>(
        &mut self,
        queue: &IoQueue,
        round: &mut PollRound<'_, T>,
        ticket: &mut AdmissionTicket,
    ) -> JobPoll {
        if !matches!(self.state, AccessJobState::New) {
            return JobPoll::NeedsWorker;
        }
        let candidate = BatchCandidate {
            session: &queue.session,
            handle_id: self.handle_id,
            access: &self.access,
            memory: &self.memory,
        };
        match round.submit(&candidate, ticket) {
            Ok(BatchJoinResult::Done) => JobPoll::Ready(Ok(0)),
            Ok(BatchJoinResult::NeedsWorker) => JobPoll::NeedsWorker,
            Ok(BatchJoinResult::Joined(placed)) => {
                self.state = AccessJobState::Posted(placed);
                JobPoll::Batched
            }
            Err(TryError::WouldBlock) => JobPoll::Pending,
            Err(error) => JobPoll::Ready(Err(error.into())),
        }
    }

    /// Completes the access if all of its WRs are among the first `done_wrs` WRs of the batch.
    pub(in crate::session::queue) fn on_wrs_done(&mut self, slot: &SlotGuard, done_wrs: u32) {
        let AccessJobState::Posted(BatchedSegment {
            segment,
            bounce_offset,
            wr_end,
        }) = self.state
        else {
            return;
        };
        if wr_end <= done_wrs {
            let direction = self.access.direction;
            let deliver = |offset| copy_out(direction, &self.memory, slot, segment, offset);
            self.complete(bounce_offset.map_or(Ok(()), deliver).map_err(Into::into));
        }
    }

    /// Records that the QP of the batch failed.
    pub(in crate::session::queue) fn fail(&mut self, failed: &FailedOp) {
        if let AccessJobState::Posted(_) = self.state {
            self.state = AccessJobState::QpFailed(failed.clone());
        }
    }

    /// Records the result.
    pub(in crate::session::queue) fn complete(&mut self, result: Result) {
        self.state = AccessJobState::Done(result);
    }

    /// Counts and traces the result, if the access is complete.
    pub(in crate::session::queue) fn account(&self, mapping: &Mapping, stats: &Stats) {
        if let AccessJobState::Done(result) = &self.state {
            self.access.account(mapping, stats, result.err());
        }
    }

    /// Executes the access, or retries the access after a QP failure. May block.
    pub(super) fn run_blocking(self, queue: &IoQueue) -> Result<u64> {
        if let AccessJobState::QpFailed(failed) = &self.state {
            self.wait_qp_replaced(queue, failed)?;
        }
        let result = queue
            .session
            .access(self.handle_id, &self.access, &self.memory);
        result.map(|()| 0)
    }

    /// Waits until the failed QP is replaced, so that no part of the failed attempt takes effect later.
    fn wait_qp_replaced(&self, queue: &IoQueue, failed: &FailedOp) -> Result {
        let _rpc = queue.session.enter_rpc()?;
        let result = failed.wait_qp_replaced(self.access.deadline);
        result.inspect_err(|_| queue.rnic.stats.errors.add(1))
    }
}
