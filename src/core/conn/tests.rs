// SPDX-License-Identifier: GPL-2.0

//! Tests of the parent module: single stories, and properties of two sides between which datagrams are lost, repeated
//! and late.

use super::*;
use proptest::prelude::*;

#[test]
fn connects_and_reconnects() {
    let mut active = Conn::new(Role::Active);
    let mut passive = Conn::new(Role::Passive);
    assert_eq!(active.on(Input::Wanted), Action::Open(1));
    assert_eq!(passive.on(Input::Connect(1)), Action::Build(1));
    assert_eq!(active.on(Input::Accept(1)), Action::Finish);
    assert_eq!(active.on(Input::Failed(1)), Action::Drain);
    assert_eq!(active.on(Input::Drained), Action::Open(2));
    assert_eq!(passive.on(Input::Connect(2)), Action::Drain);
    assert_eq!(passive.on(Input::Connect(2)), Action::Nothing);
    assert_eq!(passive.on(Input::Drained), Action::Nothing);
    assert_eq!(passive.on(Input::Connect(2)), Action::Build(2));
    assert_eq!(active.on(Input::Accept(1)), Action::Nothing);
    assert_eq!(active.on(Input::Accept(2)), Action::Finish);
}

#[test]
fn passive_side_pokes_until_it_is_heard() {
    let mut active = Conn::new(Role::Active);
    let mut passive = Conn::new(Role::Passive);
    assert_eq!(passive.on(Input::Wanted), Action::Poke(0));
    assert_eq!(passive.tick(), Action::Poke(0));
    assert_eq!(active.on(Input::Poke(0)), Action::Open(1));
    assert_eq!(active.on(Input::Poke(0)), Action::Nothing);
    assert_eq!(active.tick(), Action::Connect);
}

#[test]
fn passive_failure_reaches_the_active_side() {
    let mut active = Conn::new(Role::Active);
    let mut passive = Conn::new(Role::Passive);
    active.on(Input::Wanted);
    passive.on(Input::Connect(1));
    active.on(Input::Accept(1));
    assert_eq!(passive.on(Input::Failed(1)), Action::Drain);
    assert_eq!(passive.on(Input::Drained), Action::Poke(1));
    assert_eq!(active.on(Input::Poke(1)), Action::Drain);
    assert_eq!(active.on(Input::Drained), Action::Open(2));
    assert_eq!(passive.on(Input::Connect(2)), Action::Build(2));
}

#[test]
fn parts_when_neither_side_uses_it() {
    let mut active = Conn::new(Role::Active);
    let mut passive = Conn::new(Role::Passive);
    active.on(Input::Wanted);
    passive.on(Input::Connect(1));
    active.on(Input::Accept(1));
    let part = |attempt, idle| Input::Part {
        generation: 1,
        attempt,
        idle,
    };
    // The passive side may only ask.
    assert_eq!(passive.on(Input::Spare), Action::Part(0));
    assert_eq!(active.on(part(0, false)), Action::Nothing);
    assert_eq!(active.on(part(0, true)), Action::Part(1));
    assert_eq!(passive.on(part(1, false)), Action::Stay(1));
    assert_eq!(passive.on(part(1, true)), Action::Stay(1), "it said so");
    assert_eq!(active.on(Input::Stay(1)), Action::Resume);
    assert_eq!(active.on(Input::Spare), Action::Part(2));
    assert_eq!(active.on(Input::Stay(1)), Action::Nothing);
    assert_eq!(passive.on(part(2, true)), Action::Leave);
    assert_eq!(passive.on(Input::Drained), Action::Nothing);
    assert_eq!(active.tick(), Action::Part(2));
    assert_eq!(passive.on(part(2, true)), Action::Gone(1));
    assert_eq!(active.on(Input::Gone(1)), Action::Leave);
    assert_eq!(active.on(Input::Drained), Action::Nothing);
    assert!(!active.is_unsettled() && !passive.is_unsettled());
    // Whoever wants it has it made again.
    assert_eq!(passive.on(Input::Wanted), Action::Poke(1));
    assert_eq!(active.on(Input::Poke(1)), Action::Open(2));
    assert_eq!(passive.on(Input::Connect(2)), Action::Build(2));
}

#[test]
fn who_wants_it_while_it_goes_has_another() {
    let mut active = Conn::new(Role::Active);
    let mut passive = Conn::new(Role::Passive);
    active.on(Input::Wanted);
    passive.on(Input::Connect(1));
    active.on(Input::Accept(1));
    active.on(Input::Spare);
    assert_eq!(active.on(Input::Wanted), Action::Nothing);
    let part = Input::Part {
        generation: 1,
        attempt: 1,
        idle: true,
    };
    assert_eq!(passive.on(part), Action::Leave);
    assert_eq!(passive.on(Input::Wanted), Action::Nothing);
    assert_eq!(passive.on(Input::Drained), Action::Poke(1));
    assert_eq!(active.on(Input::Poke(1)), Action::Leave);
    assert_eq!(active.on(Input::Drained), Action::Open(2));
}

/// Two connections, the datagrams between them, and the generations of their queue pairs.
struct World {
    sides: [Conn; 2],
    pairs: [Option<u32>; 2],
    /// To the active side (0) and to the passive one (1).
    wire: [Vec<Input>; 2],
    /// Whether nobody uses a side.
    idle: [bool; 2],
    /// No queue pair has failed by itself.
    sound: bool,
}

impl World {
    fn new() -> Self {
        Self {
            sides: [Conn::new(Role::Active), Conn::new(Role::Passive)],
            pairs: [None, None],
            wire: [Vec::new(), Vec::new()],
            idle: [true, true],
            sound: true,
        }
    }

    fn act(&mut self, side: usize, action: Action) {
        let generation = self.sides[side].generation();
        let other = 1 - side;
        match action {
            Action::Nothing | Action::Finish | Action::Drain | Action::Resume => {}
            Action::Leave => {}
            Action::Open(new) => {
                assert_eq!(self.pairs[side], None, "two queue pairs at once");
                self.pairs[side] = Some(new);
                self.wire[other].push(Input::Connect(new));
            }
            Action::Build(new) => {
                assert_eq!(self.pairs[side], None, "two queue pairs at once");
                self.pairs[side] = Some(new);
                self.wire[other].push(Input::Accept(new));
            }
            Action::Connect => self.wire[other].push(Input::Connect(generation)),
            Action::Accept => self.wire[other].push(Input::Accept(generation)),
            Action::Poke(of) => self.wire[other].push(Input::Poke(of)),
            Action::Part(attempt) => self.wire[other].push(Input::Part {
                generation,
                attempt,
                idle: false,
            }),
            Action::Gone(of) => self.wire[other].push(Input::Gone(of)),
            Action::Stay(of) => self.wire[other].push(Input::Stay(of)),
        }
        // Whoever is ready talks to a peer that has dropped all older generations.
        if self.sides[0].phase() == Phase::Ready {
            if let Some(passive) = self.pairs[1] {
                assert!(passive >= self.sides[0].generation());
            }
        }
        for side in [0, 1] {
            // Whoever may post has somebody at the other end.
            if self.sound && self.sides[side].phase() == Phase::Ready {
                assert_eq!(self.pairs[1 - side], Some(self.sides[side].generation()));
            }
        }
    }

    fn input(&mut self, side: usize, mut input: Input) {
        if let Input::Part { idle, .. } = &mut input {
            *idle = self.idle[side];
        }
        if input == Input::Drained {
            if self.sides[side].phase() != Phase::Draining {
                return;
            }
            self.pairs[side] = None;
        }
        let action = self.sides[side].on(input);
        self.act(side, action);
    }

    fn step(&mut self, side: usize, what: u8, pick: usize) {
        let len = self.wire[side].len();
        match what {
            0 => self.input(side, Input::Wanted),
            1 => {
                self.sound = false;
                self.input(side, Input::Failed(self.sides[side].generation()));
            }
            2 => self.input(side, Input::Drained),
            3 => {
                let action = self.sides[side].tick();
                self.act(side, action);
            }
            // Delivered once, delivered and kept (repeated later), or lost.
            4 if len > 0 => {
                let input = self.wire[side].remove(pick % len);
                self.input(side, input);
            }
            5 if len > 0 => self.input(side, self.wire[side][pick % len]),
            6 if len > 0 => {
                self.wire[side].remove(pick % len);
            }
            7 if self.idle[side] => self.input(side, Input::Spare),
            8 => self.idle[side] = !self.idle[side],
            _ => {}
        }
    }

    /// Nothing is lost any more: in bounded time both are ready with the same generation.
    fn settle(&mut self) -> bool {
        self.idle = [false, false];
        self.input(0, Input::Wanted);
        for _ in 0..100 {
            for side in [0, 1] {
                self.input(side, Input::Drained);
                while !self.wire[side].is_empty() {
                    self.step(side, 4, 0);
                }
                if self.sides[side].is_unsettled() {
                    self.step(side, 3, 0);
                }
            }
        }
        let ready = self.sides.iter().all(|side| side.phase() == Phase::Ready);
        ready && self.pairs[0] == self.pairs[1]
    }
}

proptest! {
    #[test]
    fn any_mishap_is_overcome(
        steps in proptest::collection::vec((0..2usize, 0..9u8, any::<usize>()), 0..300)
    ) {
        let mut world = World::new();
        for (side, what, pick) in steps {
            world.step(side, what, pick);
        }
        let generation = world.sides[0].generation();
        // A side that believes in a half that is gone finds out by using it.
        if world.sides[0].phase() == Phase::Ready && world.pairs[1] != Some(generation) {
            world.input(0, Input::Failed(generation));
        }
        let generation = world.sides[1].generation();
        if world.sides[1].phase() == Phase::Ready && world.pairs[0] != Some(generation) {
            world.input(1, Input::Failed(generation));
        }
        prop_assert!(world.settle());
    }

    /// As long as no queue pair fails none is posted to whose other half is gone.
    #[test]
    fn nobody_is_left_alone(
        steps in proptest::collection::vec((0..2usize, 2..9u8, any::<usize>()), 0..300)
    ) {
        let mut world = World::new();
        for (side, what, pick) in steps {
            world.step(side, what, pick);
        }
        prop_assert!(world.sound);
    }
}
