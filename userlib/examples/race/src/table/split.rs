// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Split of a full segment into two new segments, which the next bit of the hash selects.
//!
//! # Operation
//!
//! First, compare-and-swap freezes every word of the segment. A frozen word never changes, and the frozen words
//! determine both halves, so all workers make the same halves. The halves are written to unused memory, and become
//! part of the table by a compare-and-swap of the directory for each. Until then searches use the frozen segment.
//!
//! # Recovery
//!
//! There is no lock. Other workers poll at most [`SPLIT_POLLS`] times for the split by the worker that froze the header
//! first. If this worker was killed or is slow, they execute the same split. The first compare-and-swap takes effect.

use crate::directory::SegmentRef;
use crate::error::{Error, Result};
use crate::hash::Hash;
use crate::layout::{
    bytes, entry_addr, segment_size, words, Entry, Header, Slot, BUCKET_WORDS, DEPTH_MAX,
    ROOT_DEPTH, WORD_BYTES,
};
use crate::transport::{Request, Transport, BATCH_MAX};

use super::Table;

/// Polls of a split before a worker executes it itself: several times the duration of a split, which has a batch for
/// each 32 slots, and another for each 32 keys.
const SPLIT_POLLS: usize = 100;

impl<T: Transport> Table<T> {
    /// Splits a segment, or waits until another worker has.
    ///
    /// # Errors
    /// - [`Error::Full`]: no memory for the halves, or the directory has its maximum depth.
    /// - [`Error::Damaged`], [`Error::Transport`]: see [`search`](Self::search).
    pub(super) fn split(&mut self, segment: SegmentRef, hash: Hash) -> Result<()> {
        if segment.entry.depth() == DEPTH_MAX {
            return Err(Error::Full);
        }
        // A segment is frozen only if there is memory for its halves.
        self.reserve()?;
        let header = Header::new(segment.entry.depth(), segment.index);
        let addr = segment.entry.addr();
        match self.compare_swap(addr, header.0, header.frozen().0)? == header.0 {
            true => self.execute_split(segment),
            false => self.await_split(segment, hash),
        }
    }

    /// Waits until the segment of a hash was split. Executes the split itself after [`SPLIT_POLLS`] polls.
    pub(super) fn await_split(&mut self, segment: SegmentRef, hash: Hash) -> Result<()> {
        for _ in 0..SPLIT_POLLS {
            if self.has_moved(segment, hash)? {
                return self.refresh();
            }
        }
        self.execute_split(segment)
    }

    /// Freezes a segment, writes its halves, and adds them to the directory.
    fn execute_split(&mut self, segment: SegmentRef) -> Result<()> {
        let old = self.freeze(segment)?;
        let bits = self.next_bits(segment, &old)?;
        let halves = halves(&old, &bits, segment);
        let from = &bytes(&halves.concat());
        self.reserve()?;
        let addr = self.allocator.reserve.take().ok_or(Error::Full)?;
        self.transport.run(&mut [Request::Write { addr, from }])?;
        let depth = segment.entry.depth() + 1;
        self.deepen(depth.into())?;
        // The order matters: a worker that finds the first half in the directory also finds the other.
        let other = Entry::new(depth, addr + segment_size(self.groups));
        self.compare_swap(entry_addr(segment.sibling()), Entry::NONE.0, other.0)?;
        let first = Entry::new(depth, addr);
        self.compare_swap(entry_addr(segment.index), segment.entry.0, first.0)?;
        self.refresh()
    }

    /// Freezes all words of a segment. Returns the frozen words.
    fn freeze(&mut self, segment: SegmentRef) -> Result<Vec<u64>> {
        let addr = segment.entry.addr();
        let mut read = vec![0; segment_size(self.groups) as usize];
        self.read(addr, &mut read)?;
        let mut words = words(&read);
        let mut unfrozen: Vec<usize> = (0..words.len()).collect();
        loop {
            unfrozen.retain(|&i| words[i] != frozen(i, words[i]));
            if unfrozen.is_empty() {
                return Ok(words);
            }
            for batch in unfrozen.chunks(BATCH_MAX) {
                self.try_freeze(addr, &mut words, batch)?;
            }
        }
    }

    /// Tries to freeze words of a segment, at most [`BATCH_MAX`]. Updates `words` with their values.
    fn try_freeze(&mut self, segment: u64, words: &mut [u64], batch: &[usize]) -> Result<()> {
        let mut old_values = [0; BATCH_MAX];
        let swaps = batch
            .iter()
            .zip(&mut old_values)
            .map(|(&i, old_value)| Request::CompareSwap {
                addr: segment + (i * WORD_BYTES) as u64,
                expected: words[i],
                new: frozen(i, words[i]),
                old_value,
            });
        self.transport.run(&mut swaps.collect::<Vec<_>>())?;
        for (&i, old_value) in batch.iter().zip(old_values) {
            words[i] = match old_value == words[i] {
                true => frozen(i, old_value),
                false => old_value,
            };
        }
        Ok(())
    }

    /// Returns, for each word of a frozen segment that is the slot of a key, the bit that selects its half.
    fn next_bits(&mut self, segment: SegmentRef, words: &[u64]) -> Result<Vec<bool>> {
        let mut bits = vec![false; words.len()];
        let taken = (0..words.len()).filter(|&i| is_key(i, words[i]));
        for batch in taken.collect::<Vec<_>>().chunks(BATCH_MAX) {
            let mut hashes = [[0; WORD_BYTES]; BATCH_MAX];
            let reads = batch
                .iter()
                .zip(&mut hashes)
                .map(|(&i, into)| Request::Read {
                    addr: Slot(words[i]).block_addr(),
                    into,
                });
            self.transport.run(&mut reads.collect::<Vec<_>>())?;
            for (&i, hash) in batch.iter().zip(hashes) {
                bits[i] = (u64::from_le_bytes(hash) >> segment.entry.depth()) & 1 == 1;
            }
        }
        Ok(bits)
    }

    /// Increases the depth of the directory to at least `depth`.
    fn deepen(&mut self, depth: u64) -> Result<()> {
        let mut current = u64::from(self.directory.depth());
        while current < depth {
            let old_value = self.compare_swap(ROOT_DEPTH, current, depth)?;
            current = if old_value == current {
                depth
            } else {
                old_value
            };
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

/// Returns the halves of a frozen segment. The bit of a key selects its half, where it has the same slot.
fn halves(old: &[u64], bits: &[bool], segment: SegmentRef) -> [Vec<u64>; 2] {
    let depth = segment.entry.depth() + 1;
    let half = |bit, suffix| {
        let word = |(i, &word): (usize, &u64)| match i % BUCKET_WORDS {
            0 => Header::new(depth, suffix).0,
            _ if is_key(i, word) && bits[i] == bit => Slot(word).thawed().0,
            _ => Slot::VACANT.0,
        };
        old.iter().enumerate().map(word).collect()
    };
    [half(false, segment.index), half(true, segment.sibling())]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::empty_segment;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn key_of_a_split_segment_keeps_its_slot_in_one_half(
            keys in prop::collection::vec((any::<bool>(), any::<bool>(), 1u64..1 << 20), 24),
            depth in 0..DEPTH_MAX,
        ) {
            let segment = SegmentRef { index: 0, entry: Entry::new(depth, 64) };
            let mut old = empty_segment(1, depth, 0);
            for (i, (taken, _, block)) in keys.iter().enumerate().filter(|(i, _)| i % 8 != 0) {
                let slot = Slot::new(7, 1, block * 64);
                old[i] = if *taken { slot } else { slot.tentative() }.0;
            }
            let old: Vec<_> = old.iter().enumerate().map(|(i, word)| frozen(i, *word)).collect();
            let bits: Vec<_> = keys.iter().map(|(_, bit, _)| *bit).collect();
            let [low, high] = halves(&old, &bits, segment);
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
