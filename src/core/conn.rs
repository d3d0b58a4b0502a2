// SPDX-License-Identifier: GPL-2.0

//! When to make, use and give up the queue pair of a connection: the decisions, without the verbs.
//!
//! Of two nodes the one with the lower number is *active*: it alone starts a connection, so that two
//! never cross. The other, *passive*, asks for one with a poke. Each queue pair has a generation. A
//! new one is made only when nothing is in flight on the old one any more and the old one is gone, and
//! a generation is used only when both sides have dropped the one before: hence a request that failed
//! can be replayed on the new queue pair, without the old one's packets arriving late.
//!
//! A connection that is one too many, and that neither side uses, is given up: the active side, which may be asked
//! for it, takes no more requests and asks whether to *part*. The passive side, if it has no use for the connection
//! either, drops its half and says so; else both stay. Whatever it says to one such attempt it says to each repetition
//! of it: so nothing is posted to a half that was given up.
//!
//! Datagrams may be lost, repeated or late. The active side repeats Connect until it is accepted, the
//! passive one answers each, and stale generations are ignored.

/// Which side of the connection this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The node with the lower number.
    Active,
    /// The other.
    Passive,
}

/// What the connection is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// There is no queue pair.
    Idle,
    /// The active side has made a queue pair and waits for the other's.
    Connecting,
    /// Requests may be posted.
    Ready,
    /// The active side has asked whether it may give the queue pair up, and posts nothing meanwhile.
    Parting,
    /// The queue pair failed; what is in flight completes as flushed.
    Draining,
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// Somebody wants to use the connection.
    Wanted,
    /// The queue pair of this generation failed.
    Failed(u32),
    /// Nothing is in flight any more, and the queue pair is gone.
    Drained,
    /// The peer (active) made a queue pair of this generation.
    Connect(u32),
    /// The peer (passive) made its half of this generation.
    Accept(u32),
    /// The peer (passive) wants another connection than that of this generation; 0 if it has had none.
    Poke(u32),
    /// The connection is one too many here, and nobody has used it for a while.
    Spare,
    /// The peer has no use for the queue pair of this generation, and nor have we, if `idle`.
    Part {
        /// Which.
        generation: u32,
        /// Which attempt of the active side to part this is, below 2²⁴; the passive side has none.
        attempt: u32,
        /// Whether nobody has used it for a while here.
        idle: bool,
    },
    /// The peer (passive) has no half of this generation any more, and wants none.
    Gone(u32),
    /// The peer (passive) used the queue pair when it heard of this attempt.
    Stay(u32),
}

/// What to do about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Nothing.
    Nothing,
    /// Make a queue pair of this generation, and send Connect.
    Open(u32),
    /// Make a queue pair of this generation, connect it, and send Accept.
    Build(u32),
    /// Connect the queue pair to the one in the Accept.
    Finish,
    /// Send the same Connect as before.
    Connect,
    /// Send the same Accept as before.
    Accept,
    /// Send a poke with this generation.
    Poke(u32),
    /// Move the queue pair to its error state; report [`Input::Drained`] when it is empty and gone.
    Drain,
    /// Likewise, but nobody uses it: nothing of it can come late.
    Leave,
    /// Tell the peer that we have no use for the queue pair, in this attempt to part.
    Part(u32),
    /// Tell the peer that ours of this generation is gone.
    Gone(u32),
    /// Tell the peer that we use it, in answer to this attempt.
    Stay(u32),
    /// Requests may be posted again.
    Resume,
}

/// The state of one connection.
#[derive(Clone, Copy, Debug)]
pub struct Conn {
    role: Role,
    phase: Phase,
    /// Of the present queue pair, or of the last one; 0 before the first.
    generation: u32,
    wanted: bool,
    /// The last attempt to part: that we made, or that we said no to.
    attempt: u32,
}

/// Attempts to part are counted modulo this.
const ATTEMPTS: u32 = 1 << 24;

/// Whether attempt `a` was made before `b`, or is it.
fn is_no_later(a: u32, b: u32) -> bool {
    b.wrapping_sub(a) % ATTEMPTS < ATTEMPTS / 2
}

impl Conn {
    /// An idle connection of which this side has the given role.
    pub const fn new(role: Role) -> Self {
        Self {
            role,
            phase: Phase::Idle,
            generation: 0,
            wanted: false,
            attempt: 0,
        }
    }

    /// What the connection is doing.
    #[inline]
    pub const fn phase(&self) -> Phase {
        self.phase
    }

    /// Generation of the present queue pair, or of the last one; 0 before the first.
    #[inline]
    pub const fn generation(&self) -> u32 {
        self.generation
    }

    /// Whether time alone will bring something to do: see [`Self::tick`].
    pub const fn is_unsettled(&self) -> bool {
        match self.phase {
            Phase::Idle => self.wanted,
            Phase::Connecting | Phase::Parting | Phase::Draining => true,
            Phase::Ready => false,
        }
    }

    /// Takes note of an event.
    pub fn on(&mut self, input: Input) -> Action {
        match (self.role, input) {
            (_, Input::Wanted) => self.on_wanted(),
            (_, Input::Failed(generation)) => self.on_failed(generation),
            (_, Input::Drained) => self.on_drained(),
            (Role::Passive, Input::Connect(generation)) => self.on_connect(generation),
            (Role::Active, Input::Accept(generation)) => self.on_accept(generation),
            (Role::Active, Input::Poke(generation)) => self.on_poke(generation),
            (_, Input::Spare) => self.on_spare(),
            (
                role,
                Input::Part {
                    generation,
                    attempt,
                    idle,
                },
            ) => match role {
                Role::Active => self.on_request(generation, idle),
                Role::Passive => self.on_part(generation, attempt, idle),
            },
            (Role::Active, Input::Gone(generation)) => self.on_gone(generation),
            (Role::Active, Input::Stay(attempt)) => self.on_stay(attempt),
            _ => Action::Nothing,
        }
    }

    /// Called every so often while [`Self::is_unsettled`]: repeats what may have been lost.
    pub fn tick(&mut self) -> Action {
        match (self.role, self.phase) {
            (Role::Active, Phase::Idle) if self.wanted => self.open(),
            (Role::Active, Phase::Connecting) => Action::Connect,
            (Role::Active, Phase::Parting) => Action::Part(self.attempt),
            (Role::Passive, Phase::Idle) if self.wanted => Action::Poke(self.generation),
            _ => Action::Nothing,
        }
    }

    /// The queue pair of [`Action::Open`] or [`Action::Build`] could not be made: try again later.
    pub fn abandon(&mut self) {
        if self.role == Role::Passive {
            // The active side will offer the same generation again.
            self.generation = self.generation.wrapping_sub(1);
        }
        self.phase = Phase::Idle;
        self.wanted = true;
    }

    fn open(&mut self) -> Action {
        // 0 means "none yet", so it is skipped when the counter wraps.
        self.generation = self.generation.checked_add(1).unwrap_or(1);
        self.phase = Phase::Connecting;
        Action::Open(self.generation)
    }

    fn on_wanted(&mut self) -> Action {
        if self.wanted || self.phase != Phase::Idle {
            self.wanted = true;
            return Action::Nothing;
        }
        self.wanted = true;
        self.tick()
    }

    fn on_failed(&mut self, generation: u32) -> Action {
        let alive = !matches!(self.phase, Phase::Idle | Phase::Draining);
        if !alive || generation != self.generation {
            return Action::Nothing;
        }
        self.phase = Phase::Draining;
        self.wanted = true;
        Action::Drain
    }

    fn on_drained(&mut self) -> Action {
        if self.phase != Phase::Draining {
            return Action::Nothing;
        }
        self.phase = Phase::Idle;
        self.tick()
    }

    fn on_connect(&mut self, generation: u32) -> Action {
        let newer = self.generation == 0 || generation.wrapping_sub(self.generation) as i32 > 0;
        match self.phase {
            Phase::Idle if newer => {
                self.generation = generation;
                self.phase = Phase::Ready;
                Action::Build(generation)
            }
            // Our half of it is gone already: the active side has to make another.
            Phase::Idle if generation == self.generation => Action::Poke(generation),
            Phase::Ready if generation == self.generation => Action::Accept,
            // The active side gave up ours; its next Connect will find us idle.
            Phase::Ready if newer => {
                self.phase = Phase::Draining;
                Action::Drain
            }
            _ => Action::Nothing,
        }
    }

    fn on_accept(&mut self, generation: u32) -> Action {
        if self.phase != Phase::Connecting || generation != self.generation {
            return Action::Nothing;
        }
        self.phase = Phase::Ready;
        Action::Finish
    }

    fn on_poke(&mut self, generation: u32) -> Action {
        match self.phase {
            Phase::Idle => self.on_wanted(),
            // The passive side gave up its half, and wants another.
            Phase::Parting if generation == self.generation => {
                self.wanted = true;
                self.leave()
            }
            // The passive side lost its half.
            _ if generation == self.generation => self.on_failed(generation),
            _ => Action::Nothing,
        }
    }

    fn on_spare(&mut self) -> Action {
        match (self.role, self.phase) {
            (Role::Active, Phase::Ready) => self.part(),
            (Role::Passive, Phase::Ready) => Action::Part(0),
            _ => Action::Nothing,
        }
    }

    fn part(&mut self) -> Action {
        self.phase = Phase::Parting;
        self.wanted = false;
        self.attempt = (self.attempt + 1) % ATTEMPTS;
        Action::Part(self.attempt)
    }

    /// The passive side asks that we part.
    fn on_request(&mut self, generation: u32, idle: bool) -> Action {
        match self.phase {
            Phase::Ready if idle && generation == self.generation => self.part(),
            _ => Action::Nothing,
        }
    }

    fn on_part(&mut self, generation: u32, attempt: u32, idle: bool) -> Action {
        match self.phase {
            Phase::Idle => Action::Gone(generation),
            Phase::Ready if generation != self.generation => Action::Nothing,
            Phase::Ready if idle && !is_no_later(attempt, self.attempt) => {
                self.wanted = false;
                self.leave()
            }
            Phase::Ready => {
                if !is_no_later(attempt, self.attempt) {
                    self.attempt = attempt;
                }
                Action::Stay(attempt)
            }
            _ => Action::Nothing,
        }
    }

    fn on_gone(&mut self, generation: u32) -> Action {
        if self.phase != Phase::Parting || generation != self.generation {
            return Action::Nothing;
        }
        self.leave()
    }

    fn leave(&mut self) -> Action {
        self.phase = Phase::Draining;
        Action::Leave
    }

    fn on_stay(&mut self, attempt: u32) -> Action {
        if self.phase != Phase::Parting || attempt != self.attempt {
            return Action::Nothing;
        }
        self.phase = Phase::Ready;
        Action::Resume
    }
}

#[cfg(test)]
mod tests;
