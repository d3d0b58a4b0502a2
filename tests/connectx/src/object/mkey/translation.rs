// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Translation of addresses of a key into places in memory, along the keys that its table refers to.

use super::{find, Absent, Access, Klm, Mkey, MkeyFault, Mode, User, MTT, NULL};
use crate::object::table::Table;

/// Maximum number of keys in a chain of references.
pub(super) const DEPTH: u32 = 4;

/// Location of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Guest memory, at this bus address.
    Guest(u64),
    /// Memory on the device, at this offset.
    Memic(u64),
    /// Null memory.
    Null,
}

/// Contiguous bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Location of the first byte.
    pub place: Place,
    /// Number of bytes.
    pub length: u64,
}

/// Returns the pieces of `length` bytes at `address` of `key`, in order. `looked_up` is called for each entry that is
/// read, with the index of the key and that of the entry. If `length` is 0, the key is not checked.
pub fn translate(
    keys: &Table<Mkey>,
    key: u32,
    user: User,
    address: u64,
    length: u64,
    looked_up: &mut dyn FnMut(u32, u64),
) -> Result<Vec<Piece>, MkeyFault> {
    let mut walk = Walk {
        keys,
        looked_up,
        pieces: Vec::new(),
    };
    walk.key(key, user, address, length, DEPTH)?;
    Ok(walk.pieces)
}

struct Walk<'a> {
    keys: &'a Table<Mkey>,
    looked_up: &'a mut dyn FnMut(u32, u64),
    pieces: Vec<Piece>,
}

impl Walk<'_> {
    fn key(
        &mut self,
        number: u32,
        user: User,
        address: u64,
        length: u64,
        depth: u32,
    ) -> Result<(), MkeyFault> {
        if length == 0 {
            return Ok(());
        }
        if number == NULL && !user.access.is_remote() {
            self.add(Place::Null, length);
            return Ok(());
        }
        let depth = depth.checked_sub(1).ok_or(MkeyFault::Depth)?;
        let key = find(self.keys, number)?;
        key.check(user)?;
        let offset = key.offset(address, length)?;
        let behind = User {
            access: user.access.for_referenced_key(),
            ..user
        };
        match key.mode {
            Mode::Physical => self.add(Place::Guest(address), length),
            Mode::Memic => self.add(Place::Memic(key.memic_start().wrapping_add(offset)), length),
            Mode::Mtt => self.pages(number, key, user.access, offset, length)?,
            Mode::Ksm => self.equal(number >> 8, key, behind, offset, length, depth)?,
            Mode::Klm => self.ranges(number >> 8, key, behind, offset, length, depth)?,
        }
        Ok(())
    }

    /// Walks a table of pages. The first entry is the page of the key's start.
    fn pages(
        &mut self,
        number: u32,
        key: &Mkey,
        access: Access,
        offset: u64,
        length: u64,
    ) -> Result<(), MkeyFault> {
        let mut done = 0;
        for (page, within, here) in split(key, offset, length) {
            (self.looked_up)(number >> 8, page);
            let mut entry = [0; MTT];
            entry.copy_from_slice(key.entry(page)?);
            let entry = u64::from_be_bytes(entry);
            if entry & access.page_bit() == 0 {
                return Err(MkeyFault::Absent(Absent {
                    key: number,
                    address: key.start().wrapping_add(offset).wrapping_add(done),
                    length: length - done,
                }));
            }
            let start = entry >> key.log_page_size() << key.log_page_size();
            self.add(Place::Guest(start + within), here);
            done += here;
        }
        Ok(())
    }

    fn equal(
        &mut self,
        index: u32,
        key: &Mkey,
        user: User,
        offset: u64,
        length: u64,
        depth: u32,
    ) -> Result<(), MkeyFault> {
        for (page, within, length) in split(key, offset, length) {
            (self.looked_up)(index, page);
            let entry = Klm::decode(key.entry(page)?);
            self.key(
                entry.key,
                user,
                entry.address.wrapping_add(within),
                length,
                depth,
            )?;
        }
        Ok(())
    }

    fn ranges(
        &mut self,
        index: u32,
        key: &Mkey,
        user: User,
        offset: u64,
        length: u64,
        depth: u32,
    ) -> Result<(), MkeyFault> {
        if key.is_repeated() {
            return self.repeated(index, key, user, offset, length, depth);
        }
        let (mut at, mut left) = (offset, length);
        while left > 0 {
            let (number, skip, room) = key.range(at)?;
            let here = room.min(left);
            let number = number as u64;
            (self.looked_up)(index, number);
            let entry = Klm::decode(key.entry(number)?);
            let address = entry.address.wrapping_add(skip);
            self.key(entry.key, user, address, here, depth)?;
            left -= here;
            at += here;
        }
        Ok(())
    }

    /// Walks ranges that repeat. Each range advances by its stride in each repetition. The first entry has the number
    /// of ranges, their total length, and the number of repetitions.
    fn repeated(
        &mut self,
        index: u32,
        key: &Mkey,
        user: User,
        offset: u64,
        length: u64,
        depth: u32,
    ) -> Result<(), MkeyFault> {
        let head = Klm::decode(key.entry(0)?);
        let (per_turn, turns) = (u64::from(head.length), head.address >> 32);
        let end = offset.checked_add(length).ok_or(MkeyFault::Range)?;
        if per_turn == 0 || end > per_turn * turns {
            return Err(MkeyFault::Range);
        }
        let (mut at, mut left) = (offset, length);
        while left > 0 {
            let (turn, within) = (at / per_turn, at % per_turn);
            let (number, skip, room) = key.range(within)?;
            let here = room.min(per_turn - within).min(left);
            // The ranges follow the entry with the number of repetitions.
            let number = number as u64 + 1;
            (self.looked_up)(index, number);
            let entry = Klm::decode(key.entry(number)?);
            let stride = u64::from(entry.length >> 16);
            let address = entry.address.wrapping_add(turn * stride).wrapping_add(skip);
            self.key(entry.key, user, address, here, depth)?;
            left -= here;
            at += here;
        }
        Ok(())
    }

    /// Adds a piece. Extends the last piece if the new piece directly follows.
    fn add(&mut self, place: Place, length: u64) {
        if let Some(last) = self.pieces.last_mut() {
            let goes_on = match (last.place, place) {
                (Place::Guest(last_at), Place::Guest(at)) => {
                    last_at.wrapping_add(last.length) == at
                }
                (Place::Memic(last_at), Place::Memic(at)) => {
                    last_at.wrapping_add(last.length) == at
                }
                (Place::Null, Place::Null) => true,
                _ => false,
            };
            if goes_on {
                last.length += length;
                return;
            }
        }
        self.pieces.push(Piece { place, length });
    }
}

/// Returns the pages of the bytes: for each page the index of its entry, the offset of the bytes in the page, and their
/// number.
fn split(key: &Mkey, offset: u64, length: u64) -> impl Iterator<Item = (u64, u64, u64)> {
    let log = key.log_page_size();
    let size = 1u64 << log;
    let mut at = (key.start() & (size - 1)).wrapping_add(offset);
    let mut left = length;
    std::iter::from_fn(move || {
        let here = (size - (at & (size - 1))).min(left);
        let item = (at >> log, at & (size - 1), here);
        at = at.wrapping_add(here);
        left -= here;
        (here > 0).then_some(item)
    })
}
