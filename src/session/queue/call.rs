// SPDX-License-Identifier: GPL-2.0

//! A call or message by a queue.
//!
//! If there is a link to who serves the region it is sent as soon as there is room for it, and whoever drives
//! the queue looks for the reply. A worker makes a link where there is none, and sends again what failed with
//! its queue pair; it does not wait for the reply, which is another user's to give.

use super::{
    super::call::{BegunCall, Outgoing},
    task::{Job, Step, Unfinished},
    Queue,
};
use crate::{
    rpc::{
        call::{lost, Answered, Calling},
        sending::{Sending, Sent},
    },
    sys::deadline::Deadline,
};
use kernel::{
    prelude::*,
    time::{Instant, Monotonic},
};

/// How far it is.
enum State {
    New,
    /// It is being sent; if it is a call, with what waits for the reply.
    Sending(Sending, Option<Calling>),
    /// It was sent, and has a reply.
    Waiting(Calling),
    /// It was sent, and has none.
    Sent,
}

/// A call or message.
pub(super) struct Call {
    handle: u64,
    out: Outgoing,
    state: State,
}

impl Call {
    /// One that was not begun.
    pub(super) fn new(handle: u64, out: Outgoing) -> Self {
        Self {
            handle,
            out,
            state: State::New,
        }
    }

    /// When it gives up.
    pub(super) fn deadline(&self) -> Deadline {
        self.out.deadline
    }

    /// Whether it was posted, and its completion is to come.
    pub(super) fn is_flying(&self) -> bool {
        matches!(&self.state, State::Sending(sending, _) if sending.is_flying())
    }

    /// Whether nothing is to be done before something completes or comes.
    pub(super) fn is_waiting(&self) -> bool {
        match &self.state {
            State::Sending(sending, _) => sending.is_flying() && !sending.is_done(),
            State::Waiting(calling) => !calling.has_ended(),
            _ => false,
        }
    }

    /// Whether it was posted or sent.
    pub(super) fn is_begun(&self) -> bool {
        self.is_flying() || matches!(self.state, State::Waiting(_))
    }

    /// Looks for completions of everybody, if this waits for one. Returns whether it does.
    pub(super) fn look(&self) -> bool {
        match &self.state {
            State::Sending(sending, _) => sending.look(),
            _ => false,
        }
    }

    /// Goes on.
    pub(super) fn step(&mut self, queue: &Queue, now: Instant<Monotonic>) -> Step {
        let step = match core::mem::replace(&mut self.state, State::New) {
            State::New => self.begin(queue, now),
            State::Sending(sending, calling) => self.send(queue, now, sending, calling),
            State::Waiting(calling) => self.wait(now, calling),
            State::Sent => Step::Done(Ok(0)),
        };
        if let Step::Done(result) = &step {
            queue.session.count_call(result);
        }
        step
    }

    fn begin(&mut self, queue: &Queue, now: Instant<Monotonic>) -> Step {
        let begin = || queue.session.begin_call(self.handle, &self.out);
        match queue.payer.pays(begin) {
            Ok(BegunCall::Sending(sending, calling)) => self.send(queue, now, sending, calling),
            Ok(BegunCall::NoLink | BegunCall::NoMemory) => Step::Slow,
            Err(error) if error == EAGAIN => self.later(),
            Err(error) => Step::Done(Err(error)),
        }
    }

    /// Tries again, unless the deadline has passed.
    fn later(&self) -> Step {
        // Signals to whoever looks are not the caller's.
        if self.out.deadline.passed() {
            Step::Done(Err(ETIMEDOUT))
        } else {
            Step::Stays
        }
    }

    fn send(
        &mut self,
        queue: &Queue,
        now: Instant<Monotonic>,
        mut sending: Sending,
        calling: Option<Calling>,
    ) -> Step {
        match sending.advance(&queue.rnic.stats, now) {
            Ok(Sent::There) => match calling {
                Some(calling) => self.wait(now, calling),
                None => Step::Done(Ok(0)),
            },
            Ok(Sent::Flying) => {
                self.state = State::Sending(sending, calling);
                Step::Stays
            }
            Ok(Sent::NoRoom) => {
                self.state = State::Sending(sending, calling);
                self.later()
            }
            Ok(Sent::Failed) => {
                self.state = State::Sending(sending, calling);
                Step::Slow
            }
            Err(error) => Step::Done(Err(lost(error))),
        }
    }

    fn wait(&mut self, now: Instant<Monotonic>, mut calling: Calling) -> Step {
        match calling.outcome(self.out.deadline, now) {
            None => {
                self.state = State::Waiting(calling);
                Step::Stays
            }
            Some(answered) => Step::Done(answered.and_then(|answered| self.deliver(&answered))),
        }
    }

    fn deliver(&self, answered: &Answered) -> Result<u64> {
        self.out.reply.store(0, answered.bytes())?;
        Ok(answered.bytes().len() as u64)
    }

    /// Does what may have to wait, but not for the reply. Returns the job if there is more to do.
    pub(super) fn finish(mut self, queue: &Queue) -> Result<u64, Unfinished> {
        let result = match core::mem::replace(&mut self.state, State::New) {
            State::New => self.prepare(queue),
            State::Sending(sending, calling) => self.finish_sending(queue, sending, calling),
            sent => {
                self.state = sent;
                Ok(())
            }
        };
        match result {
            Err(error) => {
                queue.session.count_call(&Err(error));
                Err(error.into())
            }
            Ok(()) if matches!(self.state, State::Sent) => {
                queue.session.count_call(&Ok(0));
                Ok(0)
            }
            Ok(()) => Err(Unfinished::Back(Job::Call(self))),
        }
    }

    fn prepare(&mut self, queue: &Queue) -> Result {
        let (sending, calling) = queue.session.prepare_call(self.handle, &self.out)?;
        self.state = State::Sending(sending, calling);
        Ok(())
    }

    fn finish_sending(
        &mut self,
        queue: &Queue,
        sending: Sending,
        calling: Option<Calling>,
    ) -> Result {
        let _rpc = queue.session.rpc()?;
        let sent = sending.finish(&queue.rnic.stats, self.out.deadline);
        sent.map_err(lost)?;
        self.state = calling.map_or(State::Sent, State::Waiting);
        Ok(())
    }
}
