// SPDX-License-Identifier: GPL-2.0

//! State machine of an RC connection: decides when to create, use and destroy the QP, without calling verbs.
//!
//! # Operation
//!
//! The node with the lower id is *active*. Only the active side starts a connection, so that two never cross.
//! The *passive* side sends a ConnectRequest instead. Each QP has a generation. A side creates a new QP only
//! when nothing is in flight on the old QP and the old QP is destroyed. A generation is used only when both
//! sides have dropped the previous one. Hence a failed request can be retried on the new QP: no packet of
//! the old QP can arrive late.
//!
//! A surplus connection that is idle on both sides is evicted. The passive side may propose the eviction. The
//! active side stops posting and sends an EvictRequest. An idle passive side destroys its QP and replies
//! Evicted to the next repetition. Otherwise the passive side replies EvictRefused, and both sides keep their
//! QPs.
//!
//! # Recovery
//!
//! Datagrams may be lost, duplicated or late. The active side repeats Connect until it is accepted, and the
//! passive side replies to each. Stale generations are ignored.
//!
//! The passive side gives the same answer to each repetition of one eviction attempt. Hence a side never
//! posts to a peer QP that was given up.

/// Role of the local side of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnRole {
    /// The node with the lower id.
    Active,
    /// The node with the higher id.
    Passive,
}

/// Phase of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnPhase {
    /// The connection has no QP.
    Idle,
    /// The active side has created a QP and waits for Accept.
    Connecting,
    /// Requests may be posted.
    Ready,
    /// The active side has requested eviction and posts no requests until the peer replies.
    Evicting,
    /// The QP failed or is being evicted. Requests in flight complete with a flush error.
    Draining,
}

/// Input of the state machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnEvent {
    /// A caller needs the connection.
    UseRequested,
    /// The QP of this generation failed.
    QpFailed(u32),
    /// Nothing is in flight, and the QP is destroyed.
    Drained,
    /// The peer (active) created a QP of this generation.
    Connect(u32),
    /// The peer (passive) created its QP of this generation.
    Accept(u32),
    /// The peer (passive) needs a newer QP than the one of this generation; 0 if it has had none.
    ConnectRequest(u32),
    /// The connection is surplus and idle on this side.
    Surplus,
    /// The peer requests eviction of a QP.
    EvictRequest {
        /// Generation of the QP.
        generation: u32,
        /// Attempt number of the active side, below 2²⁴. 0 if the passive side proposes eviction.
        attempt: u32,
        /// `true` if the connection is idle on this side.
        is_idle: bool,
    },
    /// The peer (passive) has no QP of this generation any longer, and needs none.
    Evicted(u32),
    /// The peer (passive) was using the QP when it received this attempt.
    EvictRefused(u32),
}

/// Action that the caller must perform.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnAction {
    /// No action.
    Nothing,
    /// Create a QP of this generation, and send Connect.
    StartConnect(u32),
    /// Create a QP of this generation, connect it, and send Accept.
    AcceptConnect(u32),
    /// Connect the QP to the peer QP of the Accept.
    CompleteConnect,
    /// Send the previous Connect again.
    ResendConnect,
    /// Send the previous Accept again.
    ResendAccept,
    /// Send a ConnectRequest with this generation.
    SendConnectRequest(u32),
    /// Move the QP to ERR. Report [`ConnEvent::Drained`] when the QP is empty and destroyed.
    Drain,
    /// As [`Self::Drain`], but the QP is idle: no packet of the QP can arrive late.
    DrainIdle,
    /// Send an EvictRequest with this attempt number.
    SendEvictRequest(u32),
    /// Send Evicted: the local QP of this generation is destroyed.
    SendEvicted(u32),
    /// Send EvictRefused for this attempt: the QP is in use.
    SendEvictRefused(u32),
    /// Allow requests to be posted again.
    Resume,
}

/// State machine of one side of a connection.
#[derive(Clone, Copy, Debug)]
pub struct ConnStateMachine {
    role: ConnRole,
    phase: ConnPhase,
    /// Generation of the current QP, or of the last one; 0 before the first.
    generation: u32,
    connect_requested: bool,
    /// Last eviction attempt that was started (active side) or refused (passive side).
    evict_attempt: u32,
}

/// Modulus of the attempt number.
const ATTEMPT_MODULUS: u32 = 1 << 24;

/// Returns `true` if attempt `a` is `b` or was made before `b`.
fn is_same_or_earlier_attempt(a: u32, b: u32) -> bool {
    b.wrapping_sub(a) % ATTEMPT_MODULUS < ATTEMPT_MODULUS / 2
}

impl ConnStateMachine {
    /// Creates an idle connection with the local role `role`.
    pub const fn new(role: ConnRole) -> Self {
        Self {
            role,
            phase: ConnPhase::Idle,
            generation: 0,
            connect_requested: false,
            evict_attempt: 0,
        }
    }

    /// Returns the phase of the connection.
    #[inline]
    pub const fn phase(&self) -> ConnPhase {
        self.phase
    }

    /// Returns the generation of the current QP, or of the last one; 0 before the first.
    #[inline]
    pub const fn generation(&self) -> u32 {
        self.generation
    }

    /// Returns `true` if the caller must call [`Self::tick`] periodically.
    pub const fn needs_tick(&self) -> bool {
        match self.phase {
            ConnPhase::Idle => self.connect_requested,
            ConnPhase::Connecting | ConnPhase::Evicting | ConnPhase::Draining => true,
            ConnPhase::Ready => false,
        }
    }

    /// Processes an event. Returns the action to perform.
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

    /// Repeats datagrams that may have been lost. Called periodically while [`Self::needs_tick`] is `true`.
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

    /// Records that the QP of [`ConnAction::StartConnect`] or [`ConnAction::AcceptConnect`] could not be
    /// created.
    ///
    /// Later ticks retry.
    pub fn on_create_failed(&mut self) {
        if self.role == ConnRole::Passive {
            // The active side sends Connect with the same generation again.
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
            // The local QP of this generation is already gone: the active side must create another.
            ConnPhase::Idle if generation == self.generation => {
                ConnAction::SendConnectRequest(generation)
            }
            ConnPhase::Ready if generation == self.generation => ConnAction::ResendAccept,
            // The active side gave up its QP. Its next Connect finds this side idle.
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
            // The passive side has evicted its QP and needs another.
            ConnPhase::Evicting if generation == self.generation => {
                self.connect_requested = true;
                self.drain_idle()
            }
            // The passive side has lost its QP.
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

    /// Starts an eviction that the passive side proposes, if this side is idle too.
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
