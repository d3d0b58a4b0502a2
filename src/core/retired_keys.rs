// SPDX-License-Identifier: GPL-2.0

//! Quarantine of destroyed memory keys.
//!
//! A work request may reach the RNIC long after its sender has checked the lease of the key, for example if
//! the sender was paused. The request must not find the memory of another program. The hardware reuses the
//! index of a destroyed key at once, and the rest of a key has only 8 bits. Therefore no new key may equal a
//! key that was destroyed within [`RETIRED_KEY_MS`].

use core::ops::DerefMut;

/// Time in milliseconds for which a destroyed key is not used again.
pub const RETIRED_KEY_MS: u64 = 60_000;

/// A destroyed key, and the time of its destruction in milliseconds.
pub type RetiredKey = (u32, u64);

/// The last destroyed keys. Holds as many as the storage has entries. A further key replaces the oldest, whose
/// quarantine then ends early.
#[derive(Debug)]
pub struct RetiredKeys<S> {
    /// Entries of the ring. An unused entry is the key 0, which no device assigns, at time 0.
    entries: S,
    /// Index of the oldest entry.
    next: usize,
}

impl<S: DerefMut<Target = [RetiredKey]>> RetiredKeys<S> {
    /// Creates a quarantine without keys. All entries of the storage must be zero.
    #[must_use]
    pub const fn new(entries: S) -> Self {
        Self { entries, next: 0 }
    }

    /// Adds a key that was destroyed at `now_ms`.
    pub fn add(&mut self, key: u32, now_ms: u64) {
        let Some(entry) = self.entries.get_mut(self.next) else {
            return;
        };
        *entry = (key, now_ms);
        self.next = (self.next + 1) % self.entries.len();
    }

    /// Returns `true` if the key was destroyed within [`RETIRED_KEY_MS`] before `now_ms`.
    #[must_use]
    pub fn contains(&self, key: u32, now_ms: u64) -> bool {
        let is_retired = |&(retired, since_ms): &RetiredKey| {
            retired == key && now_ms.saturating_sub(since_ms) < RETIRED_KEY_MS
        };
        self.entries.iter().any(is_retired)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quarantine(entries: usize) -> RetiredKeys<Vec<RetiredKey>> {
        RetiredKeys::new(vec![(0, 0); entries])
    }

    #[test]
    fn destroyed_key_is_retired_for_60_s() {
        let mut keys = quarantine(4);
        keys.add(7, 1_000);
        assert!(keys.contains(7, 1_000));
        assert!(keys.contains(7, 60_999));
        assert!(!keys.contains(7, 61_000));
        assert!(!keys.contains(8, 1_000));
    }

    #[test]
    fn oldest_key_is_replaced_when_the_quarantine_is_full() {
        let mut keys = quarantine(2);
        for key in [1, 2, 3] {
            keys.add(key, 5);
        }
        assert_eq!(
            [1, 2, 3].map(|key| keys.contains(key, 6)),
            [false, true, true]
        );
    }

    #[test]
    fn key_destroyed_twice_is_retired_from_the_second_time() {
        let mut keys = quarantine(4);
        keys.add(7, 0);
        keys.add(7, 50_000);
        assert!(keys.contains(7, 109_999));
        assert!(!keys.contains(7, 110_000));
    }
}
