// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Inserts, updates and deletes.
//!
//! Two workers may insert the same key, each into another slot. So a slot is tentative at first; its worker looks at all
//! slots of the key again, and takes the mark off only if no other has the key. Tentative slots of others it empties:
//! these find that out when they take off their mark, and begin again. That also clears up after a worker that ended in
//! between. Of two, at least one sees the other, so never do both stay; that they empty each other's slots again and
//! again would take two workers that go on in step.
//!
//! A segment that splits does not change. A worker that wants to change it waits for the split, and finally does the
//! split itself.

use crate::block;
use crate::directory::Home;
use crate::error::{Error, Result};
use crate::hash::Hash;
use crate::layout::{Slot, UNIT};
use crate::transport::{Request, Transport};

use super::look::{Look, PAIR};
use super::{look_requests, Table};

/// A key and its value, in a block that no slot points to yet.
struct New<'a> {
    hash: Hash,
    key: &'a [u8],
    slot: Slot,
    place: u64,
    bytes: Vec<u8>,
}

/// Result of an attempt.
enum Outcome {
    Done,
    Exists,
    /// Another was faster.
    Again,
}

impl<T: Transport> Table<T> {
    /// Adds a key.
    ///
    /// # Errors
    /// [`Error::Exists`], [`Error::TooLong`], [`Error::Full`], [`Error::Damaged`], [`Error::Lost`].
    pub(crate) fn insert(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        let new = self.new_block(key, value)?;
        let (mut write, mut is_shown) = (Some((new.place, &new.bytes[..])), false);
        loop {
            let (home, look) = self.look(new.hash, write.take())?;
            if look.is_frozen() {
                self.await_split(home, new.hash)?;
            } else if self.find(&look, new.hash, key)?.is_some() {
                if !is_shown {
                    self.give_back(&new);
                }
                return Err(Error::Exists);
            } else if let Some(place) = look.vacancy() {
                // From here on others may have seen the block.
                is_shown = true;
                match self.claim(home, place, &new)? {
                    Outcome::Done => return Ok(()),
                    Outcome::Exists => return Err(Error::Exists),
                    Outcome::Again => (),
                }
            } else {
                self.split(home, new.hash)?;
            }
        }
    }

    /// Changes the value of a key.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::TooLong`], [`Error::Full`], [`Error::Damaged`], [`Error::Lost`].
    pub(crate) fn update(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        let new = self.new_block(key, value)?;
        let done = self.replace(key, new.slot, Some((new.place, &new.bytes)));
        // A block that a slot points to belongs to a key that is in the table.
        if matches!(done, Err(Error::NotFound)) {
            self.give_back(&new);
        }
        done
    }

    /// Removes a key.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Full`] (its segment splits, and there is no memory for that),
    /// [`Error::Damaged`], [`Error::Lost`].
    pub(crate) fn delete(&mut self, key: &[u8]) -> Result<()> {
        self.replace(key, Slot::VACANT, None)
    }

    fn new_block<'a>(&mut self, key: &'a [u8], value: &[u8]) -> Result<New<'a>> {
        let bytes = block::encode(key, value).ok_or(Error::TooLong)?;
        let (hash, place) = (Hash::of(key), self.allocate(bytes.len() as u64)?);
        let units = (bytes.len() as u64 / UNIT) as u8;
        let slot = Slot::new(hash.fingerprint(), units, place);
        Ok(New {
            hash,
            key,
            slot,
            place,
            bytes,
        })
    }

    /// Takes back the memory of a block that no slot ever pointed to.
    fn give_back(&mut self, new: &New<'_>) {
        self.room.give_back(new.place, new.bytes.len() as u64);
    }

    /// Makes the slot of a key another, once a block is written.
    fn replace(&mut self, key: &[u8], new: Slot, block: Option<(u64, &[u8])>) -> Result<()> {
        let (hash, mut write) = (Hash::of(key), block);
        loop {
            let (home, look) = self.look(hash, write.take())?;
            if look.is_frozen() {
                self.await_split(home, hash)?;
                continue;
            }
            let found = self.find(&look, hash, key)?;
            let spot = found.ok_or(Error::NotFound)?.spot;
            if self.swap(spot.place, spot.slot, new)? {
                return Ok(());
            }
        }
    }

    fn swap(&mut self, place: u64, expected: Slot, new: Slot) -> Result<bool> {
        Ok(self.compare_swap(place, expected.0, new.0)? == expected.0)
    }

    /// Takes a vacancy, if there is no other slot of the key by then.
    fn claim(&mut self, home: Home, place: u64, new: &New<'_>) -> Result<Outcome> {
        let tentative = new.slot.tentative();
        let Some(look) = self.place_and_look(home, place, new)? else {
            return Ok(Outcome::Again);
        };
        let outcome = self.oust(&look, place, new)?;
        let settled = match outcome {
            Outcome::Done => new.slot,
            Outcome::Exists | Outcome::Again => Slot::VACANT,
        };
        match self.swap(place, tentative, settled)? {
            true => Ok(outcome),
            // Only its own worker completes a tentative slot, so it was removed.
            false if matches!(outcome, Outcome::Exists) => Ok(outcome),
            false => Ok(Outcome::Again),
        }
    }

    /// Places a tentative slot, and then looks at all that the key may have; nothing if another took the vacancy.
    fn place_and_look(&mut self, home: Home, place: u64, new: &New<'_>) -> Result<Option<Look>> {
        let (mut was, mut read) = (0, [[0; PAIR]; 2]);
        let mut batch = vec![Request::CompareSwap {
            place,
            expected: Slot::VACANT.0,
            new: new.slot.tentative().0,
            found: &mut was,
        }];
        let pairs = new.hash.pairs(self.groups);
        batch.extend(look_requests(home.entry.segment(), pairs, &mut read));
        self.transport.run(&mut batch)?;
        drop(batch);
        let look = self.seen(home, new.hash, &read)?;
        Ok((Slot(was).is_vacant()).then_some(look))
    }

    /// Empties tentative slots that others have for the same key.
    fn oust(&mut self, look: &Look, own: u64, new: &New<'_>) -> Result<Outcome> {
        for rival in look.like(new.hash) {
            if rival.place == own || self.block(rival.slot)?.key != new.key {
                continue;
            }
            if rival.slot.is_taken() {
                return Ok(Outcome::Exists);
            }
            if !self.swap(rival.place, rival.slot, Slot::VACANT)? {
                return Ok(Outcome::Again);
            }
        }
        Ok(Outcome::Done)
    }
}
