// SPDX-License-Identifier: GPL-2.0

//! A call or message by a queue.
//!
//! If there is a link to who serves the region it is sent as soon as there is room for it, and whoever drives
//! the queue looks for the reply. A worker makes a link where there is none, fills and empties relays, and sends
//! again what failed with its queue pair; it does not wait for the reply, which is another user's to give.

use super::{
    batch::PollRound,
    task::{Job, JobIncomplete, JobPoll},
    IoQueue,
};
use crate::{
    fabric::qos::tenant::AdmissionTicket,
    rpc::client::{
        call::{stale_to_connreset, ReplyData},
        send_op::{RpcSendOp, RpcSendState},
    },
    session::{
        call::{CallStartResult, RpcRequest},
        rendezvous::{CallBuffers, PendingCall},
    },
    sys::deadline::Deadline,
};
use kernel::{
    prelude::*,
    time::{Instant, Monotonic},
};

/// How far it is.
enum CallJobState {
    New,
    /// It is being sent; if it is to be answered, with what waits for that.
    Sending(RpcSendOp, Option<PendingCall>),
    /// It was sent, and is to be answered.
    AwaitingReply(PendingCall),
    /// Its reply has come, and the data of that are in a relay.
    StoringReply(ReplyData, CallBuffers),
    /// All is done; with the bytes of the reply.
    Done(u64),
}

/// A call or message.
pub(super) struct CallJob {
    handle_id: u64,
    request: RpcRequest,
    state: CallJobState,
}

impl CallJob {
    /// One that was not begun.
    pub(super) fn new(handle_id: u64, request: RpcRequest) -> Self {
        Self {
            handle_id,
            request,
            state: CallJobState::New,
        }
    }

    /// How many bytes it takes there.
    pub(super) fn len(&self) -> u64 {
        self.request.len
    }

    /// When it gives up.
    pub(super) fn deadline(&self) -> Deadline {
        self.request.deadline
    }

    /// Whether it was posted, and its completion is to come.
    pub(super) fn is_inflight(&self) -> bool {
        matches!(&self.state, CallJobState::Sending(sending, _) if sending.is_inflight())
    }

    /// Whether nothing is to be done before something completes or comes.
    pub(super) fn is_waiting(&self) -> bool {
        match &self.state {
            CallJobState::Sending(sending, _) => sending.is_inflight() && !sending.has_completed(),
            CallJobState::AwaitingReply(pending) => !pending.waiter.has_completed(),
            _ => false,
        }
    }

    /// Whether it was posted or sent.
    pub(super) fn is_started(&self) -> bool {
        self.is_inflight() || matches!(self.state, CallJobState::AwaitingReply(_))
    }

    /// Looks for completions of everybody, if this waits for one. Returns whether it does.
    pub(super) fn poll_cq(&self) -> bool {
        match &self.state {
            CallJobState::Sending(sending, _) => sending.poll_cq(),
            _ => false,
        }
    }

    /// Goes on.
    pub(super) fn poll(
        &mut self,
        queue: &IoQueue,
        round: &PollRound<'_>,
        ticket: &mut AdmissionTicket,
    ) -> JobPoll {
        let polled = match &self.state {
            CallJobState::New => self.try_start(queue, round.now, ticket),
            CallJobState::Sending(..) => self.poll_send(queue, round.now),
            CallJobState::AwaitingReply(_) => self.poll_reply(queue, round.now),
            CallJobState::StoringReply(..) => JobPoll::NeedsWorker,
            CallJobState::Done(len) => JobPoll::Done(Ok(*len)),
        };
        if let JobPoll::Done(result) = &polled {
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
            Err(error) if error == EAGAIN => self.retry_or_time_out(),
            Err(error) => JobPoll::Done(Err(error)),
        }
    }

    /// Tries again, unless the deadline has passed.
    fn retry_or_time_out(&self) -> JobPoll {
        // Signals to whoever looks are not the caller's.
        if self.request.deadline.has_expired() {
            JobPoll::Done(Err(ETIMEDOUT))
        } else {
            JobPoll::Pending
        }
    }

    fn poll_send(&mut self, queue: &IoQueue, now: Instant<Monotonic>) -> JobPoll {
        let CallJobState::Sending(sending, pending) = &mut self.state else {
            return JobPoll::NeedsWorker;
        };
        match sending.advance(&queue.rnic.stats, now) {
            Ok(RpcSendState::Done) => match pending.take() {
                Some(pending) => {
                    self.state = CallJobState::AwaitingReply(pending);
                    self.poll_reply(queue, now)
                }
                None => JobPoll::Done(Ok(0)),
            },
            Ok(RpcSendState::Inflight) => JobPoll::Pending,
            Ok(RpcSendState::NoCredits) => self.retry_or_time_out(),
            Ok(RpcSendState::Failed) => JobPoll::NeedsWorker,
            Err(error) => JobPoll::Done(Err(stale_to_connreset(error))),
        }
    }

    fn poll_reply(&mut self, queue: &IoQueue, now: Instant<Monotonic>) -> JobPoll {
        let CallJobState::AwaitingReply(pending) = &mut self.state else {
            return JobPoll::NeedsWorker;
        };
        match pending.waiter.poll_reply(self.request.deadline, now) {
            None => JobPoll::Pending,
            Some(Err(error)) => JobPoll::Done(Err(error)),
            Some(Ok(reply)) => self.store_reply(queue, reply),
        }
    }

    /// Stores a reply, unless that takes longer.
    fn store_reply(&mut self, queue: &IoQueue, reply: ReplyData) -> JobPoll {
        if let CallJobState::AwaitingReply(pending) =
            core::mem::replace(&mut self.state, CallJobState::New)
        {
            if reply.inline_bytes().is_some() {
                let stored =
                    queue
                        .session
                        .store_reply(&reply, pending.buffers, &self.request.reply_buffer);
                return JobPoll::Done(stored);
            }
            self.state = CallJobState::StoringReply(reply, pending.buffers);
        }
        JobPoll::NeedsWorker
    }

    /// Does what may have to wait, but not for the reply. Returns the job if there is more to do.
    pub(super) fn run_blocking(mut self, queue: &IoQueue) -> Result<u64, JobIncomplete> {
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
            (Ok(()), _) => return Err(JobIncomplete::Resume(Job::Call(self))),
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
        let sent = sending.finish(&queue.rnic.stats, self.request.deadline);
        sent.map_err(stale_to_connreset)?;
        self.state = pending.map_or(CallJobState::Done(0), CallJobState::AwaitingReply);
        Ok(())
    }
}
