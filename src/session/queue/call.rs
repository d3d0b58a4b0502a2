// SPDX-License-Identifier: GPL-2.0

//! A call or message by a queue.
//!
//! If there is a link to who serves the region it is sent as soon as there is room for it, and whoever drives
//! the queue looks for the reply. A worker makes a link where there is none, fills and empties relays, and sends
//! again what failed with its queue pair; it does not wait for the reply, which is another user's to give.

use super::{
    super::{
        call::{BegunCall, Outgoing},
        relay::{Held, Pending},
    },
    batch::Round,
    task::{Job, Step, Unfinished},
    Queue,
};
use crate::{
    fabric::qos::tenant::Turn,
    rpc::{
        call::{lost, Answered},
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
    /// It is being sent; if it is to be answered, with what waits for that.
    Sending(Sending, Option<Pending>),
    /// It was sent, and is to be answered.
    Waiting(Pending),
    /// Its reply has come, and the data of that are in a relay.
    Storing(Answered, Held),
    /// All is done; with the bytes of the reply.
    Over(u64),
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

    /// How many bytes it takes there.
    pub(super) fn len(&self) -> u64 {
        self.out.len
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
            State::Waiting(pending) => !pending.calling.has_ended(),
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
    pub(super) fn step(&mut self, queue: &Queue, round: &Round<'_>, turn: &mut Turn) -> Step {
        let step = match &self.state {
            State::New => self.begin(queue, round.now, turn),
            State::Sending(..) => self.send(queue, round.now),
            State::Waiting(_) => self.wait(queue, round.now),
            State::Storing(..) => Step::Slow,
            State::Over(len) => Step::Done(Ok(*len)),
        };
        if let Step::Done(result) = &step {
            queue.session.count_call(result);
        }
        step
    }

    fn begin(&mut self, queue: &Queue, now: Instant<Monotonic>, turn: &mut Turn) -> Step {
        let begin = || queue.session.begin_call(self.handle, &self.out, turn);
        match queue.payer.pays(begin) {
            Ok(BegunCall::Sending(sending, pending)) => {
                self.state = State::Sending(sending, pending);
                self.send(queue, now)
            }
            Ok(BegunCall::Long) => Step::Slow,
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

    fn send(&mut self, queue: &Queue, now: Instant<Monotonic>) -> Step {
        let State::Sending(sending, pending) = &mut self.state else {
            return Step::Slow;
        };
        match sending.advance(&queue.rnic.stats, now) {
            Ok(Sent::There) => match pending.take() {
                Some(pending) => {
                    self.state = State::Waiting(pending);
                    self.wait(queue, now)
                }
                None => Step::Done(Ok(0)),
            },
            Ok(Sent::Flying) => Step::Stays,
            Ok(Sent::NoRoom) => self.later(),
            Ok(Sent::Failed) => Step::Slow,
            Err(error) => Step::Done(Err(lost(error))),
        }
    }

    fn wait(&mut self, queue: &Queue, now: Instant<Monotonic>) -> Step {
        let State::Waiting(pending) = &mut self.state else {
            return Step::Slow;
        };
        match pending.calling.outcome(self.out.deadline, now) {
            None => Step::Stays,
            Some(Err(error)) => Step::Done(Err(error)),
            Some(Ok(answered)) => self.store(queue, answered),
        }
    }

    /// Stores a reply, unless that takes longer.
    fn store(&mut self, queue: &Queue, answered: Answered) -> Step {
        if let State::Waiting(pending) = core::mem::replace(&mut self.state, State::New) {
            if answered.bytes().is_some() {
                let stored = queue
                    .session
                    .store_reply(&answered, pending.held, &self.out.reply);
                return Step::Done(stored);
            }
            self.state = State::Storing(answered, pending.held);
        }
        Step::Slow
    }

    /// Does what may have to wait, but not for the reply. Returns the job if there is more to do.
    pub(super) fn finish(mut self, queue: &Queue) -> Result<u64, Unfinished> {
        let result = match core::mem::replace(&mut self.state, State::New) {
            State::New => self.prepare(queue),
            State::Sending(sending, pending) => self.finish_sending(queue, sending, pending),
            State::Storing(answered, held) => {
                let session = &queue.session;
                let stored = session.store_reply(&answered, held, &self.out.reply);
                stored.map(|len| self.state = State::Over(len))
            }
            other => {
                self.state = other;
                Ok(())
            }
        };
        let result = match (result, &self.state) {
            (Ok(()), State::Over(len)) => Ok(*len),
            (Ok(()), _) => return Err(Unfinished::Back(Job::Call(self))),
            (Err(error), _) => Err(error),
        };
        queue.session.count_call(&result);
        Ok(result?)
    }

    fn prepare(&mut self, queue: &Queue) -> Result {
        let (sending, pending) = queue.session.prepare_call(self.handle, &self.out)?;
        self.state = State::Sending(sending, pending);
        Ok(())
    }

    fn finish_sending(
        &mut self,
        queue: &Queue,
        sending: Sending,
        pending: Option<Pending>,
    ) -> Result {
        let _rpc = queue.session.rpc()?;
        let sent = sending.finish(&queue.rnic.stats, self.out.deadline);
        sent.map_err(lost)?;
        self.state = pending.map_or(State::Over(0), State::Waiting);
        Ok(())
    }
}
