// SPDX-License-Identifier: GPL-2.0

//! Who gets room next: those who sleep until there is some, or those who only look for it now and then.
//!
//! Who looks is faster than who has to be woken, and would take all. So while somebody sleeps, the two kinds
//! are admitted in turns.

/// Whose turn it is.
#[derive(Clone, Copy, Debug, Default)]
pub struct Turns {
    sleepers: u32,
    /// One who looked was admitted last, while others slept.
    looked_last: bool,
}

impl Turns {
    /// Nobody waits.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            sleepers: 0,
            looked_last: false,
        }
    }

    /// Somebody sleeps until there is room, and will [`Self::wake`].
    pub fn sleep(&mut self) {
        self.sleepers = self.sleepers.saturating_add(1);
    }

    /// A sleeper looks again, or gives up.
    pub fn wake(&mut self) {
        self.sleepers = self.sleepers.saturating_sub(1);
    }

    /// Whether one who only looks may take the room that there is.
    #[must_use]
    pub const fn may_look(&self) -> bool {
        self.sleepers == 0 || !self.looked_last
    }

    /// Somebody was admitted, who has looked only, or would have slept.
    pub fn admit(&mut self, looked: bool) {
        self.looked_last = looked && self.sleepers != 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_sleepers_anybody_may() {
        let mut turns = Turns::new();
        for _ in 0..3 {
            assert!(turns.may_look());
            turns.admit(true);
        }
    }

    #[test]
    fn with_sleepers_they_take_turns() {
        let mut turns = Turns::new();
        turns.sleep();
        assert!(turns.may_look());
        turns.admit(true);
        assert!(!turns.may_look());
        turns.admit(false);
        assert!(turns.may_look());
        turns.admit(true);
        turns.wake();
        assert!(turns.may_look());
    }
}
