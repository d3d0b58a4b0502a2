// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Operations of a worker on the table, by one-sided requests only.
//!
//! # Operation
//!
//! A search is one batch of two READs for the buckets, and one READ for the block. An insert or update writes a new
//! block and sets a slot to its address by compare-and-swap. Blocks and segments that a word has pointed to are not
//! written again, so a word never returns to an earlier value (no ABA).
//!
//! # Recovery
//!
//! There are no locks, so a worker that is killed does not block others. `split` and `change` describe unfinished
//! operations, and how other workers complete them.

mod allocator;
mod change;
mod check;
mod lookup;
mod split;

pub(crate) use check::Report;

use crate::block::{self, Block};
use crate::directory::{Directory, SegmentRef};
use crate::error::{Error, Result};
use crate::hash::Hash;
use crate::layout::{
    entry_addr, words, Entry, Header, Slot, DEPTH_MAX, MAGIC, ROOT_BYTES, ROOT_DEPTH, ROOT_GROUPS,
    ROOT_MAGIC, UNIT_BYTES, WORD_BYTES,
};
use crate::transport::{Request, Transport};
use allocator::Allocator;
use lookup::{Lookup, SlotRef, PAIR_BYTES};

/// Depth of the directory that the first read of the root includes; also the minimum depth of a read.
const DEPTH_READ: u32 = 6;

/// Maximum reads of the directory for one operation. Concurrent splits can make each of them inconsistent.
const REFRESHES_MAX: usize = 100;

/// Maximum bytes of the directory in one READ.
const READ_MAX_BYTES: usize = 16 << 10;

/// Table, opened by one worker.
pub(crate) struct Table<T> {
    transport: T,
    directory: Directory,
    groups: u32,
    allocator: Allocator,
}

/// Slot and block of a key.
struct Found {
    slot_ref: SlotRef,
    block: Block,
}

impl<T: Transport> Table<T> {
    /// Opens a table.
    ///
    /// # Errors
    /// - [`Error::Damaged`]: the memory has no table.
    /// - [`Error::Transport`]: the memory cannot be reached.
    pub(crate) fn open(transport: T) -> Result<Self> {
        let mut table = Self {
            directory: Directory::new(vec![Entry::NONE]),
            groups: 0,
            allocator: Allocator::new(transport.memories()),
            transport,
        };
        table.refresh()?;
        Ok(table)
    }

    /// Returns the value of a key, or `None` if the key is not in the table.
    ///
    /// A search does not wait for a split: the slots of a frozen segment are valid until the directory changes.
    ///
    /// # Errors
    /// - [`Error::Damaged`]: the table is inconsistent.
    /// - [`Error::Transport`]: the memory cannot be reached.
    pub(crate) fn search(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        let hash = Hash::of(key);
        loop {
            let (segment, lookup) = self.lookup(hash, None)?;
            if lookup.is_frozen() && self.has_moved(segment, hash)? {
                self.refresh()?;
                continue;
            }
            let found = self.find(&lookup, hash, key)?;
            return Ok(found.map(|found| found.block.value));
        }
    }

    /// Reads the two bucket pairs of a hash. Writes a block in the same batch, if there is one.
    fn lookup(&mut self, hash: Hash, write: Option<(u64, &[u8])>) -> Result<(SegmentRef, Lookup)> {
        let segment = self.segment(hash)?;
        let pairs = hash.pairs(self.groups);
        let mut read = [[0; PAIR_BYTES]; 2];
        let mut batch = Vec::with_capacity(3);
        batch.extend(write.map(|(addr, from)| Request::Write { addr, from }));
        batch.extend(lookup_requests(segment.entry.addr(), pairs, &mut read));
        self.transport.run(&mut batch)?;
        Ok((segment, self.decode_lookup(segment, hash, &read)?))
    }

    /// Decodes bucket pairs, and checks that they belong to the segment.
    fn decode_lookup(
        &self,
        segment: SegmentRef,
        hash: Hash,
        read: &[[u8; PAIR_BYTES]; 2],
    ) -> Result<Lookup> {
        let lookup = Lookup::new(segment.entry.addr(), hash.pairs(self.groups), read);
        match lookup.has_header(Header::new(segment.entry.depth(), segment.index)) {
            true => Ok(lookup),
            false => Err(Error::Damaged(format!(
                "a bucket does not belong to {segment:?}"
            ))),
        }
    }

    /// Returns slot and block of a key, or `None` if the key is not in the table.
    fn find(&mut self, lookup: &Lookup, hash: Hash, key: &[u8]) -> Result<Option<Found>> {
        for slot_ref in lookup.candidates(hash) {
            if slot_ref.slot.is_taken() {
                let block = self.read_block(slot_ref.slot)?;
                if block.key == key {
                    return Ok(Some(Found { slot_ref, block }));
                }
            }
        }
        Ok(None)
    }

    /// Reads the block of a slot.
    fn read_block(&mut self, slot: Slot) -> Result<Block> {
        let mut bytes = vec![0; usize::from(slot.units()) * UNIT_BYTES as usize];
        self.read(slot.block_addr(), &mut bytes)?;
        let damaged = || Error::Damaged(format!("no valid block at the address of {slot:x?}"));
        block::decode(&bytes).ok_or_else(damaged)
    }

    fn read(&mut self, addr: u64, into: &mut [u8]) -> Result<()> {
        Ok(self.transport.run(&mut [Request::Read { addr, into }])?)
    }

    fn read_word(&mut self, addr: u64) -> Result<u64> {
        let mut word = [0; WORD_BYTES];
        self.read(addr, &mut word)?;
        Ok(u64::from_le_bytes(word))
    }

    /// Replaces a word by `new` if it is `expected`. Returns the previous value.
    fn compare_swap(&mut self, addr: u64, expected: u64, new: u64) -> Result<u64> {
        let mut value = 0;
        let old_value = &mut value;
        let swap = Request::CompareSwap {
            addr,
            expected,
            new,
            old_value,
        };
        self.transport.run(&mut [swap])?;
        Ok(value)
    }

    /// Returns the segment of a hash by the copy of the directory. Reads the directory again while the copy is
    /// inconsistent.
    fn segment(&mut self, hash: Hash) -> Result<SegmentRef> {
        for _ in 0..REFRESHES_MAX {
            match self.directory.find(hash) {
                Some(segment) => return Ok(segment),
                None => self.refresh()?,
            }
        }
        let bits = hash.suffix(self.directory.depth());
        Err(Error::Damaged(format!(
            "the directory has no segment for {bits:#x}"
        )))
    }

    /// Returns `true` if the segment of a hash has changed.
    fn has_moved(&mut self, segment: SegmentRef, hash: Hash) -> Result<bool> {
        let (index, entry) = segment.witness(hash);
        Ok(self.read_word(entry_addr(index))? != entry.0)
    }

    /// Reads the root and the directory again.
    fn refresh(&mut self) -> Result<()> {
        let mut depth = self.directory.depth().max(DEPTH_READ);
        loop {
            let mut bytes = vec![0; ROOT_BYTES + (WORD_BYTES << depth)];
            for (i, piece) in bytes.chunks_mut(READ_MAX_BYTES).enumerate() {
                self.read((i * READ_MAX_BYTES) as u64, piece)?;
            }
            let current = self.decode_root(&words(&bytes[..ROOT_BYTES]))?;
            let entries = words(&bytes[ROOT_BYTES..]).into_iter().map(Entry);
            if current <= depth {
                self.directory = Directory::new(entries.take(1 << current).collect());
                return Ok(());
            }
            depth = current;
        }
    }

    /// Decodes the root. Returns the depth of the directory.
    fn decode_root(&mut self, root: &[u64]) -> Result<u32> {
        let word = |addr: u64| root[addr as usize / WORD_BYTES];
        if word(ROOT_MAGIC) != MAGIC || word(ROOT_DEPTH) > DEPTH_MAX.into() {
            return Err(Error::Damaged("the memory has no table".into()));
        }
        self.groups = word(ROOT_GROUPS) as u32;
        Ok(word(ROOT_DEPTH) as u32)
    }
}

/// Returns READs of the two bucket pairs of a key in a segment.
fn lookup_requests(
    segment: u64,
    pairs: [crate::hash::BucketPair; 2],
    read: &mut [[u8; PAIR_BYTES]; 2],
) -> impl Iterator<Item = Request<'_>> {
    let reads = pairs.into_iter().zip(read);
    reads.map(move |(pair, into)| Request::Read {
        addr: segment + pair.offset(),
        into,
    })
}
