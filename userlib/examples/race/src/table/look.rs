// SPDX-License-Identifier: GPL-2.0 OR MIT
//! What a worker sees when it reads the two pairs of buckets in which a key may be.
//!
//! Words are read at different moments. One that is frozen stays so; thus if no word is frozen, the segment was in use
//! all the while.

use crate::hash::{Hash, Pair};
use crate::layout::{words, Header, Slot, BUCKET, BUCKET_WORDS, WORD};

/// Bytes of a pair.
pub(crate) const PAIR: usize = 2 * BUCKET as usize;

/// A slot, and where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Spot {
    pub(crate) place: u64,
    pub(crate) slot: Slot,
}

/// The buckets of a pair, the main one first.
#[derive(Debug)]
struct Half {
    buckets: [(u64, Vec<u64>); 2],
}

/// Result of a read.
#[derive(Debug)]
pub(crate) struct Look {
    halves: [Half; 2],
}

impl Half {
    fn new(place: u64, pair: Pair, bytes: &[u8]) -> Self {
        let words = words(bytes);
        let (one, two) = words.split_at(BUCKET_WORDS);
        let mut buckets = [(place, one.to_vec()), (place + BUCKET, two.to_vec())];
        if pair.is_turned() {
            buckets.reverse();
        }
        Self { buckets }
    }

    /// The main bucket's first.
    fn spots(&self) -> impl Iterator<Item = Spot> + '_ {
        self.buckets.iter().flat_map(|(place, words)| {
            let slots = words.iter().enumerate().skip(1);
            slots.map(move |(i, word)| Spot {
                place: place + (i * WORD) as u64,
                slot: Slot(*word),
            })
        })
    }

    fn vacancies(&self) -> usize {
        let vacant = |spot: &Spot| spot.slot.is_vacant();
        self.spots().filter(vacant).count()
    }
}

impl Look {
    /// Returns the lookup of a segment with the bytes of the pairs of a hash.
    pub(crate) fn new(segment: u64, pairs: [Pair; 2], bytes: &[[u8; PAIR]; 2]) -> Self {
        let half = |i: usize| Half::new(segment + pairs[i].offset(), pairs[i], &bytes[i]);
        Self {
            halves: [half(0), half(1)],
        }
    }

    fn headers(&self) -> impl Iterator<Item = Header> + '_ {
        let buckets = self.halves.iter().flat_map(|half| &half.buckets);
        buckets.map(|(_, words)| Header(words[0]))
    }

    /// All slots, each once: the pairs may share their overflow.
    pub(crate) fn spots(&self) -> Vec<Spot> {
        let mut spots: Vec<_> = self.halves.iter().flat_map(Half::spots).collect();
        spots.sort_by_key(|spot| spot.place);
        spots.dedup_by_key(|spot| spot.place);
        spots
    }

    /// Slots that may be of this key, in the table or not yet.
    pub(crate) fn like(&self, hash: Hash) -> Vec<Spot> {
        let mut spots = self.spots();
        spots
            .retain(|spot| spot.slot.block() != 0 && spot.slot.fingerprint() == hash.fingerprint());
        spots
    }

    /// Returns `true` if the segment is being split, or was split.
    pub(crate) fn is_frozen(&self) -> bool {
        let slots = || self.halves.iter().flat_map(Half::spots);
        self.headers().any(Header::is_frozen) || slots().any(|spot| spot.slot.is_frozen())
    }

    /// Returns `true` if the buckets are of this segment.
    pub(crate) fn is_of(&self, expected: Header) -> bool {
        self.headers().all(|header| header.thawed() == expected)
    }

    /// The vacancy to take: in the pair that has more of them, and there in the main bucket if it has one.
    pub(crate) fn vacancy(&self) -> Option<u64> {
        let [one, two] = &self.halves;
        let emptier = if one.vacancies() >= two.vacancies() {
            one
        } else {
            two
        };
        let mut spots = emptier.spots();
        spots
            .find(|spot| spot.slot.is_vacant())
            .map(|spot| spot.place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{bytes, empty_segment, low, segment_size};
    use proptest::prelude::*;

    const SEGMENT: u64 = 1 << 20;

    /// Returns the view of a segment for a key.
    fn look(groups: u32, key: &[u8], segment: &[u64]) -> Look {
        let segment = bytes(segment);
        let pairs = Hash::of(key).pairs(groups);
        let read = pairs.map(|pair| {
            let at = pair.offset() as usize;
            segment[at..at + PAIR].try_into().unwrap()
        });
        Look::new(SEGMENT, pairs, &read)
    }

    proptest! {
        #[test]
        fn vacancies_are_taken_until_there_are_none(key: Vec<u8>, groups in 1u32..8) {
            let mut segment = empty_segment(groups, 3, 5);
            let slots = look(groups, &key, &segment).spots().len();
            for taken in 0..slots {
                let look = look(groups, &key, &segment);
                prop_assert!(look.is_of(Header::new(3, 5)) && !look.is_frozen());
                prop_assert_eq!(look.like(Hash::of(&key)).len(), taken);
                let place = look.vacancy().unwrap() - SEGMENT;
                prop_assert!(place < segment_size(groups) && low(place, 6) != 0);
                let slot = Slot::new(Hash::of(&key).fingerprint(), 1, 64 * (1 + taken as u64));
                segment[place as usize / WORD] = slot.0;
            }
            prop_assert_eq!(look(groups, &key, &segment).vacancy(), None);
        }
    }

    #[test]
    fn one_frozen_word_is_enough() {
        let mut segment = empty_segment(1, 0, 0);
        segment[9] = Slot::VACANT.frozen().0;
        let keys = (0..100u32).map(|key| look(1, &key.to_le_bytes(), &segment));
        // All pairs of one group have its overflow.
        assert!(keys.into_iter().all(|look| look.is_frozen()));
    }
}
