// SPDX-License-Identifier: GPL-2.0 OR MIT
//! A worker's copy of the directory, which leads from the lowest bits of a hash to a segment.
//!
//! An entry without a segment stands for the one whose number lacks its highest bit: its half was never split off. So
//! to double the directory takes one word, how many bits it looks at, and nothing is copied; and a split adds one entry
//! and changes one. The copy may be older than the directory: then it leads to a segment that is frozen.

use crate::hash::Hash;
use crate::layout::{low, Entry};

/// The copy.
#[derive(Debug)]
pub(crate) struct Directory {
    entries: Vec<Entry>,
}

/// A segment, and where the directory has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Home {
    /// The number of the entry, and the bits of a hash that lead there.
    pub(crate) index: u64,
    /// Content of the entry.
    pub(crate) entry: Entry,
}

impl Directory {
    /// Returns the directory of entries that were read. Their number is a power of two.
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

    /// Where keys of this hash are; none if the entries do not fit each other, as they were read while a segment split.
    pub(crate) fn find(&self, hash: Hash) -> Option<Home> {
        self.find_index(hash.suffix(self.depth()))
    }

    /// Where keys are whose hashes end in these bits.
    pub(crate) fn find_index(&self, bits: u64) -> Option<Home> {
        let mut index = bits;
        while self.entries[index as usize] == Entry::NONE {
            index &= !(1 << index.checked_ilog2()?);
        }
        let entry = self.entries[index as usize];
        // How deep it is may have been read before an entry, and that after a split.
        let fits = entry.depth() <= self.depth() && low(bits, entry.depth()) == index;
        fits.then_some(Home { index, entry })
    }
}

impl Home {
    /// The entry that its other half will have.
    pub(crate) fn sibling(self) -> u64 {
        self.index | (1 << self.entry.depth())
    }

    /// Returns the position of the entry that proves that the segment of a hash is still this one, and its expected
    /// content.
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
    use crate::layout::UNIT;
    use proptest::prelude::*;

    /// Splits what these hashes lead to, one after the other, as far as the directory reaches.
    fn grown(depth: u32, splits: &[u64]) -> (Directory, u64) {
        let mut directory = Directory::new(vec![Entry::NONE; 1 << depth]);
        let mut segments = 1;
        directory.entries[0] = Entry::new(0, UNIT);
        for bits in splits {
            let home = directory.find_index(low(*bits, depth)).unwrap();
            let below = home.entry.depth() + 1;
            if below > depth {
                continue;
            }
            directory.entries[home.sibling() as usize] = Entry::new(below, (segments + 1) * UNIT);
            directory.entries[home.index as usize] = Entry::new(below, (segments + 2) * UNIT);
            segments += 2;
        }
        (directory, segments)
    }

    proptest! {
        #[test]
        fn every_hash_leads_to_one_segment(splits in prop::collection::vec(any::<u64>(), 0..60)) {
            let (directory, _) = grown(6, &splits);
            for bits in 0..64 {
                let home = directory.find_index(bits).unwrap();
                prop_assert_eq!(low(bits, home.entry.depth()), home.index);
            }
        }

        #[test]
        fn a_deeper_copy_leads_to_the_same(splits in prop::collection::vec(any::<u64>(), 0..10)) {
            let (directory, _) = grown(4, &splits);
            let mut deeper = directory.entries.clone();
            deeper.resize(64, Entry::NONE);
            let deeper = Directory::new(deeper);
            for bits in 0..64 {
                prop_assert_eq!(deeper.find_index(bits), directory.find_index(low(bits, 4)));
            }
        }
    }

    #[test]
    fn a_copy_of_half_a_split_is_noticed() {
        let old = Entry::new(0, UNIT);
        let half = Directory::new(vec![old, Entry::new(1, 2 * UNIT)]);
        assert_eq!(half.find_index(0).unwrap().entry, old);
        let other_half = Directory::new(vec![Entry::new(1, 3 * UNIT), Entry::NONE]);
        assert_eq!(other_half.find_index(1), None);
        assert!(other_half.find_index(0).is_some());
        let deeper_than_it_says = Directory::new(vec![Entry::new(1, 3 * UNIT)]);
        assert_eq!(deeper_than_it_says.find_index(0), None);
    }
}
