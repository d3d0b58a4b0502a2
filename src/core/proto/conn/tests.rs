// SPDX-License-Identifier: GPL-2.0

//! Tests of the parent module: single scenarios, and properties of two sides with datagrams that are
//! lost, duplicated and late.

use super::*;
use proptest::prelude::*;

#[test]
fn connection_reconnects_after_qp_failure() {
    let mut active = ConnStateMachine::new(ConnRole::Active);
    let mut passive = ConnStateMachine::new(ConnRole::Passive);
    assert_eq!(
        active.handle_event(ConnEvent::UseRequested),
        ConnAction::StartConnect(1)
    );
    assert_eq!(
        passive.handle_event(ConnEvent::Connect(1)),
        ConnAction::AcceptConnect(1)
    );
    assert_eq!(
        active.handle_event(ConnEvent::Accept(1)),
        ConnAction::CompleteConnect
    );
    assert_eq!(
        active.handle_event(ConnEvent::QpFailed(1)),
        ConnAction::Drain
    );
    assert_eq!(
        active.handle_event(ConnEvent::Drained),
        ConnAction::StartConnect(2)
    );
    assert_eq!(
        passive.handle_event(ConnEvent::Connect(2)),
        ConnAction::Drain
    );
    assert_eq!(
        passive.handle_event(ConnEvent::Connect(2)),
        ConnAction::Nothing
    );
    assert_eq!(
        passive.handle_event(ConnEvent::Drained),
        ConnAction::Nothing
    );
    assert_eq!(
        passive.handle_event(ConnEvent::Connect(2)),
        ConnAction::AcceptConnect(2)
    );
    assert_eq!(
        active.handle_event(ConnEvent::Accept(1)),
        ConnAction::Nothing
    );
    assert_eq!(
        active.handle_event(ConnEvent::Accept(2)),
        ConnAction::CompleteConnect
    );
}

#[test]
fn passive_side_repeats_connect_request_until_active_side_connects() {
    let mut active = ConnStateMachine::new(ConnRole::Active);
    let mut passive = ConnStateMachine::new(ConnRole::Passive);
    assert_eq!(
        passive.handle_event(ConnEvent::UseRequested),
        ConnAction::SendConnectRequest(0)
    );
    assert_eq!(passive.tick(), ConnAction::SendConnectRequest(0));
    assert_eq!(
        active.handle_event(ConnEvent::ConnectRequest(0)),
        ConnAction::StartConnect(1)
    );
    assert_eq!(
        active.handle_event(ConnEvent::ConnectRequest(0)),
        ConnAction::Nothing
    );
    assert_eq!(active.tick(), ConnAction::ResendConnect);
}

#[test]
fn passive_qp_failure_makes_active_side_reconnect() {
    let mut active = ConnStateMachine::new(ConnRole::Active);
    let mut passive = ConnStateMachine::new(ConnRole::Passive);
    active.handle_event(ConnEvent::UseRequested);
    passive.handle_event(ConnEvent::Connect(1));
    active.handle_event(ConnEvent::Accept(1));
    assert_eq!(
        passive.handle_event(ConnEvent::QpFailed(1)),
        ConnAction::Drain
    );
    assert_eq!(
        passive.handle_event(ConnEvent::Drained),
        ConnAction::SendConnectRequest(1)
    );
    assert_eq!(
        active.handle_event(ConnEvent::ConnectRequest(1)),
        ConnAction::Drain
    );
    assert_eq!(
        active.handle_event(ConnEvent::Drained),
        ConnAction::StartConnect(2)
    );
    assert_eq!(
        passive.handle_event(ConnEvent::Connect(2)),
        ConnAction::AcceptConnect(2)
    );
}

#[test]
fn connection_is_evicted_when_both_sides_are_idle() {
    let mut active = ConnStateMachine::new(ConnRole::Active);
    let mut passive = ConnStateMachine::new(ConnRole::Passive);
    active.handle_event(ConnEvent::UseRequested);
    passive.handle_event(ConnEvent::Connect(1));
    active.handle_event(ConnEvent::Accept(1));
    let evict_request = |attempt, idle| ConnEvent::EvictRequest {
        generation: 1,
        attempt,
        is_idle: idle,
    };
    // The passive side may only propose an eviction.
    assert_eq!(
        passive.handle_event(ConnEvent::Surplus),
        ConnAction::SendEvictRequest(0)
    );
    assert_eq!(
        active.handle_event(evict_request(0, false)),
        ConnAction::Nothing
    );
    assert_eq!(
        active.handle_event(evict_request(0, true)),
        ConnAction::SendEvictRequest(1)
    );
    assert_eq!(
        passive.handle_event(evict_request(1, false)),
        ConnAction::SendEvictRefused(1)
    );
    assert_eq!(
        passive.handle_event(evict_request(1, true)),
        ConnAction::SendEvictRefused(1),
        "the peer refused before"
    );
    assert_eq!(
        active.handle_event(ConnEvent::EvictRefused(1)),
        ConnAction::Resume
    );
    assert_eq!(
        active.handle_event(ConnEvent::Surplus),
        ConnAction::SendEvictRequest(2)
    );
    assert_eq!(
        active.handle_event(ConnEvent::EvictRefused(1)),
        ConnAction::Nothing
    );
    assert_eq!(
        passive.handle_event(evict_request(2, true)),
        ConnAction::DrainIdle
    );
    assert_eq!(
        passive.handle_event(ConnEvent::Drained),
        ConnAction::Nothing
    );
    assert_eq!(active.tick(), ConnAction::SendEvictRequest(2));
    assert_eq!(
        passive.handle_event(evict_request(2, true)),
        ConnAction::SendEvicted(1)
    );
    assert_eq!(
        active.handle_event(ConnEvent::Evicted(1)),
        ConnAction::DrainIdle
    );
    assert_eq!(active.handle_event(ConnEvent::Drained), ConnAction::Nothing);
    assert!(!active.needs_tick() && !passive.needs_tick());
    // A later use reconnects.
    assert_eq!(
        passive.handle_event(ConnEvent::UseRequested),
        ConnAction::SendConnectRequest(1)
    );
    assert_eq!(
        active.handle_event(ConnEvent::ConnectRequest(1)),
        ConnAction::StartConnect(2)
    );
    assert_eq!(
        passive.handle_event(ConnEvent::Connect(2)),
        ConnAction::AcceptConnect(2)
    );
}

#[test]
fn use_requested_during_eviction_reconnects() {
    let mut active = ConnStateMachine::new(ConnRole::Active);
    let mut passive = ConnStateMachine::new(ConnRole::Passive);
    active.handle_event(ConnEvent::UseRequested);
    passive.handle_event(ConnEvent::Connect(1));
    active.handle_event(ConnEvent::Accept(1));
    active.handle_event(ConnEvent::Surplus);
    assert_eq!(
        active.handle_event(ConnEvent::UseRequested),
        ConnAction::Nothing
    );
    let evict_request = ConnEvent::EvictRequest {
        generation: 1,
        attempt: 1,
        is_idle: true,
    };
    assert_eq!(passive.handle_event(evict_request), ConnAction::DrainIdle);
    assert_eq!(
        passive.handle_event(ConnEvent::UseRequested),
        ConnAction::Nothing
    );
    assert_eq!(
        passive.handle_event(ConnEvent::Drained),
        ConnAction::SendConnectRequest(1)
    );
    assert_eq!(
        active.handle_event(ConnEvent::ConnectRequest(1)),
        ConnAction::DrainIdle
    );
    assert_eq!(
        active.handle_event(ConnEvent::Drained),
        ConnAction::StartConnect(2)
    );
}

/// Two sides of a connection, the datagrams between them, and the generations of their QPs.
struct ConnSimulation {
    sides: [ConnStateMachine; 2],
    qp_generations: [Option<u32>; 2],
    /// Datagrams in flight to the active side (0) and to the passive side (1).
    in_flight: [Vec<ConnEvent>; 2],
    /// `true` if the side is idle.
    is_idle: [bool; 2],
    /// `true` until a QP fails on its own.
    no_qp_failed: bool,
}

impl ConnSimulation {
    fn new() -> Self {
        Self {
            sides: [
                ConnStateMachine::new(ConnRole::Active),
                ConnStateMachine::new(ConnRole::Passive),
            ],
            qp_generations: [None, None],
            in_flight: [Vec::new(), Vec::new()],
            is_idle: [true, true],
            no_qp_failed: true,
        }
    }

    fn perform(&mut self, side: usize, action: ConnAction) {
        let generation = self.sides[side].generation();
        let other = 1 - side;
        match action {
            ConnAction::Nothing
            | ConnAction::CompleteConnect
            | ConnAction::Drain
            | ConnAction::Resume => {}
            ConnAction::DrainIdle => {}
            ConnAction::StartConnect(new) => {
                assert_eq!(self.qp_generations[side], None, "two queue pairs at once");
                self.qp_generations[side] = Some(new);
                self.in_flight[other].push(ConnEvent::Connect(new));
            }
            ConnAction::AcceptConnect(new) => {
                assert_eq!(self.qp_generations[side], None, "two queue pairs at once");
                self.qp_generations[side] = Some(new);
                self.in_flight[other].push(ConnEvent::Accept(new));
            }
            ConnAction::ResendConnect => self.in_flight[other].push(ConnEvent::Connect(generation)),
            ConnAction::ResendAccept => self.in_flight[other].push(ConnEvent::Accept(generation)),
            ConnAction::SendConnectRequest(generation) => {
                self.in_flight[other].push(ConnEvent::ConnectRequest(generation))
            }
            ConnAction::SendEvictRequest(attempt) => {
                self.in_flight[other].push(ConnEvent::EvictRequest {
                    generation,
                    attempt,
                    is_idle: false,
                })
            }
            ConnAction::SendEvicted(generation) => {
                self.in_flight[other].push(ConnEvent::Evicted(generation))
            }
            ConnAction::SendEvictRefused(attempt) => {
                self.in_flight[other].push(ConnEvent::EvictRefused(attempt))
            }
        }
        // If the active side is ready, the passive side has dropped all older generations.
        if self.sides[0].phase() == ConnPhase::Ready {
            if let Some(passive) = self.qp_generations[1] {
                assert!(passive >= self.sides[0].generation());
            }
        }
        for side in [0, 1] {
            // A side that may post has a peer QP of the same generation.
            if self.no_qp_failed && self.sides[side].phase() == ConnPhase::Ready {
                assert_eq!(
                    self.qp_generations[1 - side],
                    Some(self.sides[side].generation())
                );
            }
        }
    }

    fn deliver(&mut self, side: usize, mut input: ConnEvent) {
        if let ConnEvent::EvictRequest { is_idle: idle, .. } = &mut input {
            *idle = self.is_idle[side];
        }
        if input == ConnEvent::Drained {
            if self.sides[side].phase() != ConnPhase::Draining {
                return;
            }
            self.qp_generations[side] = None;
        }
        let action = self.sides[side].handle_event(input);
        self.perform(side, action);
    }

    fn run_step(&mut self, side: usize, step: u8, pick: usize) {
        let len = self.in_flight[side].len();
        match step {
            0 => self.deliver(side, ConnEvent::UseRequested),
            1 => {
                self.no_qp_failed = false;
                self.deliver(side, ConnEvent::QpFailed(self.sides[side].generation()));
            }
            2 => self.deliver(side, ConnEvent::Drained),
            3 => {
                let action = self.sides[side].tick();
                self.perform(side, action);
            }
            // Deliver once, deliver and keep as a duplicate, or lose.
            4 if len > 0 => {
                let input = self.in_flight[side].remove(pick % len);
                self.deliver(side, input);
            }
            5 if len > 0 => self.deliver(side, self.in_flight[side][pick % len]),
            6 if len > 0 => {
                self.in_flight[side].remove(pick % len);
            }
            7 if self.is_idle[side] => self.deliver(side, ConnEvent::Surplus),
            8 => self.is_idle[side] = !self.is_idle[side],
            _ => {}
        }
    }

    /// Returns `true` if both sides are ready with the same generation in bounded time, without further
    /// losses.
    fn converges(&mut self) -> bool {
        self.is_idle = [false, false];
        self.deliver(0, ConnEvent::UseRequested);
        for _ in 0..100 {
            for side in [0, 1] {
                self.deliver(side, ConnEvent::Drained);
                while !self.in_flight[side].is_empty() {
                    self.run_step(side, 4, 0);
                }
                if self.sides[side].needs_tick() {
                    self.run_step(side, 3, 0);
                }
            }
        }
        let is_ready = self
            .sides
            .iter()
            .all(|side| side.phase() == ConnPhase::Ready);
        is_ready && self.qp_generations[0] == self.qp_generations[1]
    }
}

proptest! {
    #[test]
    fn sides_converge_after_lost_duplicated_and_late_datagrams(
        steps in proptest::collection::vec((0..2usize, 0..9u8, any::<usize>()), 0..300)
    ) {
        let mut simulation = ConnSimulation::new();
        for (side, step, pick) in steps {
            simulation.run_step(side, step, pick);
        }
        let generation = simulation.sides[0].generation();
        // A side detects that the peer QP is gone when it uses its own QP.
        if simulation.sides[0].phase() == ConnPhase::Ready && simulation.qp_generations[1] != Some(generation) {
            simulation.deliver(0, ConnEvent::QpFailed(generation));
        }
        let generation = simulation.sides[1].generation();
        if simulation.sides[1].phase() == ConnPhase::Ready && simulation.qp_generations[0] != Some(generation) {
            simulation.deliver(1, ConnEvent::QpFailed(generation));
        }
        prop_assert!(simulation.converges());
    }

    /// Unless a QP fails, no side posts to a peer QP that is gone.
    #[test]
    fn ready_side_has_a_peer_qp_unless_a_qp_failed(
        steps in proptest::collection::vec((0..2usize, 2..9u8, any::<usize>()), 0..300)
    ) {
        let mut simulation = ConnSimulation::new();
        for (side, step, pick) in steps {
            simulation.run_step(side, step, pick);
        }
        prop_assert!(simulation.no_qp_failed);
    }
}
