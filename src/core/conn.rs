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
mod tests {
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
}
