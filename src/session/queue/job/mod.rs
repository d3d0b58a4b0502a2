// SPDX-License-Identifier: GPL-2.0

//! Jobs: the requests of an I/O queue's submissions, one file per kind.
//!
//! # Operation
//!
//! [`parse`] makes a job of a submission. Reads and writes ([`access`]), calls ([`call`]) and receives
//! ([`receive`]) advance by polls that do not block. Their steps that may block, and all steps of other
//! requests ([`blocking`]), run on a worker. Requests of virtual queue pairs ([`push`]) are passed on to the
//! VQP.

pub(super) mod access;
mod blocking;
mod call;
mod parse;
pub(super) mod push;
mod receive;

pub(super) use self::parse::parse_job;
use self::{
    access::AccessJob, blocking::BlockingJob, call::CallJob, push::VqpPushJob, receive::ReceiveJob,
};
use super::{
    batch::PollRound,
    poll::{JobIncomplete, JobPoll},
    IoQueue,
};
use crate::{fabric::qos::tenant::AdmissionTicket, session::Session, sys::deadline::Deadline};
use kernel::prelude::*;

/// Request of a submission.
pub(in crate::session::queue) enum Job {
    Access(AccessJob),
    Call(CallJob),
    Receive(ReceiveJob),
    Push(VqpPushJob),
    Blocking(BlockingJob),
    /// The submission is invalid.
    Invalid(Error),
}

impl Job {
    /// Makes progress without blocking. The caller passes a VQP request on to its VQP instead.
    pub(in crate::session::queue) fn poll<T>(
        &mut self,
        queue: &IoQueue,
        round: &mut PollRound<'_, T>,
        ticket: &mut AdmissionTicket,
    ) -> JobPoll {
        match self {
            Self::Access(short) => short.poll(queue, round, ticket),
            Self::Call(call) => call.poll(queue, round.now, ticket),
            Self::Receive(receive) => receive.poll(queue, round.now),
            Self::Push(_) => JobPoll::Pending,
            Self::Blocking(_) => JobPoll::NeedsWorker,
            Self::Invalid(error) => JobPoll::Ready(Err(*error)),
        }
    }

    /// Executes the steps that may block. Returns the job if the other steps do not block.
    pub(in crate::session::queue) fn run_blocking(
        self,
        queue: &IoQueue,
    ) -> Result<u64, JobIncomplete<Self>> {
        match self {
            Self::Access(short) => Ok(short.run_blocking(queue)?),
            Self::Call(call) => call
                .run_blocking(queue)
                .map_err(|incomplete| incomplete.map(Self::Call)),
            Self::Receive(receive) => receive
                .run_blocking(queue)
                .map_err(|incomplete| incomplete.map(Self::Receive)),
            Self::Blocking(other) => Ok(other.run(&queue.session)?),
            push @ Self::Push(_) => Err(JobIncomplete::Resume(push)),
            Self::Invalid(error) => Err(error.into()),
        }
    }

    /// Returns the number of bytes for admission, or `None` if the job needs no admission by a worker.
    pub(in crate::session::queue) fn len(&self, session: &Session) -> Option<u64> {
        match self {
            Self::Access(short) => Some(short.len()),
            Self::Call(call) => Some(call.len()),
            Self::Blocking(other) => other.len(session),
            Self::Receive(_) | Self::Push(_) | Self::Invalid(_) => None,
        }
    }

    /// Returns the deadline, if any.
    pub(in crate::session::queue) fn deadline(&self) -> Option<Deadline> {
        match self {
            Self::Access(short) => Some(short.deadline()),
            Self::Call(call) => Some(call.deadline()),
            Self::Blocking(other) => Some(other.deadline()),
            Self::Receive(receive) => Some(receive.deadline()),
            Self::Push(_) | Self::Invalid(_) => None,
        }
    }

    /// Returns `true` if the job is posted outside of a batch, and its completion is pending.
    pub(in crate::session::queue) fn is_inflight(&self) -> bool {
        match self {
            Self::Call(call) => call.is_inflight(),
            _ => false,
        }
    }
}
