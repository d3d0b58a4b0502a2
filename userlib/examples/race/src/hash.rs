// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Hash of a key. Different bits select the segment, the fingerprint in the slot, and the buckets in the segment.
//!
//! So a key has the same two bucket pairs in every segment, and keeps its slot when its segment is split.

use xxhash_rust::xxh3::xxh3_128;

use crate::layout::{low, BUCKET_BYTES, GROUP_BUCKETS};

/// Hash of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hash {
    /// Part that blocks contain. The lowest bits are for the directory, the highest eight for slots.
    pub(crate) bits: u64,
    /// Part that selects the buckets.
    bucket_bits: u64,
}

impl Hash {
    pub(crate) fn of(key: &[u8]) -> Self {
        let hash = xxh3_128(key);
        Self {
            bits: hash as u64,
            bucket_bits: (hash >> 64) as u64,
        }
    }

    /// Returns the bits that a directory of this depth uses.
    pub(crate) fn suffix(self, depth: u32) -> u64 {
        low(self.bits, depth)
    }

    pub(crate) fn fingerprint(self) -> u8 {
        (self.bits >> 56) as u8
    }

    /// Returns the two bucket pairs of the key, which are different.
    pub(crate) fn pairs(self, groups: u32) -> [BucketPair; 2] {
        let count = groups * 2;
        let first = (self.bucket_bits as u32) % count;
        let distance = ((self.bucket_bits >> 32) as u32) % (count - 1);
        [
            BucketPair(first),
            BucketPair((first + 1 + distance) % count),
        ]
    }
}

/// Bucket pair: a main bucket and the adjacent overflow bucket. The main bucket is the first one of even pairs, and the
/// second one of odd pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BucketPair(u32);

impl BucketPair {
    /// Returns the offset in the segment.
    pub(crate) fn offset(self) -> u64 {
        let bucket = self.0 / 2 * GROUP_BUCKETS + self.0 % 2;
        u64::from(bucket) * BUCKET_BYTES
    }

    /// Returns `true` if the second bucket is the main one.
    pub(crate) fn is_main_second(self) -> bool {
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
        fn key_has_two_different_pairs_with_an_overflow_bucket(key: Vec<u8>, groups in 1u32..40) {
            let [one, two] = Hash::of(&key).pairs(groups);
            prop_assert_ne!(one, two);
            for pair in [one, two] {
                prop_assert!(pair.offset() + 2 * BUCKET_BYTES <= segment_size(groups));
                let overflow = pair.offset() + if pair.is_main_second() { 0 } else { BUCKET_BYTES };
                prop_assert_eq!(overflow / BUCKET_BYTES % 3, 1);
            }
        }
    }

    #[test]
    fn keys_are_spread_evenly_over_all_pairs() {
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
