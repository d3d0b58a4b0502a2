// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Position of a key: the parts of its hash for the directory, for a slot, and within a segment.
//!
//! These are different bits. So a key has the same two places in every segment, and those of a segment that splits stay
//! where they are in its halves.

use xxhash_rust::xxh3::xxh3_128;

use crate::layout::{low, BUCKET, GROUP_BUCKETS};

/// The hash of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hash {
    /// Part in blocks: the lowest bits are for the directory, the highest for slots.
    pub(crate) bits: u64,
    /// Part that selects the buckets.
    choice: u64,
}

impl Hash {
    pub(crate) fn of(key: &[u8]) -> Self {
        let hash = xxh3_128(key);
        Self {
            bits: hash as u64,
            choice: (hash >> 64) as u64,
        }
    }

    /// The bits that the directory looks at.
    pub(crate) fn suffix(self, depth: u32) -> u64 {
        low(self.bits, depth)
    }

    pub(crate) fn fingerprint(self) -> u8 {
        (self.bits >> 56) as u8
    }

    /// Its two pairs of a main bucket and an overflow, which are different.
    pub(crate) fn pairs(self, groups: u32) -> [Pair; 2] {
        let count = groups * 2;
        let first = (self.choice as u32) % count;
        let others = ((self.choice >> 32) as u32) % (count - 1);
        [Pair(first), Pair((first + 1 + others) % count)]
    }
}

/// A main bucket and the overflow beside it. Of a group, the main bucket of even pairs is before, that of odd ones
/// behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pair(u32);

impl Pair {
    /// Where it begins in its segment.
    pub(crate) fn offset(self) -> u64 {
        let bucket = self.0 / 2 * GROUP_BUCKETS + self.0 % 2;
        u64::from(bucket) * BUCKET
    }

    /// Returns `true` if the second bucket is the main one.
    pub(crate) fn is_turned(self) -> bool {
        self.0 % 2 == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::segment_size;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_key_has_two_pairs_in_its_segment(key: Vec<u8>, groups in 1u32..40) {
            let [one, two] = Hash::of(&key).pairs(groups);
            prop_assert_ne!(one, two);
            for pair in [one, two] {
                prop_assert!(pair.offset() + 2 * BUCKET <= segment_size(groups));
                let overflow = pair.offset() + if pair.is_turned() { 0 } else { BUCKET };
                prop_assert_eq!(overflow / BUCKET % 3, 1);
            }
        }
    }

    #[test]
    fn keys_are_spread_over_all_pairs() {
        let mut counts = [0; 8];
        for key in 0..8000u32 {
            for pair in Hash::of(&key.to_le_bytes()).pairs(4) {
                counts[pair.0 as usize] += 1;
            }
        }
        assert!(
            counts.iter().all(|count| (1700..2300).contains(count)),
            "{counts:?}"
        );
    }
}
