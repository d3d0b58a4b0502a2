// SPDX-License-Identifier: GPL-2.0

//! How many messages may be under way between two virtual queue pairs.
//!
//! The receiver keeps up to [`WINDOW`] messages that its process has not taken, and says up to which number it will
//! keep what comes. So nothing is ever sent for which there is no room, and nobody who is slow holds up the receive
//! buffers that all share. What an end says holds more each time, so it does no harm if it is said twice.

use crate::wire::packet::{Phase, State, WINDOW};

/// Messages that may be sent at once: whoever has sent all that it may is told more before.
pub const BURST: u64 = WINDOW / 2;

/// The messages that an end sends.
#[derive(Debug)]
pub struct Outgoing {
    next: u64,
    limit: u64,
    taken: u64,
    open: bool,
}

impl Outgoing {
    /// None was sent. `open` says whether the other end is known to be a process's.
    #[must_use]
    pub const fn new(open: bool) -> Self {
        Self {
            next: 0,
            limit: WINDOW,
            taken: 0,
            open,
        }
    }

    /// A number for one more.
    pub fn number(&mut self) -> u64 {
        let number = self.next;
        self.next += 1;
        number
    }

    /// Whether there was one.
    #[must_use]
    pub const fn has_sent(&self) -> bool {
        self.next != 0
    }

    /// Whether the receiver keeps it.
    #[must_use]
    pub const fn may_send(&self, number: u64) -> bool {
        number < self.limit
    }

    /// Whether one that has arrived needs nothing more of the sender. Of one that is to be fetched the bytes are needed
    /// until it is taken.
    #[must_use]
    pub const fn is_settled(&self, number: u64, fetched: bool) -> bool {
        number < self.taken || self.open && !fetched
    }

    /// The receiver says how it is, and is not over.
    pub fn hear(&mut self, state: &State) {
        self.open |= state.phase == Phase::Open;
        self.limit = self.limit.max(state.limit);
        self.taken = self.taken.max(state.taken);
    }
}

/// What to do with a message that came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// Keep it.
    New,
    /// It was here before: the sender may not know what was told since.
    Again,
    /// No sender does that: forget it.
    Wrong,
}

/// The messages that an end receives.
#[derive(Debug)]
pub struct Incoming {
    arrived: u64,
    taken: u64,
    told: u64,
}

impl Default for Incoming {
    fn default() -> Self {
        Self {
            arrived: 0,
            taken: 0,
            told: WINDOW,
        }
    }
}

impl Incoming {
    /// One has come.
    pub fn arrive(&mut self, number: u64) -> Arrival {
        if number < self.arrived {
            return Arrival::Again;
        }
        if number > self.arrived || number >= self.limit() {
            return Arrival::Wrong;
        }
        self.arrived += 1;
        Arrival::New
    }

    /// A process has taken the first that was kept.
    pub fn take(&mut self) {
        self.taken += 1;
        debug_assert!(self.taken <= self.arrived, "nothing was kept");
    }

    const fn limit(&self) -> u64 {
        self.taken + WINDOW
    }

    /// Whether the sender may soon have to wait for what it is to be told.
    #[must_use]
    pub const fn is_to_be_told(&self) -> bool {
        self.limit() > self.told && self.told < self.arrived + BURST
    }

    /// What the sender is to be told.
    #[must_use]
    pub const fn state(&self, phase: Phase) -> State {
        State {
            phase,
            limit: self.limit(),
            taken: self.taken,
        }
    }

    /// The sender was told that.
    pub fn note_told(&mut self, state: &State) {
        self.told = self.told.max(state.limit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    #[test]
    fn one_that_waits_for_a_process_is_settled_when_there_is_one() {
        let mut out = Outgoing::new(false);
        let number = out.number();
        assert!(!out.is_settled(number, false));
        out.hear(&Incoming::default().state(Phase::Open));
        assert!(out.is_settled(number, false));
        assert!(!out.is_settled(number, true), "its bytes are needed");
        let mut incoming = Incoming::default();
        assert_eq!(incoming.arrive(number), Arrival::New);
        incoming.take();
        out.hear(&incoming.state(Phase::Open));
        assert!(out.is_settled(number, true));
    }

    #[test]
    fn one_that_comes_again_is_known() {
        let mut incoming = Incoming::default();
        assert_eq!(incoming.arrive(1), Arrival::Wrong);
        assert_eq!(incoming.arrive(0), Arrival::New);
        assert_eq!(incoming.arrive(0), Arrival::Again);
        for number in 1..WINDOW {
            assert_eq!(incoming.arrive(number), Arrival::New);
        }
        assert_eq!(incoming.arrive(WINDOW), Arrival::Wrong, "nobody took any");
    }

    proptest! {
        /// Whatever the order of things: all arrive, in order, none is kept beyond the window, and both go on,
        /// however many are sent at a time.
        #[test]
        fn nobody_waits_for_ever(
            turns in prop::collection::vec(0u8..3, 1..400),
            burst in 1..=BURST,
        ) {
            let (mut out, mut incoming) = (Outgoing::new(true), Incoming::default());
            let numbers = |out: &mut Outgoing| (0..burst).map(|_| out.number()).last().unwrap();
            let (mut wire, mut kept, mut last) = (VecDeque::new(), 0, numbers(&mut out));
            let mut untold = None;
            let rest = [0, 1, 2].into_iter().cycle().take(3 * 2 * WINDOW as usize);
            for turn in turns.into_iter().chain(rest) {
                match turn {
                    0 if out.may_send(last) => {
                        wire.extend(last + 1 - burst..=last);
                        last = numbers(&mut out);
                    }
                    1 => if let Some(number) = wire.pop_front() {
                        prop_assert_eq!(incoming.arrive(number), Arrival::New);
                        kept += 1;
                    },
                    2 if kept != 0 => {
                        incoming.take();
                        kept -= 1;
                        if incoming.is_to_be_told() {
                            let state = incoming.state(Phase::Open);
                            out.hear(&state);
                            untold = Some(state);
                        }
                    }
                    _ => {}
                }
                // Who is told may be faster than who takes note of that.
                if turn == 1 {
                    if let Some(state) = untold.take() {
                        incoming.note_told(&state);
                    }
                }
                prop_assert!(kept <= WINDOW);
                prop_assert!(out.may_send(last) || kept != 0 || !wire.is_empty(), "both wait");
            }
        }
    }
}
