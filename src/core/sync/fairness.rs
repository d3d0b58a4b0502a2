// SPDX-License-Identifier: GPL-2.0

//! Who gets room next: those who sleep until there is some, or those who only look for it now and then.
//!
//! Who looks is faster than who has to be woken, and would take all. So while somebody sleeps, the two kinds
//! are admitted in turns.

/// Whose turn it is.
#[derive(Clone, Copy, Debug, Default)]
pub struct FairAdmission {
    sleepers: u32,
    /// One who looked was admitted last, while others slept.
    poller_admitted_last: bool,
}

impl FairAdmission {
    /// Nobody waits.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            sleepers: 0,
            poller_admitted_last: false,
        }
    }

    /// Somebody sleeps until there is room, and will [`Self::remove_sleeper`].
    pub fn add_sleeper(&mut self) {
        self.sleepers = self.sleepers.saturating_add(1);
    }

    /// A sleeper looks again, or gives up.
    pub fn remove_sleeper(&mut self) {
        self.sleepers = self.sleepers.saturating_sub(1);
    }

    /// Whether one who only looks may take the room that there is.
    #[must_use]
    pub const fn can_admit_poller(&self) -> bool {
        self.sleepers == 0 || !self.poller_admitted_last
    }

    /// Somebody was admitted, who has looked only, or would have slept.
    pub fn note_admission(&mut self, polled: bool) {
        self.poller_admitted_last = polled && self.sleepers != 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pollers_are_admitted_without_sleepers() {
        let mut admission = FairAdmission::new();
        for _ in 0..3 {
            assert!(admission.can_admit_poller());
            admission.note_admission(true);
        }
    }

    #[test]
    fn pollers_and_sleepers_are_admitted_in_turns() {
        let mut admission = FairAdmission::new();
        admission.add_sleeper();
        assert!(admission.can_admit_poller());
        admission.note_admission(true);
        assert!(!admission.can_admit_poller());
        admission.note_admission(false);
        assert!(admission.can_admit_poller());
        admission.note_admission(true);
        admission.remove_sleeper();
        assert!(admission.can_admit_poller());
    }
}
