// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Model of an on-chip cache of the RNIC. It counts hits and misses, and holds no data.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::random::Random;

/// End marker of the list of slots in order of use.
const NONE: usize = usize::MAX;

/// Configuration of a cache.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct CacheConfig {
    /// Number of entries; with 0 entries, each look-up is a miss.
    pub entries: usize,
    /// Replacement policy.
    #[serde(default)]
    pub replacement: Replacement,
}

/// Replacement policy of a full cache.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Replacement {
    /// Evicts the least recently used entry.
    #[default]
    Lru,
    /// Evicts a random entry.
    Random,
}

/// Cache with its statistics.
#[derive(Clone, Debug)]
pub struct Cache {
    config: CacheConfig,
    hits: u64,
    misses: u64,
    places: HashMap<u64, usize>,
    slots: Vec<CacheSlot>,
    newest: usize,
    oldest: usize,
    random: Random,
}

/// Hits and misses of a cache.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Configuration of the cache.
    #[serde(flatten)]
    pub config: CacheConfig,
    /// Number of look-ups with a hit.
    pub hits: u64,
    /// Number of look-ups with a miss.
    pub misses: u64,
}

/// Entry in the list of slots in order of use.
#[derive(Clone, Debug)]
struct CacheSlot {
    key: u64,
    newer: usize,
    older: usize,
}

impl Cache {
    /// Returns an empty cache.
    pub fn new(config: CacheConfig) -> Self {
        Cache {
            config,
            hits: 0,
            misses: 0,
            places: HashMap::new(),
            slots: Vec::new(),
            newest: NONE,
            oldest: NONE,
            random: Random::new(0),
        }
    }

    /// Looks `key` up, and inserts it after a miss. Returns `true` for a hit.
    pub fn look_up(&mut self, key: u64) -> bool {
        let place = self.places.get(&key).copied();
        match place {
            Some(slot) if slot == self.newest => {}
            Some(slot) => {
                self.unlink(slot);
                self.link(slot);
            }
            None => self.insert(key),
        }
        match place {
            Some(_) => self.hits += 1,
            None => self.misses += 1,
        }
        place.is_some()
    }

    /// Returns the hits and misses so far.
    pub fn report(&self) -> Report {
        Report {
            config: self.config,
            hits: self.hits,
            misses: self.misses,
        }
    }

    fn insert(&mut self, key: u64) {
        if self.config.entries == 0 {
            return;
        }
        let slot = match self.slots.len() < self.config.entries {
            true => self.add_slot(),
            false => self.evict(),
        };
        self.slots[slot].key = key;
        self.places.insert(key, slot);
        self.link(slot);
    }

    fn add_slot(&mut self) -> usize {
        self.slots.push(CacheSlot {
            key: 0,
            newer: NONE,
            older: NONE,
        });
        self.slots.len() - 1
    }

    fn evict(&mut self) -> usize {
        let slot = match self.config.replacement {
            Replacement::Lru => self.oldest,
            Replacement::Random => self.random.below(self.slots.len() as u64) as usize,
        };
        self.unlink(slot);
        self.places.remove(&self.slots[slot].key);
        slot
    }

    fn link(&mut self, slot: usize) {
        self.slots[slot].newer = NONE;
        self.slots[slot].older = self.newest;
        match self.slots.get_mut(self.newest) {
            Some(second) => second.newer = slot,
            None => self.oldest = slot,
        }
        self.newest = slot;
    }

    fn unlink(&mut self, slot: usize) {
        let CacheSlot { newer, older, .. } = self.slots[slot];
        match self.slots.get_mut(newer) {
            Some(slot) => slot.older = older,
            None => self.newest = older,
        }
        match self.slots.get_mut(older) {
            Some(slot) => slot.newer = newer,
            None => self.oldest = newer,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(entries: usize, replacement: Replacement) -> Cache {
        Cache::new(CacheConfig {
            entries,
            replacement,
        })
    }

    #[test]
    fn lru_cache_evicts_least_recently_used_entry() {
        let mut cache = cache(3, Replacement::Lru);
        let found: Vec<bool> = [1, 2, 3, 1, 4, 2, 1, 4, 3]
            .map(|key| cache.look_up(key))
            .to_vec();
        let expected = [false, false, false, true, false, false, true, true, false];
        assert_eq!(found, expected);
        assert_eq!((cache.report().hits, cache.report().misses), (3, 6));
    }

    #[test]
    fn cyclic_use_misses_with_lru_and_hits_with_random_replacement() {
        let hits = |replacement| {
            let mut cache = cache(64, replacement);
            for round in 0..100 * 80 {
                cache.look_up(round % 80);
            }
            cache.report().hits
        };
        assert_eq!(hits(Replacement::Lru), 0);
        assert!(hits(Replacement::Random) > 1000);
    }

    #[test]
    fn cache_without_entries_always_misses() {
        let mut cache = cache(0, Replacement::Lru);
        assert!(![7, 7, 7].map(|key| cache.look_up(key)).contains(&true));
    }

    #[test]
    fn cache_of_one_entry_keeps_last_entry() {
        let mut cache = cache(1, Replacement::Lru);
        let found = [7, 7, 8, 8, 7].map(|key| cache.look_up(key));
        assert_eq!(found, [false, true, false, true, false]);
    }
}
