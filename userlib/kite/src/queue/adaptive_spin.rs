// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Adaptive polling time.
//!
//! A sleep costs a system call, and the wake-up takes longer than most requests. Polling occupies a processor. The
//! polling time therefore grows after successful polls and shrinks after others.

/// Number of polls before a sleep.
#[derive(Debug)]
pub(crate) struct AdaptiveSpin {
    spins: u32,
}

impl AdaptiveSpin {
    const MIN_SPINS: u32 = 16;
    const MAX_SPINS: u32 = 1 << 14;

    pub(crate) fn new() -> Self {
        Self { spins: 1 << 10 }
    }

    /// Polls until `is_ready` returns `true` or the polls are used up. Returns `true` in the first case.
    pub(crate) fn spin_until(&mut self, mut is_ready: impl FnMut() -> bool) -> bool {
        for _ in 0..self.spins {
            if is_ready() {
                self.spins = (self.spins * 2).min(Self::MAX_SPINS);
                return true;
            }
            std::hint::spin_loop();
        }
        self.spins = (self.spins / 2).max(Self::MIN_SPINS);
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spin_limit_doubles_on_success_and_halves_on_failure() {
        let mut spin = AdaptiveSpin::new();
        let first = spin.spins;
        assert!(spin.spin_until(|| true));
        assert!(spin.spins > first);
        for _ in 0..40 {
            assert!(!spin.spin_until(|| false));
        }
        assert_eq!(spin.spins, AdaptiveSpin::MIN_SPINS);
        for _ in 0..40 {
            assert!(spin.spin_until(|| true));
        }
        assert_eq!(spin.spins, AdaptiveSpin::MAX_SPINS);
    }
}
