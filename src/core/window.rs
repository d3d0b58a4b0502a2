// SPDX-License-Identifier: GPL-2.0

//! Room in a queue of the RNIC.
//!
//! A queue pair that is posted more than it holds fails for all who share it (KRCORE: queue overflow
//! is one of the things to check before posting). Posters take credits first; completions give them
//! back. The caller has the lock.

/// Counts the entries of a queue that are in use.
#[derive(Clone, Debug)]
pub struct Credits {
    capacity: u32,
    used: u32,
}

impl Credits {
    /// All of a queue of `capacity` entries is free.
    pub const fn new(capacity: u32) -> Self {
        Self { capacity, used: 0 }
    }

    /// Takes `n` entries, all or none. Returns whether there was room.
    #[inline]
    #[must_use]
    pub fn take(&mut self, n: u32) -> bool {
        let room = n <= self.room();
        if room {
            self.used += n;
        }
        room
    }

    /// Gives `n` entries back. To give more than was taken is a mistake of the caller; there is never
    /// more room than the queue has.
    #[inline]
    pub fn give(&mut self, n: u32) {
        debug_assert!(n <= self.used, "{n} given, {} in use", self.used);
        self.used = self.used.saturating_sub(n);
    }

    /// Entries in use.
    #[inline]
    pub const fn used(&self) -> u32 {
        self.used
    }

    /// Entries that are free.
    #[inline]
    pub const fn room(&self) -> u32 {
        self.capacity - self.used
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn takes_all_or_none() {
        let mut credits = Credits::new(3);
        assert!(credits.take(2) && !credits.take(2) && !credits.take(u32::MAX));
        assert_eq!((credits.used(), credits.room()), (2, 1));
        assert!(credits.take(1) && credits.take(0) && !credits.take(1));
        credits.give(3);
        assert_eq!((credits.used(), credits.room()), (0, 3));
    }

    #[test]
    fn largest_queue_does_not_overflow() {
        let mut credits = Credits::new(u32::MAX);
        assert!(credits.take(u32::MAX) && !credits.take(1));
        assert!(!Credits::new(0).take(1) && Credits::new(0).take(0));
    }

    #[test]
    #[cfg_attr(debug_assertions, should_panic(expected = "2 given, 1 in use"))]
    fn room_never_exceeds_the_queue() {
        let mut credits = Credits::new(2);
        assert!(credits.take(1));
        credits.give(2);
        assert_eq!(credits.room(), 2);
    }

    proptest! {
        #[test]
        fn follows_the_model(capacity in 0u32..20, steps in prop::collection::vec((any::<bool>(), 0u32..8), 0..60)) {
            let mut credits = Credits::new(capacity);
            let mut used = 0;
            for (take, n) in steps {
                if take {
                    prop_assert_eq!(credits.take(n), used + n <= capacity);
                    used += if used + n <= capacity { n } else { 0 };
                } else {
                    credits.give(n.min(used));
                    used -= n.min(used);
                }
                prop_assert_eq!((credits.used(), credits.room()), (used, capacity - used));
            }
        }
    }
}
