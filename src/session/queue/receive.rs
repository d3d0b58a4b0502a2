// SPDX-License-Identifier: GPL-2.0

//! Receiving a call or message by a queue.
//!
//! Whoever drives the queue looks when one has come, and takes it. If its data are yet to be read from the
//! caller's node, a worker does that.

use super::{
    batch::Round,
    task::{Job, Step, Unfinished},
    Queue,
};
use crate::{
    bindings, errno,
    rpc::{long::Long, service::Waiting},
    session::{
        abi,
        request::Receiving,
        serve::{BlankOpen, Incoming, Received},
    },
    sys::deadline::Deadline,
};
use kernel::{
    prelude::*,
    time::{Instant, Monotonic},
};

/// Time between looks whether the region is still there.
const LOOK_MS: i64 = 1000;

/// A receive.
pub(super) struct Receive {
    what: Receiving,
    blank: Option<BlankOpen>,
    waiting: Option<Waiting>,
    /// When it has looked, and whether it would have taken long ones, for which there was a worker.
    looked: Option<(Instant<Monotonic>, bool)>,
    /// What was taken, for a worker to have it.
    long: Option<Long>,
}

impl Receive {
    /// One that was not begun.
    pub(super) fn new(what: Receiving) -> Self {
        Self {
            what,
            blank: None,
            waiting: None,
            looked: None,
            long: None,
        }
    }

    /// When it gives up.
    pub(super) fn deadline(&self) -> Deadline {
        self.what.deadline
    }

    /// Whether nothing is to be done before something comes, or there is a worker.
    pub(super) fn is_waiting(&self) -> bool {
        let longs = self.looked.is_none_or(|(_, longs)| longs);
        self.is_quiet(longs)
    }

    fn is_quiet(&self, longs: bool) -> bool {
        let waiting = self.waiting.as_ref().filter(|_| self.long.is_none());
        waiting.is_some_and(|waiting| waiting.is_quiet(longs))
    }

    /// Goes on.
    pub(super) fn step(&mut self, queue: &Queue, round: &Round<'_>) -> Step {
        let deadline = self.what.deadline;
        match self.try_step(queue, round.now) {
            Ok(Some(step)) => step,
            Ok(None) if deadline.passed_at(round.now) => Step::Done(Err(ETIMEDOUT)),
            Ok(None) => Step::Stays,
            Err(error) => Step::Done(Err(error)),
        }
    }

    /// Looks, unless nothing has come since. Returns nothing if there is nothing.
    fn try_step(&mut self, queue: &Queue, now: Instant<Monotonic>) -> Result<Option<Step>> {
        if self.long.is_some() {
            return Ok(Some(Step::Slow));
        }
        let session = &queue.session;
        if self.waiting.is_none() {
            match session.begin_waiting(self.what.handle) {
                Err(error) if error == EAGAIN => return Ok(None),
                waiting => self.waiting = Some(waiting?),
            }
        }
        let longs = queue.has_worker();
        let is_fresh = |(at, _): (Instant<_>, _)| (now - at).as_millis() < LOOK_MS;
        if self.is_quiet(longs) && self.looked.is_some_and(is_fresh) {
            return Ok(None);
        }
        self.looked = Some((now, longs));
        match self.look(queue, longs)? {
            Received::Nothing | Received::Busy => Ok(None),
            Received::Had(incoming) => Ok(Some(Step::Done(self.tell(&incoming)))),
            Received::Long(long) => {
                self.long = Some(long);
                Ok(Some(Step::Slow))
            }
        }
    }

    fn look(&mut self, queue: &Queue, longs: bool) -> Result<Received> {
        if self.blank.is_none() {
            self.blank = queue.payer.pays(BlankOpen::at_once).ok();
        }
        let Receiving {
            handle, data, room, ..
        } = &self.what;
        let session = &queue.session;
        session.glance(*handle, data, *room, longs, &mut self.blank)
    }

    /// Has what was taken, however long that takes. Returns the job if that is not to be had.
    pub(super) fn finish(mut self, queue: &Queue) -> Result<u64, Unfinished> {
        let Receiving {
            handle, data, room, ..
        } = &self.what;
        let session = &queue.session;
        let incoming = match self.long.take() {
            Some(long) => session.receive_long(*handle, long, data, *room)?,
            None => None,
        };
        let Some(incoming) = incoming else {
            return Err(Unfinished::Back(Job::Receive(self)));
        };
        if queue.is_over() {
            // Nobody hears of it.
            let _ = session.abandon_call(incoming.call);
            return Err(errno::canceled().into());
        }
        Ok(self.tell(&incoming)?)
    }

    /// Writes what came before its data. Returns the bytes of these.
    fn tell(&self, incoming: &Incoming) -> Result<u64> {
        let told = bindings::kite_incoming {
            call: incoming.call,
            len: incoming.len,
            function: incoming.function,
            node: incoming.node,
            uid: incoming.uid,
            reserved: 0,
        };
        // It is there: zeros were written to it when this was begun.
        self.what.head.store(0, abi::bytes(&told))?;
        Ok(incoming.len)
    }
}
