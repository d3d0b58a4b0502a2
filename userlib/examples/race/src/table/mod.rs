// SPDX-License-Identifier: GPL-2.0 OR MIT
//! A worker's hold on the table: all operations, each by one-sided requests alone.
//!
//! A search is one batch of two READs, and then one READ for the block. What changes the table writes a block of its
//! own and points a slot to it by compare-and-swap. Nothing that was pointed to is written again, so a word that has
//! changed never becomes what it was.
//!
//! No operation takes a lock, so a killed worker delays no other. `split` and `change` describe unfinished operations,
//! and how others complete them.

mod change;
mod check;
mod look;
mod room;
mod split;

pub(crate) use check::Report;

use crate::block::{self, Block};
use crate::directory::{Directory, Home};
use crate::error::{Error, Result};
use crate::hash::Hash;
use crate::layout::{
    entry_place, words, Entry, Header, Slot, DEPTH_MAX, MAGIC, ROOT, ROOT_DEPTH, ROOT_GROUPS,
    ROOT_MAGIC, UNIT, WORD,
};
use crate::transport::{Request, Transport};
use look::{Look, Spot, PAIR};
use room::Room;

/// Entries of the directory that are read with the root, as a power of two; also the minimum depth.
const DEPTH_READ: u32 = 6;

/// Maximum reads of the directory for one operation. A segment may have split before each.
const READINGS: usize = 100;

/// Most bytes of the directory in one READ.
const PIECE: usize = 16 << 10;

/// The table, as one worker sees it.
pub(crate) struct Table<T> {
    transport: T,
    directory: Directory,
    groups: u32,
    room: Room,
}

/// A slot of a key, and its block.
struct Found {
    spot: Spot,
    block: Block,
}

impl<T: Transport> Table<T> {
    /// Opens a table.
    ///
    /// # Errors
    /// [`Error::Damaged`] if there is none, [`Error::Lost`].
    pub(crate) fn open(transport: T) -> Result<Self> {
        let mut table = Self {
            directory: Directory::new(vec![Entry::NONE]),
            groups: 0,
            room: Room::new(transport.memories()),
            transport,
        };
        table.refresh()?;
        Ok(table)
    }

    /// The value of a key, if it is in the table.
    ///
    /// A search never waits: the slots of a segment that splits are valid until the directory changes.
    ///
    /// # Errors
    /// [`Error::Damaged`], [`Error::Lost`].
    pub(crate) fn search(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        let hash = Hash::of(key);
        loop {
            let (home, look) = self.look(hash, None)?;
            if look.is_frozen() && self.has_moved(home, hash)? {
                self.refresh()?;
                continue;
            }
            let found = self.find(&look, hash, key)?;
            return Ok(found.map(|found| found.block.value));
        }
    }

    /// Reads the two pairs of buckets of a hash, after it has written a block if there is one to write.
    fn look(&mut self, hash: Hash, write: Option<(u64, &[u8])>) -> Result<(Home, Look)> {
        let home = self.home(hash)?;
        let (segment, pairs) = (home.entry.segment(), hash.pairs(self.groups));
        let mut read = [[0; PAIR]; 2];
        let mut batch = Vec::with_capacity(3);
        batch.extend(write.map(|(place, from)| Request::Write { place, from }));
        batch.extend(look_requests(segment, pairs, &mut read));
        self.transport.run(&mut batch)?;
        Ok((home, self.seen(home, hash, &read)?))
    }

    fn seen(&self, home: Home, hash: Hash, read: &[[u8; PAIR]; 2]) -> Result<Look> {
        let look = Look::new(home.entry.segment(), hash.pairs(self.groups), read);
        match look.is_of(Header::new(home.entry.depth(), home.index)) {
            true => Ok(look),
            false => Err(Error::Damaged(format!("a bucket that is not of {home:?}"))),
        }
    }

    /// The slot of a key that is in the table.
    fn find(&mut self, look: &Look, hash: Hash, key: &[u8]) -> Result<Option<Found>> {
        for spot in look.like(hash) {
            if spot.slot.is_taken() {
                let block = self.block(spot.slot)?;
                if block.key == key {
                    return Ok(Some(Found { spot, block }));
                }
            }
        }
        Ok(None)
    }

    /// Reads what a slot points to.
    fn block(&mut self, slot: Slot) -> Result<Block> {
        let mut bytes = vec![0; usize::from(slot.units()) * UNIT as usize];
        self.read(slot.block(), &mut bytes)?;
        let damaged = || Error::Damaged(format!("no block is where {slot:x?} points"));
        block::decode(&bytes).ok_or_else(damaged)
    }

    fn read(&mut self, place: u64, into: &mut [u8]) -> Result<()> {
        Ok(self.transport.run(&mut [Request::Read { place, into }])?)
    }

    fn read_word(&mut self, place: u64) -> Result<u64> {
        let mut word = [0; WORD];
        self.read(place, &mut word)?;
        Ok(u64::from_le_bytes(word))
    }

    /// Makes a word `new` if it is `expected`, and returns what it was.
    fn compare_swap(&mut self, place: u64, expected: u64, new: u64) -> Result<u64> {
        let mut was = 0;
        let found = &mut was;
        let swap = Request::CompareSwap {
            place,
            expected,
            new,
            found,
        };
        self.transport.run(&mut [swap])?;
        Ok(was)
    }

    /// The segment of a hash, as far as this worker knows.
    fn home(&mut self, hash: Hash) -> Result<Home> {
        for _ in 0..READINGS {
            match self.directory.find(hash) {
                Some(home) => return Ok(home),
                None => self.refresh()?,
            }
        }
        let bits = hash.suffix(self.directory.depth());
        Err(Error::Damaged(format!(
            "the directory leads {bits:#x} nowhere"
        )))
    }

    /// Returns `true` if the segment of a hash has changed.
    fn has_moved(&mut self, home: Home, hash: Hash) -> Result<bool> {
        let (index, entry) = home.witness(hash);
        Ok(self.read_word(entry_place(index))? != entry.0)
    }

    /// Reads the root and the directory again.
    fn refresh(&mut self) -> Result<()> {
        let mut depth = self.directory.depth().max(DEPTH_READ);
        loop {
            let mut bytes = vec![0; ROOT + (WORD << depth)];
            for (i, piece) in bytes.chunks_mut(PIECE).enumerate() {
                self.read((i * PIECE) as u64, piece)?;
            }
            let now = self.accept(&words(&bytes[..ROOT]))?;
            let entries = words(&bytes[ROOT..]).into_iter().map(Entry);
            if now <= depth {
                self.directory = Directory::new(entries.take(1 << now).collect());
                return Ok(());
            }
            depth = now;
        }
    }

    /// Decodes the root, and returns the depth of the directory.
    fn accept(&mut self, root: &[u64]) -> Result<u32> {
        let word = |place: u64| root[place as usize / WORD];
        if word(ROOT_MAGIC) != MAGIC || word(ROOT_DEPTH) > DEPTH_MAX.into() {
            return Err(Error::Damaged("no table is there".into()));
        }
        self.groups = word(ROOT_GROUPS) as u32;
        Ok(word(ROOT_DEPTH) as u32)
    }
}

fn look_requests(
    segment: u64,
    pairs: [crate::hash::Pair; 2],
    read: &mut [[u8; PAIR]; 2],
) -> impl Iterator<Item = Request<'_>> {
    let reads = pairs.into_iter().zip(read);
    reads.map(move |(pair, into)| Request::Read {
        place: segment + pair.offset(),
        into,
    })
}
