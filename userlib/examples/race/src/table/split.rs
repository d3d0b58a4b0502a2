// SPDX-License-Identifier: GPL-2.0 OR MIT
//! A segment without a vacancy is split: two new ones take its place, each for the keys of one bit more.
//!
//! First, compare-and-swap freezes every word of the segment. A frozen word never changes, and the frozen words
//! determine both halves, so all workers make the same halves. The halves are written to unused memory, and become
//! part of the table by a compare-and-swap of the directory for each. Until then searches use the frozen segment.
//!
//! There is no lock. Other workers wait for some time for the worker that froze the header first. If it was killed or
//! is slow, they do the same split. The first compare-and-swap takes effect.

use crate::directory::Home;
use crate::error::{Error, Result};
use crate::hash::Hash;
use crate::layout::{
    bytes, entry_place, segment_size, words, Entry, Header, Slot, BUCKET_WORDS, DEPTH_MAX,
    ROOT_DEPTH, WORD,
};
use crate::transport::{Request, Transport, BATCH};

use super::Table;

/// Polls of a split before a worker does it itself: several times the duration of a split, which needs a batch for
/// each 32 slots, and another for each 32 keys.
const LOOKS: usize = 100;

impl<T: Transport> Table<T> {
    /// Splits a segment, or waits until another worker has.
    ///
    /// # Errors
    /// [`Error::Full`], [`Error::Damaged`], [`Error::Lost`].
    pub(super) fn split(&mut self, home: Home, hash: Hash) -> Result<()> {
        if home.entry.depth() == DEPTH_MAX {
            return Err(Error::Full);
        }
        // Nothing freezes for which there is no room elsewhere.
        self.reserve()?;
        let header = Header::new(home.entry.depth(), home.index);
        let place = home.entry.segment();
        match self.compare_swap(place, header.0, header.frozen().0)? == header.0 {
            true => self.divide(home),
            false => self.await_split(home, hash),
        }
    }

    /// Waits until the segment of a hash is another.
    pub(super) fn await_split(&mut self, home: Home, hash: Hash) -> Result<()> {
        for _ in 0..LOOKS {
            if self.has_moved(home, hash)? {
                return self.refresh();
            }
        }
        self.divide(home)
    }

    /// Makes two segments of one.
    fn divide(&mut self, home: Home) -> Result<()> {
        let old = self.freeze(home)?;
        let bits = self.next_bits(home, &old)?;
        let halves = halves(&old, &bits, home);
        let from = &bytes(&halves.concat());
        self.reserve()?;
        let place = self.room.reserve.take().ok_or(Error::Full)?;
        self.transport.run(&mut [Request::Write { place, from }])?;
        let depth = home.entry.depth() + 1;
        self.deepen(depth.into())?;
        // The order matters: a worker that finds the first half in the directory also finds the other.
        let other = Entry::new(depth, place + segment_size(self.groups));
        self.compare_swap(entry_place(home.sibling()), Entry::NONE.0, other.0)?;
        let first = Entry::new(depth, place);
        self.compare_swap(entry_place(home.index), home.entry.0, first.0)?;
        self.refresh()
    }

    /// Freezes all words of a segment, and returns them.
    fn freeze(&mut self, home: Home) -> Result<Vec<u64>> {
        let place = home.entry.segment();
        let mut read = vec![0; segment_size(self.groups) as usize];
        self.read(place, &mut read)?;
        let mut words = words(&read);
        let mut liquid: Vec<usize> = (0..words.len()).collect();
        loop {
            liquid.retain(|&i| words[i] != frozen(i, words[i]));
            if liquid.is_empty() {
                return Ok(words);
            }
            for some in liquid.chunks(BATCH) {
                self.freeze_some(place, &mut words, some)?;
            }
        }
    }

    /// Tries to freeze some words of a segment, and takes note of what they are now.
    fn freeze_some(&mut self, segment: u64, words: &mut [u64], some: &[usize]) -> Result<()> {
        let mut were = [0; BATCH];
        let swaps = some
            .iter()
            .zip(&mut were)
            .map(|(&i, found)| Request::CompareSwap {
                place: segment + (i * WORD) as u64,
                expected: words[i],
                new: frozen(i, words[i]),
                found,
            });
        self.transport.run(&mut swaps.collect::<Vec<_>>())?;
        for (&i, was) in some.iter().zip(were) {
            words[i] = match was == words[i] {
                true => frozen(i, was),
                false => was,
            };
        }
        Ok(())
    }

    /// Returns, for each word of a frozen segment that is the slot of a key, the bit that selects its half.
    fn next_bits(&mut self, home: Home, words: &[u64]) -> Result<Vec<bool>> {
        let mut bits = vec![false; words.len()];
        let taken = (0..words.len()).filter(|&i| is_key(i, words[i]));
        for some in taken.collect::<Vec<_>>().chunks(BATCH) {
            let mut hashes = [[0; WORD]; BATCH];
            let reads = some
                .iter()
                .zip(&mut hashes)
                .map(|(&i, into)| Request::Read {
                    place: Slot(words[i]).block(),
                    into,
                });
            self.transport.run(&mut reads.collect::<Vec<_>>())?;
            for (&i, hash) in some.iter().zip(hashes) {
                bits[i] = (u64::from_le_bytes(hash) >> home.entry.depth()) & 1 == 1;
            }
        }
        Ok(bits)
    }

    /// Has the directory look at so many bits at least.
    fn deepen(&mut self, depth: u64) -> Result<()> {
        let mut now = u64::from(self.directory.depth());
        while now < depth {
            let was = self.compare_swap(ROOT_DEPTH, now, depth)?;
            now = if was == now { depth } else { was };
        }
        Ok(())
    }
}

/// Returns `true` if a word of a segment is the slot of a key in the table.
fn is_key(i: usize, word: u64) -> bool {
    i % BUCKET_WORDS != 0 && Slot(word).is_taken()
}

/// Returns the frozen form of a word of a segment.
fn frozen(i: usize, word: u64) -> u64 {
    match i % BUCKET_WORDS {
        0 => Header(word).frozen().0,
        _ => Slot(word).frozen().0,
    }
}

/// The halves of a frozen segment: each key goes to that of its bit, and stays in its slot.
fn halves(old: &[u64], bits: &[bool], home: Home) -> [Vec<u64>; 2] {
    let depth = home.entry.depth() + 1;
    let half = |bit, suffix| {
        let word = |(i, &word): (usize, &u64)| match i % BUCKET_WORDS {
            0 => Header::new(depth, suffix).0,
            _ if is_key(i, word) && bits[i] == bit => Slot(word).thawed().0,
            _ => Slot::VACANT.0,
        };
        old.iter().enumerate().map(word).collect()
    };
    [half(false, home.index), half(true, home.sibling())]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::empty_segment;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn each_key_is_in_one_half_where_it_was(
            keys in prop::collection::vec((any::<bool>(), any::<bool>(), 1u64..1 << 20), 24),
            depth in 0..DEPTH_MAX,
        ) {
            let home = Home { index: 0, entry: Entry::new(depth, 64) };
            let mut old = empty_segment(1, depth, 0);
            for (i, (taken, _, block)) in keys.iter().enumerate().filter(|(i, _)| i % 8 != 0) {
                let slot = Slot::new(7, 1, block * 64);
                old[i] = if *taken { slot } else { slot.tentative() }.0;
            }
            let old: Vec<_> = old.iter().enumerate().map(|(i, word)| frozen(i, *word)).collect();
            let bits: Vec<_> = keys.iter().map(|(_, bit, _)| *bit).collect();
            let [low, high] = halves(&old, &bits, home);
            for i in 0..24 {
                let [low, high] = [low[i], high[i]];
                if i % 8 == 0 {
                    prop_assert_eq!(low, Header::new(depth + 1, 0).0);
                    prop_assert_eq!(high, Header::new(depth + 1, 1 << depth).0);
                    continue;
                }
                let (taken, bit, block) = keys[i];
                let expected = if taken { Slot::new(7, 1, block * 64).0 } else { 0 };
                prop_assert_eq!((low, high), if bit { (0, expected) } else { (expected, 0) });
            }
        }
    }
}
