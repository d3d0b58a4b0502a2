// SPDX-License-Identifier: GPL-2.0

//! A read or write by a queue.
//!
//! If it is short and in one piece it joins a batch ([`super::batch`]) as soon as there is room for it. A worker
//! does what is longer, and does again what failed with its queue pair.

use super::{
    batch::{Joined, Round, Wanted},
    task::Step,
    Queue,
};
use crate::{
    fabric::{
        batch::Placed,
        flight::{deliver, Failed},
        qos::tenant::Turn,
        sender::Claim,
    },
    lmr::{io::Access, mapping::Mapping},
    stats::Stats,
    sys::{deadline::Deadline, memory::Memory},
};
use kernel::prelude::*;

/// How far it is.
enum State {
    New,
    /// It is in a batch.
    Posted(Placed),
    /// The queue pair of its batch failed.
    Failed(Failed),
    Over(Result),
}

/// A read or write.
pub(super) struct Short {
    handle: u64,
    access: Access,
    memory: Memory,
    state: State,
}

impl Short {
    /// One that was not begun.
    pub(super) fn new(handle: u64, (access, memory): (Access, Memory)) -> Self {
        Self {
            handle,
            access,
            memory,
            state: State::New,
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
            State::Over(result) => Some(result.map(|()| 0)),
            _ => None,
        }
    }

    /// Goes on.
    pub(super) fn step(&mut self, queue: &Queue, round: &mut Round<'_>, turn: &mut Turn) -> Step {
        if !matches!(self.state, State::New) {
            return Step::Slow;
        }
        let wanted = Wanted {
            session: &queue.session,
            handle: self.handle,
            access: &self.access,
            memory: &self.memory,
        };
        match round.begin(&wanted, turn) {
            Ok(Joined::Done) => Step::Done(Ok(0)),
            Ok(Joined::Long) => Step::Slow,
            Ok(Joined::There(placed)) => {
                self.state = State::Posted(placed);
                Step::Joined
            }
            Err(error) if error == EAGAIN => Step::Stays,
            Err(error) => Step::Done(Err(error)),
        }
    }

    /// So many requests of its batch are done, the first ones.
    pub(super) fn land(&mut self, claim: &Claim, done: u32) {
        let State::Posted(Placed { part, place, upto }) = self.state else {
            return;
        };
        if upto <= done {
            let direction = self.access.direction;
            let deliver = |place| deliver(direction, &self.memory, claim, part, place);
            self.end(place.map_or(Ok(()), deliver));
        }
    }

    /// The queue pair of its batch failed.
    pub(super) fn fail(&mut self, failed: &Failed) {
        if let State::Posted(_) = self.state {
            self.state = State::Failed(failed.clone());
        }
    }

    /// This came of it.
    pub(super) fn end(&mut self, result: Result) {
        self.state = State::Over(result);
    }

    /// Takes note of its end, if it has ended.
    pub(super) fn count(&self, mapping: &Mapping, stats: &Stats) {
        if let State::Over(result) = &self.state {
            self.access.ended(mapping, stats, result.err());
        }
    }

    /// Does what is left, and waits for what it takes.
    pub(super) fn finish(self, queue: &Queue) -> Result<u64> {
        if let State::Failed(failed) = &self.state {
            self.outlive(queue, failed)?;
        }
        let done = queue
            .session
            .access(self.handle, &self.access, &self.memory);
        done.map(|()| 0)
    }

    /// Waits until nothing of a failed attempt can come late.
    fn outlive(&self, queue: &Queue, failed: &Failed) -> Result {
        let _rpc = queue.session.rpc()?;
        let outlived = failed.outlive(self.access.deadline);
        outlived.inspect_err(|_| queue.rnic.stats.errors.add(1))
    }
}
