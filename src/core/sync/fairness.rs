// SPDX-License-Identifier: GPL-2.0

//! Fair admission to a limited resource, between threads that sleep for capacity and pollers.
//!
//! A poller retries without sleeping. A poller is faster than a sleeper, which must be woken first, and would
//! take all capacity. Hence sleepers and pollers are admitted alternately while a thread sleeps.

/// Alternates admission between sleepers and pollers.
#[derive(Clone, Copy, Debug, Default)]
pub struct FairAdmission {
    /// Number of threads that sleep until capacity is free.
    sleepers: u32,
    /// The last admission was of a poller, while a thread slept.
    poller_admitted_last: bool,
}

impl FairAdmission {
    /// Creates the state without sleepers.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            sleepers: 0,
            poller_admitted_last: false,
        }
    }

    /// Registers a thread that sleeps until capacity is free. The thread must call [`Self::remove_sleeper`].
    pub fn add_sleeper(&mut self) {
        self.sleepers = self.sleepers.saturating_add(1);
    }

    /// Unregisters a sleeper that retries or gives up.
    pub fn remove_sleeper(&mut self) {
        self.sleepers = self.sleepers.saturating_sub(1);
    }

    /// Returns `true` if a poller may take free capacity.
    #[must_use]
    pub const fn can_admit_poller(&self) -> bool {
        self.sleepers == 0 || !self.poller_admitted_last
    }

    /// Records an admission. `polled` is `true` for a poller, `false` for a thread that may sleep.
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
