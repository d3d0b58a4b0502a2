// SPDX-License-Identifier: GPL-2.0

//! Receives submitted through an I/O queue.
//!
//! # Operation
//!
//! The thread that drives the queue polls for calls after each arrival, and receives a call. If the data must
//! be fetched from the caller's node (rendezvous), a worker fetches the data.

use crate::{
    bindings,
    errno::{self, TryError},
    rpc::{rendezvous::call::RendezvousCall, server::PolledReceiver},
    session::{
        args::ReceiveArgs,
        queue::{
            poll::{JobIncomplete, JobPoll},
            IoQueue,
        },
        serve::{accepted::CallReservation, IncomingCall, TryReceiveResult},
        uapi,
    },
    sys::deadline::Deadline,
};
use kernel::{
    prelude::*,
    time::{Instant, Monotonic},
};

/// Interval in milliseconds between checks that the region still exists.
const RECHECK_MS: i64 = 1000;

/// Receive of one call or message.
pub(in crate::session::queue) struct ReceiveJob {
    args: ReceiveArgs,
    reservation: Option<CallReservation>,
    polled_receiver: Option<PolledReceiver>,
    /// Time of the last poll, and whether that poll accepted rendezvous calls, because a worker was free.
    last_poll: Option<(Instant<Monotonic>, bool)>,
    /// Received call whose data a worker must fetch.
    rendezvous_call: Option<RendezvousCall>,
}

impl ReceiveJob {
    /// Returns a new receive.
    pub(super) fn new(args: ReceiveArgs) -> Self {
        Self {
            args,
            reservation: None,
            polled_receiver: None,
            last_poll: None,
            rendezvous_call: None,
        }
    }

    /// Returns the deadline.
    pub(super) fn deadline(&self) -> Deadline {
        self.args.deadline
    }

    /// Returns `true` if no progress is possible before a call arrives or a worker becomes free.
    pub(in crate::session::queue) fn is_waiting(&self) -> bool {
        let longs = self
            .last_poll
            .is_none_or(|(_, accept_rendezvous)| accept_rendezvous);
        self.is_known_empty(longs)
    }

    fn is_known_empty(&self, accept_rendezvous: bool) -> bool {
        let receiver = self
            .polled_receiver
            .as_ref()
            .filter(|_| self.rendezvous_call.is_none());
        receiver.is_some_and(|receiver| receiver.is_known_empty(accept_rendezvous))
    }

    /// Makes progress without blocking.
    pub(super) fn poll(&mut self, queue: &IoQueue, now: Instant<Monotonic>) -> JobPoll {
        let deadline = self.args.deadline;
        match self.poll_once(queue, now) {
            Ok(Some(step)) => step,
            Ok(None) if deadline.has_expired_at(now) => JobPoll::Ready(Err(ETIMEDOUT)),
            Ok(None) => JobPoll::Pending,
            Err(error) => JobPoll::Ready(Err(error)),
        }
    }

    /// Polls for a call, unless none has arrived since the last poll. Returns `None` if no call is available.
    fn poll_once(&mut self, queue: &IoQueue, now: Instant<Monotonic>) -> Result<Option<JobPoll>> {
        if self.rendezvous_call.is_some() {
            return Ok(Some(JobPoll::NeedsWorker));
        }
        let session = &queue.session;
        if self.polled_receiver.is_none() {
            match session.register_polled_receive(self.args.handle) {
                Err(TryError::WouldBlock) => return Ok(None),
                result => self.polled_receiver = Some(result?),
            }
        }
        let accept_rendezvous = queue.has_free_worker();
        let is_fresh =
            |(checked_at, _): (Instant<_>, _)| (now - checked_at).as_millis() < RECHECK_MS;
        if self.is_known_empty(accept_rendezvous) && self.last_poll.is_some_and(is_fresh) {
            return Ok(None);
        }
        self.last_poll = Some((now, accept_rendezvous));
        match self.try_receive(queue, accept_rendezvous)? {
            TryReceiveResult::Empty | TryReceiveResult::Busy => Ok(None),
            TryReceiveResult::Received(incoming) => {
                Ok(Some(JobPoll::Ready(self.write_header(queue, &incoming))))
            }
            TryReceiveResult::Rendezvous(call) => {
                self.rendezvous_call = Some(call);
                Ok(Some(JobPoll::NeedsWorker))
            }
        }
    }

    fn try_receive(
        &mut self,
        queue: &IoQueue,
        accept_rendezvous: bool,
    ) -> Result<TryReceiveResult> {
        if self.reservation.is_none() {
            self.reservation = queue.memcg.with_active(CallReservation::try_new).ok();
        }
        let ReceiveArgs {
            handle,
            data,
            max_len,
            ..
        } = &self.args;
        let session = &queue.session;
        session.try_receive(
            *handle,
            data,
            *max_len,
            accept_rendezvous,
            &mut self.reservation,
        )
    }

    /// Fetches the data of the received call. May block. Returns the job if the call is lost.
    pub(super) fn run_blocking(mut self, queue: &IoQueue) -> Result<u64, JobIncomplete<Self>> {
        let ReceiveArgs {
            handle,
            data,
            max_len,
            ..
        } = &self.args;
        let session = &queue.session;
        let incoming = match self.rendezvous_call.take() {
            Some(call) => session.receive_rendezvous(*handle, call, data, *max_len)?,
            None => None,
        };
        let Some(incoming) = incoming else {
            return Err(JobIncomplete::Resume(self));
        };
        if queue.is_closed() {
            // The completion cannot reach the server. The abort fails for a message, which needs no reply.
            let _ = session.abort_call(incoming.call_id);
            return Err(errno::canceled().into());
        }
        Ok(self.write_header(queue, &incoming)?)
    }

    /// Writes the header in front of the data. Returns the length of the data.
    fn write_header(&self, queue: &IoQueue, incoming: &IncomingCall) -> Result<u64> {
        let header = bindings::kite_recv_header {
            call: incoming.call_id,
            len: incoming.len,
            function: incoming.function,
            node: incoming.node,
            uid: queue.requester().to_local_uid(incoming.uid),
            reserved: 0,
        };
        // The memory exists: the parser zeroed the header.
        self.args.header.write_slice(0, uapi::as_bytes(&header))?;
        Ok(incoming.len)
    }
}
