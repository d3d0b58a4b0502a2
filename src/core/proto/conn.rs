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
pub enum ConnRole {
    /// The node with the lower number.
    Active,
    /// The other.
    Passive,
}

/// What the connection is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnPhase {
    /// There is no queue pair.
    Idle,
    /// The active side has made a queue pair and waits for the other's.
    Connecting,
    /// Requests may be posted.
    Ready,
    /// The active side has asked whether it may give the queue pair up, and posts nothing meanwhile.
    Evicting,
    /// The queue pair failed; what is in flight completes as flushed.
    Draining,
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnEvent {
    /// Somebody wants to use the connection.
    UseRequested,
    /// The queue pair of this generation failed.
    QpFailed(u32),
    /// Nothing is in flight any more, and the queue pair is gone.
    Drained,
    /// The peer (active) made a queue pair of this generation.
    Connect(u32),
    /// The peer (passive) made its half of this generation.
    Accept(u32),
    /// The peer (passive) wants another connection than that of this generation; 0 if it has had none.
    ConnectRequest(u32),
    /// The connection is one too many here, and nobody has used it for a while.
    Surplus,
    /// The peer has no use for the queue pair of this generation, and nor have we, if `idle`.
    EvictRequest {
        /// Which.
        generation: u32,
        /// Which attempt of the active side to part this is, below 2²⁴; the passive side has none.
        attempt: u32,
        /// Whether nobody has used it for a while here.
        is_idle: bool,
    },
    /// The peer (passive) has no half of this generation any more, and wants none.
    Evicted(u32),
    /// The peer (passive) used the queue pair when it heard of this attempt.
    EvictRefused(u32),
}

/// What to do about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnAction {
    /// Nothing.
    Nothing,
    /// Make a queue pair of this generation, and send Connect.
    StartConnect(u32),
    /// Make a queue pair of this generation, connect it, and send Accept.
    AcceptConnect(u32),
    /// Connect the queue pair to the one in the Accept.
    CompleteConnect,
    /// Send the same Connect as before.
    ResendConnect,
    /// Send the same Accept as before.
    ResendAccept,
    /// Send a poke with this generation.
    SendConnectRequest(u32),
    /// Move the queue pair to its error state; report [`ConnEvent::Drained`] when it is empty and gone.
    Drain,
    /// Likewise, but nobody uses it: nothing of it can come late.
    DrainIdle,
    /// Tell the peer that we have no use for the queue pair, in this attempt to part.
    SendEvictRequest(u32),
    /// Tell the peer that ours of this generation is gone.
    SendEvicted(u32),
    /// Tell the peer that we use it, in answer to this attempt.
    SendEvictRefused(u32),
    /// Requests may be posted again.
    Resume,
}

/// The state of one connection.
#[derive(Clone, Copy, Debug)]
pub struct ConnStateMachine {
    role: ConnRole,
    phase: ConnPhase,
    /// Of the present queue pair, or of the last one; 0 before the first.
    generation: u32,
    connect_requested: bool,
    /// The last attempt to part: that we made, or that we said no to.
    evict_attempt: u32,
}

/// Attempts to part are counted modulo this.
const ATTEMPT_MODULUS: u32 = 1 << 24;

/// Whether attempt `a` was made before `b`, or is it.
fn is_same_or_earlier_attempt(a: u32, b: u32) -> bool {
    b.wrapping_sub(a) % ATTEMPT_MODULUS < ATTEMPT_MODULUS / 2
}

impl ConnStateMachine {
    /// An idle connection of which this side has the given role.
    pub const fn new(role: ConnRole) -> Self {
        Self {
            role,
            phase: ConnPhase::Idle,
            generation: 0,
            connect_requested: false,
            evict_attempt: 0,
        }
    }

    /// What the connection is doing.
    #[inline]
    pub const fn phase(&self) -> ConnPhase {
        self.phase
    }

    /// Generation of the present queue pair, or of the last one; 0 before the first.
    #[inline]
    pub const fn generation(&self) -> u32 {
        self.generation
    }

    /// Whether time alone will bring something to do: see [`Self::tick`].
    pub const fn needs_tick(&self) -> bool {
        match self.phase {
            ConnPhase::Idle => self.connect_requested,
            ConnPhase::Connecting | ConnPhase::Evicting | ConnPhase::Draining => true,
            ConnPhase::Ready => false,
        }
    }

    /// Takes note of an event.
    pub fn handle_event(&mut self, input: ConnEvent) -> ConnAction {
        match (self.role, input) {
            (_, ConnEvent::UseRequested) => self.on_use_requested(),
            (_, ConnEvent::QpFailed(generation)) => self.on_qp_failed(generation),
            (_, ConnEvent::Drained) => self.on_drained(),
            (ConnRole::Passive, ConnEvent::Connect(generation)) => self.on_connect(generation),
            (ConnRole::Active, ConnEvent::Accept(generation)) => self.on_accept(generation),
            (ConnRole::Active, ConnEvent::ConnectRequest(generation)) => {
                self.on_connect_request(generation)
            }
            (_, ConnEvent::Surplus) => self.on_surplus(),
            (
                role,
                ConnEvent::EvictRequest {
                    generation,
                    attempt,
                    is_idle: idle,
                },
            ) => match role {
                ConnRole::Active => self.on_passive_evict_request(generation, idle),
                ConnRole::Passive => self.on_evict_request(generation, attempt, idle),
            },
            (ConnRole::Active, ConnEvent::Evicted(generation)) => self.on_evicted(generation),
            (ConnRole::Active, ConnEvent::EvictRefused(attempt)) => self.on_evict_refused(attempt),
            _ => ConnAction::Nothing,
        }
    }

    /// Called every so often while [`Self::needs_tick`]: repeats what may have been lost.
    pub fn tick(&mut self) -> ConnAction {
        match (self.role, self.phase) {
            (ConnRole::Active, ConnPhase::Idle) if self.connect_requested => self.start_connect(),
            (ConnRole::Active, ConnPhase::Connecting) => ConnAction::ResendConnect,
            (ConnRole::Active, ConnPhase::Evicting) => {
                ConnAction::SendEvictRequest(self.evict_attempt)
            }
            (ConnRole::Passive, ConnPhase::Idle) if self.connect_requested => {
                ConnAction::SendConnectRequest(self.generation)
            }
            _ => ConnAction::Nothing,
        }
    }

    /// The queue pair of [`ConnAction::StartConnect`] or [`ConnAction::AcceptConnect`] could not be made: try again later.
    pub fn on_create_failed(&mut self) {
        if self.role == ConnRole::Passive {
            // The active side will offer the same generation again.
            self.generation = self.generation.wrapping_sub(1);
        }
        self.phase = ConnPhase::Idle;
        self.connect_requested = true;
    }

    fn start_connect(&mut self) -> ConnAction {
        // 0 means "none yet", so it is skipped when the counter wraps.
        self.generation = self.generation.checked_add(1).unwrap_or(1);
        self.phase = ConnPhase::Connecting;
        ConnAction::StartConnect(self.generation)
    }

    fn on_use_requested(&mut self) -> ConnAction {
        if self.connect_requested || self.phase != ConnPhase::Idle {
            self.connect_requested = true;
            return ConnAction::Nothing;
        }
        self.connect_requested = true;
        self.tick()
    }

    fn on_qp_failed(&mut self, generation: u32) -> ConnAction {
        let is_connected = !matches!(self.phase, ConnPhase::Idle | ConnPhase::Draining);
        if !is_connected || generation != self.generation {
            return ConnAction::Nothing;
        }
        self.phase = ConnPhase::Draining;
        self.connect_requested = true;
        ConnAction::Drain
    }

    fn on_drained(&mut self) -> ConnAction {
        if self.phase != ConnPhase::Draining {
            return ConnAction::Nothing;
        }
        self.phase = ConnPhase::Idle;
        self.tick()
    }

    fn on_connect(&mut self, generation: u32) -> ConnAction {
        let is_newer = self.generation == 0 || generation.wrapping_sub(self.generation) as i32 > 0;
        match self.phase {
            ConnPhase::Idle if is_newer => {
                self.generation = generation;
                self.phase = ConnPhase::Ready;
                ConnAction::AcceptConnect(generation)
            }
            // Our half of it is gone already: the active side has to make another.
            ConnPhase::Idle if generation == self.generation => {
                ConnAction::SendConnectRequest(generation)
            }
            ConnPhase::Ready if generation == self.generation => ConnAction::ResendAccept,
            // The active side gave up ours; its next Connect will find us idle.
            ConnPhase::Ready if is_newer => {
                self.phase = ConnPhase::Draining;
                ConnAction::Drain
            }
            _ => ConnAction::Nothing,
        }
    }

    fn on_accept(&mut self, generation: u32) -> ConnAction {
        if self.phase != ConnPhase::Connecting || generation != self.generation {
            return ConnAction::Nothing;
        }
        self.phase = ConnPhase::Ready;
        ConnAction::CompleteConnect
    }

    fn on_connect_request(&mut self, generation: u32) -> ConnAction {
        match self.phase {
            ConnPhase::Idle => self.on_use_requested(),
            // The passive side gave up its half, and wants another.
            ConnPhase::Evicting if generation == self.generation => {
                self.connect_requested = true;
                self.drain_idle()
            }
            // The passive side lost its half.
            _ if generation == self.generation => self.on_qp_failed(generation),
            _ => ConnAction::Nothing,
        }
    }

    fn on_surplus(&mut self) -> ConnAction {
        match (self.role, self.phase) {
            (ConnRole::Active, ConnPhase::Ready) => self.start_evict(),
            (ConnRole::Passive, ConnPhase::Ready) => ConnAction::SendEvictRequest(0),
            _ => ConnAction::Nothing,
        }
    }

    fn start_evict(&mut self) -> ConnAction {
        self.phase = ConnPhase::Evicting;
        self.connect_requested = false;
        self.evict_attempt = (self.evict_attempt + 1) % ATTEMPT_MODULUS;
        ConnAction::SendEvictRequest(self.evict_attempt)
    }

    /// The passive side asks that we part.
    fn on_passive_evict_request(&mut self, generation: u32, is_idle: bool) -> ConnAction {
        match self.phase {
            ConnPhase::Ready if is_idle && generation == self.generation => self.start_evict(),
            _ => ConnAction::Nothing,
        }
    }

    fn on_evict_request(&mut self, generation: u32, attempt: u32, is_idle: bool) -> ConnAction {
        match self.phase {
            ConnPhase::Idle => ConnAction::SendEvicted(generation),
            ConnPhase::Ready if generation != self.generation => ConnAction::Nothing,
            ConnPhase::Ready
                if is_idle && !is_same_or_earlier_attempt(attempt, self.evict_attempt) =>
            {
                self.connect_requested = false;
                self.drain_idle()
            }
            ConnPhase::Ready => {
                if !is_same_or_earlier_attempt(attempt, self.evict_attempt) {
                    self.evict_attempt = attempt;
                }
                ConnAction::SendEvictRefused(attempt)
            }
            _ => ConnAction::Nothing,
        }
    }

    fn on_evicted(&mut self, generation: u32) -> ConnAction {
        if self.phase != ConnPhase::Evicting || generation != self.generation {
            return ConnAction::Nothing;
        }
        self.drain_idle()
    }

    fn drain_idle(&mut self) -> ConnAction {
        self.phase = ConnPhase::Draining;
        ConnAction::DrainIdle
    }

    fn on_evict_refused(&mut self, attempt: u32) -> ConnAction {
        if self.phase != ConnPhase::Evicting || attempt != self.evict_attempt {
            return ConnAction::Nothing;
        }
        self.phase = ConnPhase::Ready;
        ConnAction::Resume
    }
}

#[cfg(test)]
mod tests;
