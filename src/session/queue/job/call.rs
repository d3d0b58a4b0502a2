// SPDX-License-Identifier: GPL-2.0

//! Calls and one-way messages submitted through an I/O queue.
//!
//! # Operation
//!
//! If the handle has an open channel, the call is sent as soon as the ring of the server has credits. The
//! thread that drives the queue polls for the reply. A worker attaches a channel if none is open, and
//! transfers data to and from rendezvous buffers. A worker does not wait for the reply, because the server
//! may take arbitrarily long.
//!
//! # Recovery
//!
//! A worker retries a transmission whose QP failed.

use crate::{
    errno::TryError,
    fabric::qos::tenant::AdmissionTicket,
    rpc::{
        channel::send_op::{RpcSendOp, RpcSendState},
        client::{stale_to_connreset, ReplyData},
    },
    session::{
        call::CallStartResult,
        call_args::RpcRequest,
        queue::{
            poll::{JobIncomplete, JobPoll},
            IoQueue,
        },
        rendezvous::{CallBuffers, PendingCall},
    },
    sys::deadline::Deadline,
};
use kernel::{
    prelude::*,
    time::{Instant, Monotonic},
};

/// State of a call.
enum CallJobState {
    New,
    /// In transmission. If the message expects a reply, with the pending call.
    Sending(RpcSendOp, Option<PendingCall>),
    /// Sent, and waiting for the reply.
    AwaitingReply(PendingCall),
    /// Reply received. The data of the reply are in a rendezvous buffer.
    StoringReply(ReplyData, CallBuffers),
    /// Complete, with the length of the reply in bytes.
    Done(u64),
}

/// Call or one-way message.
pub(in crate::session::queue) struct CallJob {
    handle_id: u64,
    request: RpcRequest,
    state: CallJobState,
}

impl CallJob {
    /// Returns a new call.
    pub(super) fn new(handle_id: u64, request: RpcRequest) -> Self {
        Self {
            handle_id,
            request,
            state: CallJobState::New,
        }
    }

    /// Returns the length of the data to send in bytes.
    pub(super) fn len(&self) -> u64 {
        self.request.len
    }

    /// Returns the deadline.
    pub(super) fn deadline(&self) -> Deadline {
        self.request.deadline
    }

    /// Returns `true` if the message is posted and its completion is pending.
    pub(super) fn is_inflight(&self) -> bool {
        matches!(&self.state, CallJobState::Sending(sending, _) if sending.is_inflight())
    }

    /// Returns `true` if no progress is possible before a completion or a reply arrives.
    pub(in crate::session::queue) fn is_waiting(&self) -> bool {
        match &self.state {
            CallJobState::Sending(sending, _) => sending.is_inflight() && !sending.has_completed(),
            CallJobState::AwaitingReply(pending) => !pending.waiter.has_completed(),
            _ => false,
        }
    }

    /// Returns `true` if the message was posted or sent.
    pub(in crate::session::queue) fn is_started(&self) -> bool {
        self.is_inflight() || matches!(self.state, CallJobState::AwaitingReply(_))
    }

    /// Polls the CQ of the RNIC, for all waiters, if the call waits for a completion. Returns `true` if so.
    pub(in crate::session::queue) fn poll_cq(&self) -> bool {
        match &self.state {
            CallJobState::Sending(sending, _) => sending.poll_cq(),
            _ => false,
        }
    }

    /// Makes progress without blocking.
    pub(super) fn poll(
        &mut self,
        queue: &IoQueue,
        now: Instant<Monotonic>,
        ticket: &mut AdmissionTicket,
    ) -> JobPoll {
        let polled = match &self.state {
            CallJobState::New => self.try_start(queue, now, ticket),
            CallJobState::Sending(..) => self.poll_send(queue, now),
            CallJobState::AwaitingReply(_) => self.poll_reply(queue, now),
            CallJobState::StoringReply(..) => JobPoll::NeedsWorker,
            CallJobState::Done(len) => JobPoll::Ready(Ok(*len)),
        };
        if let JobPoll::Ready(result) = &polled {
            queue.session.count_call_result(result);
        }
        polled
    }

    fn try_start(
        &mut self,
        queue: &IoQueue,
        now: Instant<Monotonic>,
        ticket: &mut AdmissionTicket,
    ) -> JobPoll {
        let start = || {
            queue
                .session
                .try_start_call(self.handle_id, &self.request, ticket)
        };
        match queue.memcg.with_active(start) {
            Ok(CallStartResult::Sending(sending, pending)) => {
                self.state = CallJobState::Sending(sending, pending);
                self.poll_send(queue, now)
            }
            Ok(CallStartResult::NeedsWorker) => JobPoll::NeedsWorker,
            Err(TryError::WouldBlock) => self.retry_or_time_out(),
            Err(error) => JobPoll::Ready(Err(error.into())),
        }
    }

    /// Tries again in a later round, unless the deadline has passed.
    fn retry_or_time_out(&self) -> JobPoll {
        // Not `Deadline::check`: signals of the polling thread do not concern the submitter.
        if self.request.deadline.has_expired() {
            JobPoll::Ready(Err(ETIMEDOUT))
        } else {
            JobPoll::Pending
        }
    }

    fn poll_send(&mut self, queue: &IoQueue, now: Instant<Monotonic>) -> JobPoll {
        let CallJobState::Sending(sending, pending) = &mut self.state else {
            return JobPoll::NeedsWorker;
        };
        match sending.advance(now) {
            Ok(RpcSendState::Done) => match pending.take() {
                Some(pending) => {
                    self.state = CallJobState::AwaitingReply(pending);
                    self.poll_reply(queue, now)
                }
                None => JobPoll::Ready(Ok(0)),
            },
            Ok(RpcSendState::Inflight) => JobPoll::Pending,
            Ok(RpcSendState::NoCredits) => self.retry_or_time_out(),
            Ok(RpcSendState::Failed) => JobPoll::NeedsWorker,
            Err(error) => JobPoll::Ready(Err(stale_to_connreset(error))),
        }
    }

    fn poll_reply(&mut self, queue: &IoQueue, now: Instant<Monotonic>) -> JobPoll {
        let CallJobState::AwaitingReply(pending) = &mut self.state else {
            return JobPoll::NeedsWorker;
        };
        match pending.waiter.poll_reply(self.request.deadline, now) {
            None => JobPoll::Pending,
            Some(Err(error)) => JobPoll::Ready(Err(error)),
            Some(Ok(reply)) => self.store_reply(queue, reply),
        }
    }

    /// Stores an inline reply. Leaves a reply in a rendezvous buffer to a worker.
    fn store_reply(&mut self, queue: &IoQueue, reply: ReplyData) -> JobPoll {
        if let CallJobState::AwaitingReply(pending) =
            core::mem::replace(&mut self.state, CallJobState::New)
        {
            if reply.inline_bytes().is_some() {
                let stored =
                    queue
                        .session
                        .store_reply(&reply, pending.buffers, &self.request.reply_buffer);
                return JobPoll::Ready(stored);
            }
            self.state = CallJobState::StoringReply(reply, pending.buffers);
        }
        JobPoll::NeedsWorker
    }

    /// Executes the step that may block, but does not wait for the reply. Returns the job if more steps
    /// follow.
    pub(super) fn run_blocking(mut self, queue: &IoQueue) -> Result<u64, JobIncomplete<Self>> {
        let result = match core::mem::replace(&mut self.state, CallJobState::New) {
            CallJobState::New => self.prepare_send(queue),
            CallJobState::Sending(sending, pending) => self.finish_send(queue, sending, pending),
            CallJobState::StoringReply(reply, buffers) => {
                let session = &queue.session;
                let stored = session.store_reply(&reply, buffers, &self.request.reply_buffer);
                stored.map(|len| self.state = CallJobState::Done(len))
            }
            other => {
                self.state = other;
                Ok(())
            }
        };
        let result = match (result, &self.state) {
            (Ok(()), CallJobState::Done(len)) => Ok(*len),
            (Ok(()), _) => return Err(JobIncomplete::Resume(self)),
            (Err(error), _) => Err(error),
        };
        queue.session.count_call_result(&result);
        Ok(result?)
    }

    fn prepare_send(&mut self, queue: &IoQueue) -> Result {
        let (sending, pending) = queue.session.prepare_call(self.handle_id, &self.request)?;
        self.state = CallJobState::Sending(sending, pending);
        Ok(())
    }

    fn finish_send(
        &mut self,
        queue: &IoQueue,
        sending: RpcSendOp,
        pending: Option<PendingCall>,
    ) -> Result {
        let _rpc = queue.session.enter_rpc()?;
        let sent = sending.finish(self.request.deadline);
        sent.map_err(stale_to_connreset)?;
        self.state = pending.map_or(CallJobState::Done(0), CallJobState::AwaitingReply);
        Ok(())
    }
}
