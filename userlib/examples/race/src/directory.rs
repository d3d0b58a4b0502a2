// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Copy of the directory of a worker. The directory maps the lowest bits of a hash to a segment.
//!
//! An empty entry stands for the entry whose index lacks the highest bit: their segment was not split. So doubling the
//! directory changes one word, the depth, and copies no entry. A split adds one entry and changes one. An outdated copy
//! returns a segment that is frozen.

use crate::hash::Hash;
use crate::layout::{low, Entry};

/// Directory.
#[derive(Debug)]
pub(crate) struct Directory {
    entries: Vec<Entry>,
}

/// Segment and its entry in the directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SegmentRef {
    /// Index of the entry: the hash suffix of the segment.
    pub(crate) index: u64,
    /// Content of the entry.
    pub(crate) entry: Entry,
}

impl Directory {
    /// Returns a directory with these entries. Their number is a power of two.
    pub(crate) fn new(entries: Vec<Entry>) -> Self {
        debug_assert!(entries.len().is_power_of_two());
        Self { entries }
    }

    /// Returns the number of hash bits that it uses.
    pub(crate) fn depth(&self) -> u32 {
        self.entries.len().ilog2()
    }

    pub(crate) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Returns the segment of a hash, or `None` if the entries are inconsistent: they were read during a split.
    pub(crate) fn find(&self, hash: Hash) -> Option<SegmentRef> {
        self.find_index(hash.suffix(self.depth()))
    }

    /// Returns the segment of a hash suffix, with as many bits as the depth.
    pub(crate) fn find_index(&self, bits: u64) -> Option<SegmentRef> {
        let mut index = bits;
        while self.entries[index as usize] == Entry::NONE {
            index &= !(1 << index.checked_ilog2()?);
        }
        let entry = self.entries[index as usize];
        // The depth may have been read before a split, and the entry after it.
        let fits = entry.depth() <= self.depth() && low(bits, entry.depth()) == index;
        fits.then_some(SegmentRef { index, entry })
    }
}

impl SegmentRef {
    /// Returns the index of the entry that a split adds.
    pub(crate) fn sibling(self) -> u64 {
        self.index | (1 << self.entry.depth())
    }

    /// Returns index and expected content of an entry that changes when the segment of a hash is split.
    pub(crate) fn witness(self, hash: Hash) -> (u64, Entry) {
        let index = hash.suffix(self.entry.depth() + 1);
        match index == self.index {
            true => (index, self.entry),
            false => (index, Entry::NONE),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::UNIT_BYTES;
    use proptest::prelude::*;

    /// Splits the segments of these hashes one after the other, up to the depth of the directory. Returns the directory
    /// and the number of segments.
    fn split_directory(depth: u32, splits: &[u64]) -> (Directory, u64) {
        let mut directory = Directory::new(vec![Entry::NONE; 1 << depth]);
        let mut segments = 1;
        directory.entries[0] = Entry::new(0, UNIT_BYTES);
        for bits in splits {
            let segment = directory.find_index(low(*bits, depth)).unwrap();
            let new_depth = segment.entry.depth() + 1;
            if new_depth > depth {
                continue;
            }
            directory.entries[segment.sibling() as usize] =
                Entry::new(new_depth, (segments + 1) * UNIT_BYTES);
            directory.entries[segment.index as usize] =
                Entry::new(new_depth, (segments + 2) * UNIT_BYTES);
            segments += 2;
        }
        (directory, segments)
    }

    proptest! {
        #[test]
        fn every_suffix_has_a_segment_with_its_low_bits(splits in prop::collection::vec(any::<u64>(), 0..60)) {
            let (directory, _) = split_directory(6, &splits);
            for bits in 0..64 {
                let segment = directory.find_index(bits).unwrap();
                prop_assert_eq!(low(bits, segment.entry.depth()), segment.index);
            }
        }

        #[test]
        fn doubled_directory_finds_the_same_segments(splits in prop::collection::vec(any::<u64>(), 0..10)) {
            let (directory, _) = split_directory(4, &splits);
            let mut deeper = directory.entries.clone();
            deeper.resize(64, Entry::NONE);
            let deeper = Directory::new(deeper);
            for bits in 0..64 {
                prop_assert_eq!(deeper.find_index(bits), directory.find_index(low(bits, 4)));
            }
        }
    }

    #[test]
    fn inconsistent_entries_return_none() {
        let old = Entry::new(0, UNIT_BYTES);
        let half = Directory::new(vec![old, Entry::new(1, 2 * UNIT_BYTES)]);
        assert_eq!(half.find_index(0).unwrap().entry, old);
        let other_half = Directory::new(vec![Entry::new(1, 3 * UNIT_BYTES), Entry::NONE]);
        assert_eq!(other_half.find_index(1), None);
        assert!(other_half.find_index(0).is_some());
        let with_outdated_depth = Directory::new(vec![Entry::new(1, 3 * UNIT_BYTES)]);
        assert_eq!(with_outdated_depth.find_index(0), None);
    }
}
