// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Inserts, updates and deletes.
//!
//! # Operation
//!
//! Two workers may insert the same key into different slots. A new slot is therefore tentative. Its worker reads all
//! slots of the key again, clears tentative slots of other workers, and completes its own slot if no other slot has the
//! key. A worker with a cleared slot notices when it completes the slot, and retries. At least one of two workers sees
//! the slot of the other, so never both inserts succeed. Two workers could clear the slots of each other forever only
//! in lockstep.
//!
//! # Recovery
//!
//! The next insert of the key, or the next split, clears the tentative slot of a worker that was killed. A segment that
//! is being split does not change: workers wait for the split, and after 100 polls execute it themselves.

use crate::block;
use crate::directory::SegmentRef;
use crate::error::{Error, Result};
use crate::hash::Hash;
use crate::layout::{Slot, UNIT_BYTES};
use crate::transport::{Request, Transport};

use super::lookup::{Lookup, PAIR_BYTES};
use super::{lookup_requests, Table};

/// Key and block of an insert or update.
struct NewBlock<'a> {
    hash: Hash,
    key: &'a [u8],
    slot: Slot,
    addr: u64,
    bytes: Vec<u8>,
}

/// Result of an attempt to insert.
enum ChangeOutcome {
    Done,
    Exists,
    /// Another worker has changed the slot first.
    Retry,
}

impl<T: Transport> Table<T> {
    /// Adds a key.
    ///
    /// # Errors
    /// - [`Error::Exists`]: the key is in the table.
    /// - [`Error::TooLong`]: key and value exceed the maximum of a block.
    /// - [`Error::Full`]: no memory for the block or for a split.
    /// - [`Error::Damaged`], [`Error::Transport`]: see [`search`](Self::search).
    pub(crate) fn insert(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        let new = self.new_block(key, value)?;
        let (mut write, mut is_published) = (Some((new.addr, &new.bytes[..])), false);
        loop {
            let (segment, lookup) = self.lookup(new.hash, write.take())?;
            if lookup.is_frozen() {
                self.await_split(segment, new.hash)?;
            } else if self.find(&lookup, new.hash, key)?.is_some() {
                if !is_published {
                    self.undo_alloc(&new);
                }
                return Err(Error::Exists);
            } else if let Some(addr) = lookup.pick_vacancy() {
                // Other workers may read the block from here on.
                is_published = true;
                match self.claim_slot(segment, addr, &new)? {
                    ChangeOutcome::Done => return Ok(()),
                    ChangeOutcome::Exists => return Err(Error::Exists),
                    ChangeOutcome::Retry => (),
                }
            } else {
                self.split(segment, new.hash)?;
            }
        }
    }

    /// Changes the value of a key.
    ///
    /// # Errors
    /// - [`Error::NotFound`]: the key is not in the table.
    /// - [`Error::TooLong`]: key and value exceed the maximum of a block.
    /// - [`Error::Full`]: no memory for the block or for a split.
    /// - [`Error::Damaged`], [`Error::Transport`]: see [`search`](Self::search).
    pub(crate) fn update(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        let new = self.new_block(key, value)?;
        let result = self.replace(key, new.slot, Some((new.addr, &new.bytes)));
        // If the key is not in the table, no slot has pointed to the block.
        if matches!(result, Err(Error::NotFound)) {
            self.undo_alloc(&new);
        }
        result
    }

    /// Removes a key.
    ///
    /// # Errors
    /// - [`Error::NotFound`]: the key is not in the table.
    /// - [`Error::Full`]: the segment of the key is being split, and there is no memory for the split.
    /// - [`Error::Damaged`], [`Error::Transport`]: see [`search`](Self::search).
    pub(crate) fn delete(&mut self, key: &[u8]) -> Result<()> {
        self.replace(key, Slot::VACANT, None)
    }

    fn new_block<'a>(&mut self, key: &'a [u8], value: &[u8]) -> Result<NewBlock<'a>> {
        let bytes = block::encode(key, value).ok_or(Error::TooLong)?;
        let (hash, addr) = (Hash::of(key), self.allocate(bytes.len() as u64)?);
        let units = (bytes.len() as u64 / UNIT_BYTES) as u8;
        let slot = Slot::new(hash.fingerprint(), units, addr);
        Ok(NewBlock {
            hash,
            key,
            slot,
            addr,
            bytes,
        })
    }

    /// Frees the memory of a block that no slot has pointed to.
    fn undo_alloc(&mut self, new: &NewBlock<'_>) {
        self.allocator.undo_alloc(new.addr, new.bytes.len() as u64);
    }

    /// Replaces the slot of a key by `new`, after the write of its block.
    fn replace(&mut self, key: &[u8], new: Slot, block: Option<(u64, &[u8])>) -> Result<()> {
        let (hash, mut write) = (Hash::of(key), block);
        loop {
            let (segment, lookup) = self.lookup(hash, write.take())?;
            if lookup.is_frozen() {
                self.await_split(segment, hash)?;
                continue;
            }
            let found = self.find(&lookup, hash, key)?;
            let slot_ref = found.ok_or(Error::NotFound)?.slot_ref;
            if self.swap(slot_ref.addr, slot_ref.slot, new)? {
                return Ok(());
            }
        }
    }

    /// Replaces a slot if it is `expected`. Returns `true` on success.
    fn swap(&mut self, addr: u64, expected: Slot, new: Slot) -> Result<bool> {
        Ok(self.compare_swap(addr, expected.0, new.0)? == expected.0)
    }

    /// Inserts into a vacant slot, unless another slot has the key.
    fn claim_slot(
        &mut self,
        segment: SegmentRef,
        addr: u64,
        new: &NewBlock<'_>,
    ) -> Result<ChangeOutcome> {
        let tentative = new.slot.tentative();
        let Some(lookup) = self.claim_and_look_up(segment, addr, new)? else {
            return Ok(ChangeOutcome::Retry);
        };
        let outcome = self.clear_rivals(&lookup, addr, new)?;
        let final_slot = match outcome {
            ChangeOutcome::Done => new.slot,
            ChangeOutcome::Exists | ChangeOutcome::Retry => Slot::VACANT,
        };
        match self.swap(addr, tentative, final_slot)? {
            true => Ok(outcome),
            // Only this worker completes the slot, so another worker has cleared it.
            false if matches!(outcome, ChangeOutcome::Exists) => Ok(outcome),
            false => Ok(ChangeOutcome::Retry),
        }
    }

    /// Sets a vacant slot to the tentative one, and reads all slots of the key in the same batch. Returns `None` if the
    /// slot was no longer vacant.
    fn claim_and_look_up(
        &mut self,
        segment: SegmentRef,
        addr: u64,
        new: &NewBlock<'_>,
    ) -> Result<Option<Lookup>> {
        let (mut old_value, mut read) = (0, [[0; PAIR_BYTES]; 2]);
        let mut batch = vec![Request::CompareSwap {
            addr,
            expected: Slot::VACANT.0,
            new: new.slot.tentative().0,
            old_value: &mut old_value,
        }];
        let pairs = new.hash.pairs(self.groups);
        batch.extend(lookup_requests(segment.entry.addr(), pairs, &mut read));
        self.transport.run(&mut batch)?;
        drop(batch);
        let lookup = self.decode_lookup(segment, new.hash, &read)?;
        Ok(Slot(old_value).is_vacant().then_some(lookup))
    }

    /// Clears the tentative slots of other workers with the same key.
    fn clear_rivals(
        &mut self,
        lookup: &Lookup,
        own: u64,
        new: &NewBlock<'_>,
    ) -> Result<ChangeOutcome> {
        for rival in lookup.candidates(new.hash) {
            if rival.addr == own || self.read_block(rival.slot)?.key != new.key {
                continue;
            }
            if rival.slot.is_taken() {
                return Ok(ChangeOutcome::Exists);
            }
            if !self.swap(rival.addr, rival.slot, Slot::VACANT)? {
                return Ok(ChangeOutcome::Retry);
            }
        }
        Ok(ChangeOutcome::Done)
    }
}
