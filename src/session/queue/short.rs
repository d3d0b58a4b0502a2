// SPDX-License-Identifier: GPL-2.0

//! A read or write by a queue.
//!
//! If it is short and in one piece it is posted as soon as there is room for it, and whoever drives the queue
//! looks for its end. A worker does what is longer, and does again what failed with its queue pair.

use super::{task::Step, Queue};
use crate::{
    fabric::{
        flight::{deliver, Failed, Watched},
        plug::Round,
        qos::tenant::Turn,
    },
    lmr::{
        io::{Access, Begun},
        mapping::{KeptPass, Mapping},
    },
    sys::{deadline::Deadline, memory::Memory},
};
use kernel::{prelude::*, sync::Arc};

/// What was posted.
struct Flying {
    flight: Watched<KeptPass>,
    mapping: Arc<Mapping>,
}

/// How far it is.
enum State {
    New,
    Flying(Flying),
    /// Its queue pair failed.
    Failed(Failed),
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

    /// Whether it was posted, and has not landed.
    pub(super) fn is_flying(&self) -> bool {
        matches!(self.state, State::Flying(_))
    }

    /// Whether what was posted has completed.
    pub(super) fn is_done(&self) -> bool {
        matches!(&self.state, State::Flying(flying) if flying.flight.is_done())
    }

    /// Looks for completions of everybody, if this waits for one. Returns whether it does.
    pub(super) fn look(&self) -> bool {
        if let State::Flying(flying) = &self.state {
            flying.flight.look();
        }
        self.is_flying()
    }

    /// Goes on.
    pub(super) fn step(&mut self, queue: &Queue, round: &mut Round<'_>, turn: &mut Turn) -> Step {
        match &self.state {
            State::New => self.begin(queue, round, turn),
            State::Flying(flying) if flying.flight.is_done() => self.end(queue),
            State::Flying(flying) if !flying.flight.is_stuck(round.now) => Step::Stays,
            State::Flying(_) | State::Failed(_) => Step::Slow,
        }
    }

    fn end(&mut self, queue: &Queue) -> Step {
        let State::Flying(flying) = core::mem::replace(&mut self.state, State::New) else {
            return Step::Slow;
        };
        match self.land(queue, flying) {
            Ok(None) => Step::Done(Ok(0)),
            Ok(Some(failed)) => {
                self.state = State::Failed(failed);
                Step::Slow
            }
            Err(error) => Step::Done(Err(error)),
        }
    }

    fn begin(&mut self, queue: &Queue, round: &mut Round<'_>, turn: &mut Turn) -> Step {
        let session = &queue.session;
        let begun = session.begin(self.handle, &self.access, &self.memory, turn, round);
        match begun {
            Ok((_, Begun::Done)) => Step::Done(Ok(0)),
            Ok((_, Begun::Long)) => Step::Slow,
            Ok((mapping, Begun::Flying(flight))) => {
                self.state = State::Flying(Flying { flight, mapping });
                Step::Stays
            }
            Err(error) if error == EAGAIN => Step::Stays,
            Err(error) => Step::Done(Err(error)),
        }
    }

    /// Waits for the end of what was posted, which takes as long as the RNIC. Returns the part if its queue
    /// pair failed.
    fn land(&self, queue: &Queue, flying: Flying) -> Result<Option<Failed>> {
        let (access, stats) = (&self.access, &queue.rnic.stats);
        let landed = flying.flight.settle(stats, |claim, part| {
            deliver(access.direction, &self.memory, claim, part)
        });
        if !matches!(landed, Ok(Some(_))) {
            access.ended(&flying.mapping, stats, landed.as_ref().err().copied());
        }
        landed
    }

    /// Does what is left, and waits for what it takes.
    pub(super) fn finish(mut self, queue: &Queue) -> Result<u64> {
        let failed = match core::mem::replace(&mut self.state, State::New) {
            State::New => None,
            State::Failed(failed) => Some(failed),
            State::Flying(flying) => match self.land(queue, flying)? {
                None => return Ok(0),
                failed => failed,
            },
        };
        if let Some(failed) = failed {
            self.outlive(queue, &failed)?;
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
