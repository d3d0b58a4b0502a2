// SPDX-License-Identifier: GPL-2.0

//! A read or write by a queue.
//!
//! If it is short and in one piece it joins a batch ([`super::batch`]) as soon as there is room for it. A worker
//! does what is longer, and does again what failed with its queue pair.

use super::{
    batch::{BatchCandidate, BatchJoinResult, PollRound},
    task::JobPoll,
    IoQueue,
};
use crate::{
    fabric::{
        qos::tenant::AdmissionTicket,
        send::{
            batch::BatchedSegment,
            inflight::{copy_out, FailedOp},
            slots::SlotGuard,
        },
    },
    region::map::{io::AccessRequest, Mapping},
    stats::Stats,
    sys::{buffer::Buffer, deadline::Deadline},
};
use kernel::prelude::*;

/// How far it is.
enum AccessJobState {
    New,
    /// It is in a batch.
    Posted(BatchedSegment),
    /// The queue pair of its batch failed.
    QpFailed(FailedOp),
    Done(Result),
}

/// A read or write.
pub(super) struct AccessJob {
    handle_id: u64,
    access: AccessRequest,
    memory: Buffer,
    state: AccessJobState,
}

impl AccessJob {
    /// One that was not begun.
    pub(super) fn new(handle_id: u64, (access, memory): (AccessRequest, Buffer)) -> Self {
        Self {
            handle_id,
            access,
            memory,
            state: AccessJobState::New,
        }
    }

    /// How many bytes it moves.
    pub(super) fn len(&self) -> u64 {
        self.access.len
    }

    /// When it gives up.
    pub(super) fn deadline(&self) -> Deadline {
        self.access.deadline
    }

    /// What came of it, if its batch has ended.
    pub(super) fn result(&self) -> Option<Result<u64>> {
        match &self.state {
            AccessJobState::Done(result) => Some(result.map(|()| 0)),
            _ => None,
        }
    }

    /// Goes on.
    pub(super) fn poll(
        &mut self,
        queue: &IoQueue,
        round: &mut PollRound<'_>,
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
            Ok(BatchJoinResult::Done) => JobPoll::Done(Ok(0)),
            Ok(BatchJoinResult::NeedsWorker) => JobPoll::NeedsWorker,
            Ok(BatchJoinResult::Joined(placed)) => {
                self.state = AccessJobState::Posted(placed);
                JobPoll::Batched
            }
            Err(error) if error == EAGAIN => JobPoll::Pending,
            Err(error) => JobPoll::Done(Err(error)),
        }
    }

    /// So many requests of its batch are done, the first ones.
    pub(super) fn on_wrs_done(&mut self, slot: &SlotGuard, done_wrs: u32) {
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
            self.complete(bounce_offset.map_or(Ok(()), deliver));
        }
    }

    /// The queue pair of its batch failed.
    pub(super) fn fail(&mut self, failed: &FailedOp) {
        if let AccessJobState::Posted(_) = self.state {
            self.state = AccessJobState::QpFailed(failed.clone());
        }
    }

    /// This came of it.
    pub(super) fn complete(&mut self, result: Result) {
        self.state = AccessJobState::Done(result);
    }

    /// Takes note of its end, if it has ended.
    pub(super) fn account(&self, mapping: &Mapping, stats: &Stats) {
        if let AccessJobState::Done(result) = &self.state {
            self.access.account(mapping, stats, result.err());
        }
    }

    /// Does what is left, and waits for what it takes.
    pub(super) fn run_blocking(self, queue: &IoQueue) -> Result<u64> {
        if let AccessJobState::QpFailed(failed) = &self.state {
            self.wait_qp_replaced(queue, failed)?;
        }
        let result = queue
            .session
            .access(self.handle_id, &self.access, &self.memory);
        result.map(|()| 0)
    }

    /// Waits until nothing of a failed attempt can come late.
    fn wait_qp_replaced(&self, queue: &IoQueue, failed: &FailedOp) -> Result {
        let _rpc = queue.session.enter_rpc()?;
        let result = failed.wait_qp_replaced(self.access.deadline);
        result.inspect_err(|_| queue.rnic.stats.errors.add(1))
    }
}
