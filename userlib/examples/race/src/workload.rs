// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Workload: keys with a skewed popularity, and values that identify their key.

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use rand_distr::{Distribution, Zipf};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

/// Skew of the popularity of keys, as in YCSB.
const SKEW: f64 = 0.99;

/// Bytes of a value.
const VALUE_BYTES: usize = 40;

/// Key, by owner and number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    /// Number of a worker, or 0 for a shared key.
    pub(crate) owner: u32,
    pub(crate) number: u32,
}

impl Key {
    pub(crate) fn bytes(self) -> [u8; 8] {
        let mut key = [0; 8];
        key[..4].copy_from_slice(&self.owner.to_le_bytes());
        key[4..].copy_from_slice(&self.number.to_le_bytes());
        key
    }

    pub(crate) fn from_bytes(key: &[u8]) -> Option<Self> {
        let (owner, number) = (key.get(..4)?, key.get(4..)?);
        Some(Self {
            owner: u32::from_le_bytes(owner.try_into().ok()?),
            number: u32::from_le_bytes(number.try_into().ok()?),
        })
    }

    /// Returns a value, which is unique for key and version.
    pub(crate) fn value(self, version: u64) -> Vec<u8> {
        let mut value = version.to_le_bytes().to_vec();
        value.extend(self.bytes());
        value.resize(VALUE_BYTES, version as u8);
        value
    }

    /// Returns `true` if the bytes are a value of this key.
    pub(crate) fn has_value(self, value: &[u8]) -> bool {
        let version = value.get(..8).and_then(|version| version.try_into().ok());
        version.is_some_and(|version| self.value(u64::from_le_bytes(version)) == value)
    }
}

/// Digest of a set of keys and values, which does not depend on their order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Digest {
    pub(crate) keys: u64,
    /// Sum of the hashes of keys and values, modulo 2⁶⁴.
    pub(crate) sum: u64,
}

impl Digest {
    pub(crate) fn add(&mut self, key: &[u8], value: &[u8]) {
        self.keys += 1;
        self.sum = self.sum.wrapping_add(xxh3_64(&[key, value].concat()));
    }
}

/// Random choice of keys and operations.
pub(crate) struct KeyChooser {
    rng: SmallRng,
    zipf: Zipf<f64>,
}

impl KeyChooser {
    /// Chooses among `keys` keys, at least 1.
    pub(crate) fn new(keys: u32, seed: u64) -> Self {
        Self {
            rng: SmallRng::seed_from_u64(seed),
            zipf: Zipf::new(keys.into(), SKEW)
                .expect("the number of keys is at least 1, and the skew is finite"),
        }
    }

    /// Returns the number of a key. Low numbers are popular.
    pub(crate) fn next_key(&mut self) -> u32 {
        self.zipf.sample(&mut self.rng) as u32 - 1
    }

    /// Returns `true` with a probability in percent, 0 … 100.
    pub(crate) fn chance(&mut self, percent: u32) -> bool {
        self.rng.random_ratio(percent, 100)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn value_is_recognized_for_its_key_only() {
        let key = Key {
            owner: 3,
            number: 7,
        };
        assert_eq!(Key::from_bytes(&key.bytes()), Some(key));
        assert!(key.has_value(&key.value(5)));
        assert!(!Key {
            owner: 3,
            number: 8
        }
        .has_value(&key.value(5)));
        assert!(!key.has_value(&[]));
        assert_eq!(Key::from_bytes(&[1; 7]), None);
    }

    #[test]
    fn digest_does_not_depend_on_the_order() {
        let (mut one, mut two) = (Digest::default(), Digest::default());
        one.add(b"a", b"1");
        one.add(b"b", b"2");
        two.add(b"b", b"2");
        assert_ne!(one, two);
        two.add(b"a", b"1");
        assert_eq!(one, two);
    }

    #[test]
    fn key_choice_is_skewed() {
        let mut chooser = KeyChooser::new(1000, 1);
        let mut counts = vec![0; 1000];
        for _ in 0..10_000 {
            counts[chooser.next_key() as usize] += 1;
        }
        assert!(
            counts[0] > 1000 && counts[0] > 5 * counts[10],
            "{:?}",
            &counts[..12]
        );
    }
}
