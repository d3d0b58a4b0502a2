// SPDX-License-Identifier: GPL-2.0

//! Receiving a call or message by a queue.
//!
//! Whoever drives the queue looks when one has come, and takes it. If its data are yet to be read from the
//! caller's node, a worker does that.

use super::{
    batch::PollRound,
    task::{Job, JobIncomplete, JobPoll},
    IoQueue,
};
use crate::{
    bindings, errno,
    rpc::{rendezvous::queue::RendezvousCall, server::PolledReceiver},
    session::{
        args::ReceiveArgs,
        serve::{CallReservation, IncomingCall, TryReceiveResult},
        uapi,
    },
    sys::deadline::Deadline,
};
use kernel::{
    prelude::*,
    time::{Instant, Monotonic},
};

/// Time between looks whether the region is still there.
const RECHECK_MS: i64 = 1000;

/// A receive.
pub(super) struct ReceiveJob {
    args: ReceiveArgs,
    reservation: Option<CallReservation>,
    polled_receiver: Option<PolledReceiver>,
    /// When it has looked, and whether it would have taken long ones, for which there was a worker.
    last_poll: Option<(Instant<Monotonic>, bool)>,
    /// What was taken, for a worker to have it.
    rendezvous_call: Option<RendezvousCall>,
}

impl ReceiveJob {
    /// One that was not begun.
    pub(super) fn new(args: ReceiveArgs) -> Self {
        Self {
            args,
            reservation: None,
            polled_receiver: None,
            last_poll: None,
            rendezvous_call: None,
        }
    }

    /// When it gives up.
    pub(super) fn deadline(&self) -> Deadline {
        self.args.deadline
    }

    /// Whether nothing is to be done before something comes, or there is a worker.
    pub(super) fn is_waiting(&self) -> bool {
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

    /// Goes on.
    pub(super) fn poll(&mut self, queue: &IoQueue, round: &PollRound<'_>) -> JobPoll {
        let deadline = self.args.deadline;
        match self.poll_once(queue, round.now) {
            Ok(Some(step)) => step,
            Ok(None) if deadline.has_expired_at(round.now) => JobPoll::Done(Err(ETIMEDOUT)),
            Ok(None) => JobPoll::Pending,
            Err(error) => JobPoll::Done(Err(error)),
        }
    }

    /// Looks, unless nothing has come since. Returns nothing if there is nothing.
    fn poll_once(&mut self, queue: &IoQueue, now: Instant<Monotonic>) -> Result<Option<JobPoll>> {
        if self.rendezvous_call.is_some() {
            return Ok(Some(JobPoll::NeedsWorker));
        }
        let session = &queue.session;
        if self.polled_receiver.is_none() {
            match session.register_polled_receive(self.args.handle) {
                Err(error) if error == EAGAIN => return Ok(None),
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
                Ok(Some(JobPoll::Done(self.write_header(&incoming))))
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

    /// Has what was taken, however long that takes. Returns the job if that is not to be had.
    pub(super) fn run_blocking(mut self, queue: &IoQueue) -> Result<u64, JobIncomplete> {
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
            return Err(JobIncomplete::Resume(Job::Receive(self)));
        };
        if queue.is_closed() {
            // Nobody hears of it.
            let _ = session.abandon_call(incoming.call_id);
            return Err(errno::canceled().into());
        }
        Ok(self.write_header(&incoming)?)
    }

    /// Writes what came before its data. Returns the bytes of these.
    fn write_header(&self, incoming: &IncomingCall) -> Result<u64> {
        let header = bindings::kite_recv_header {
            call: incoming.call_id,
            len: incoming.len,
            function: incoming.function,
            node: incoming.node,
            uid: incoming.uid,
            reserved: 0,
        };
        // It is there: zeros were written to it when this was begun.
        self.args.header.write_slice(0, uapi::as_bytes(&header))?;
        Ok(incoming.len)
    }
}
