// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Snapshot of the two bucket pairs of a key.
//!
//! The words are read at different times. A frozen word stays frozen, and a segment is replaced only when all its words
//! are frozen. So if no word is frozen, the segment was in use during the whole read.

use crate::hash::{BucketPair, Hash};
use crate::layout::{words, Header, Slot, BUCKET_BYTES, BUCKET_WORDS, WORD_BYTES};

/// Bytes of a bucket pair.
pub(crate) const PAIR_BYTES: usize = 2 * BUCKET_BYTES as usize;

/// Slot and its address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotRef {
    pub(crate) addr: u64,
    pub(crate) slot: Slot,
}

/// Addresses and words of the buckets of a pair, the main bucket first.
#[derive(Debug)]
struct PairBuckets {
    buckets: [(u64, Vec<u64>); 2],
}

/// Content of both bucket pairs.
#[derive(Debug)]
pub(crate) struct Lookup {
    pairs: [PairBuckets; 2],
}

impl PairBuckets {
    fn new(addr: u64, pair: BucketPair, bytes: &[u8]) -> Self {
        let words = words(bytes);
        let (one, two) = words.split_at(BUCKET_WORDS);
        let mut buckets = [(addr, one.to_vec()), (addr + BUCKET_BYTES, two.to_vec())];
        if pair.is_main_second() {
            buckets.reverse();
        }
        Self { buckets }
    }

    /// Returns the slots, those of the main bucket first.
    fn slots(&self) -> impl Iterator<Item = SlotRef> + '_ {
        self.buckets.iter().flat_map(|(addr, words)| {
            let slots = words.iter().enumerate().skip(1);
            slots.map(move |(i, word)| SlotRef {
                addr: addr + (i * WORD_BYTES) as u64,
                slot: Slot(*word),
            })
        })
    }

    fn vacancy_count(&self) -> usize {
        let vacant = |slot_ref: &SlotRef| slot_ref.slot.is_vacant();
        self.slots().filter(vacant).count()
    }
}

impl Lookup {
    /// Decodes the bytes of the bucket pairs of a hash, in the segment at an address.
    pub(crate) fn new(segment: u64, pairs: [BucketPair; 2], bytes: &[[u8; PAIR_BYTES]; 2]) -> Self {
        let pair = |i: usize| PairBuckets::new(segment + pairs[i].offset(), pairs[i], &bytes[i]);
        Self {
            pairs: [pair(0), pair(1)],
        }
    }

    fn headers(&self) -> impl Iterator<Item = Header> + '_ {
        let buckets = self.pairs.iter().flat_map(|pair| &pair.buckets);
        buckets.map(|(_, words)| Header(words[0]))
    }

    /// Returns all slots, each once: both pairs may have the same overflow bucket.
    pub(crate) fn slots(&self) -> Vec<SlotRef> {
        let mut slots: Vec<_> = self.pairs.iter().flat_map(PairBuckets::slots).collect();
        slots.sort_by_key(|slot_ref| slot_ref.addr);
        slots.dedup_by_key(|slot_ref| slot_ref.addr);
        slots
    }

    /// Returns the slots with the fingerprint of a hash, tentative ones included.
    pub(crate) fn candidates(&self, hash: Hash) -> Vec<SlotRef> {
        let mut slots = self.slots();
        slots.retain(|SlotRef { slot, .. }| {
            slot.block_addr() != 0 && slot.fingerprint() == hash.fingerprint()
        });
        slots
    }

    /// Returns `true` if the segment is being split, or was split.
    pub(crate) fn is_frozen(&self) -> bool {
        let slots = || self.pairs.iter().flat_map(PairBuckets::slots);
        self.headers().any(Header::is_frozen) || slots().any(|slot_ref| slot_ref.slot.is_frozen())
    }

    /// Returns `true` if all buckets belong to the segment with this header.
    pub(crate) fn has_header(&self, expected: Header) -> bool {
        self.headers().all(|header| header.thawed() == expected)
    }

    /// Returns the address of the vacant slot for an insert: in the pair with more vacant slots, preferably in its main
    /// bucket.
    pub(crate) fn pick_vacancy(&self) -> Option<u64> {
        let [one, two] = &self.pairs;
        let emptier = if one.vacancy_count() >= two.vacancy_count() {
            one
        } else {
            two
        };
        let mut slots = emptier.slots();
        slots
            .find(|slot_ref| slot_ref.slot.is_vacant())
            .map(|slot_ref| slot_ref.addr)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{bytes, empty_segment, low, segment_size};
    use proptest::prelude::*;

    const SEGMENT: u64 = 1 << 20;

    /// Returns the lookup of a key in a segment.
    fn lookup(groups: u32, key: &[u8], segment: &[u64]) -> Lookup {
        let segment = bytes(segment);
        let pairs = Hash::of(key).pairs(groups);
        let read = pairs.map(|pair| {
            let at = pair.offset() as usize;
            segment[at..at + PAIR_BYTES].try_into().unwrap()
        });
        Lookup::new(SEGMENT, pairs, &read)
    }

    proptest! {
        #[test]
        fn vacant_slots_are_picked_until_the_pairs_are_full(key: Vec<u8>, groups in 1u32..8) {
            let mut segment = empty_segment(groups, 3, 5);
            let slots = lookup(groups, &key, &segment).slots().len();
            for taken in 0..slots {
                let lookup = lookup(groups, &key, &segment);
                prop_assert!(lookup.has_header(Header::new(3, 5)) && !lookup.is_frozen());
                prop_assert_eq!(lookup.candidates(Hash::of(&key)).len(), taken);
                let addr = lookup.pick_vacancy().unwrap() - SEGMENT;
                prop_assert!(addr < segment_size(groups) && low(addr, 6) != 0);
                let slot = Slot::new(Hash::of(&key).fingerprint(), 1, 64 * (1 + taken as u64));
                segment[addr as usize / WORD_BYTES] = slot.0;
            }
            prop_assert_eq!(lookup(groups, &key, &segment).pick_vacancy(), None);
        }
    }

    #[test]
    fn lookup_with_one_frozen_word_is_frozen() {
        let mut segment = empty_segment(1, 0, 0);
        segment[9] = Slot::VACANT.frozen().0;
        let keys = (0..100u32).map(|key| lookup(1, &key.to_le_bytes(), &segment));
        // All pairs of one group have the same overflow bucket.
        assert!(keys.into_iter().all(|lookup| lookup.is_frozen()));
    }
}
