// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Memory keys: their memory, their rights, and the translation of addresses.
//!
//! A key has a context (`mkc`) and a translation table, both in the format of the driver. A UMR work request replaces
//! parts of either, and QUERY_MKEY returns them without conversion. A table holds page addresses (MTT), ranges of other
//! keys (KLM), or equal pages of other keys (KSM).

mod access;
#[cfg(test)]
mod tests;
mod translation;

use std::cell::RefCell;

use crate::layout::{get, get64, set, size};
use crate::object::memic;
use crate::object::table::Table;

pub use access::{Absent, Access, MkeyFault, User};
pub use translation::{translate, Piece, Place};

/// Null key, whose memory reads as zeros and discards writes.
pub const NULL: u32 = 0x200;
/// Key of a data segment that ends the list of segments.
pub const END_OF_LIST: u32 = 0x100;
/// First index of keys that the driver creates. Lower indices are reserved.
pub const FIRST: u32 = 0x10;

/// Size of an entry of a table of pages, in bytes.
pub const MTT: usize = 8;
/// Size of an entry of a table of ranges or pages of keys, in bytes.
pub const KLM: usize = 16;
/// Unit in which the driver counts the size of a table, in bytes.
pub const OCTOWORD: usize = 16;

/// Bits of the entry of a page: readable and writable. If the bit of an access is clear, the page is absent.
pub const PRESENT: u64 = READABLE | WRITABLE;
const READABLE: u64 = 1;
const WRITABLE: u64 = 2;
/// Key in the first entry of a table of repeated ranges. The entry has the number of repetitions; the ranges have
/// strides.
const REPEATED: u32 = 0x400;

/// Type of a key's memory: the access mode of its context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Addresses are bus addresses.
    Physical,
    /// Pages.
    Mtt,
    /// Ranges of other keys.
    Klm,
    /// Equal pages of other keys.
    Ksm,
    /// Memory on the device.
    Memic,
}

impl Mode {
    /// Returns the mode of a context. Returns `None` if the mode is not supported.
    pub fn of(context: &[u8]) -> Option<Mode> {
        let (high, low) = (
            get!(context, mkc, access_mode_4_2),
            get!(context, mkc, access_mode_1_0),
        );
        match (high << 2) | low {
            0 => Some(Mode::Physical),
            1 => Some(Mode::Mtt),
            2 => Some(Mode::Klm),
            3 => Some(Mode::Ksm),
            5 => Some(Mode::Memic),
            _ => None,
        }
    }

    /// Returns the size of an entry of the table in bytes; 0 without a table.
    pub fn entry(self) -> usize {
        match self {
            Mode::Mtt => MTT,
            Mode::Klm | Mode::Ksm => KLM,
            Mode::Physical | Mode::Memic => 0,
        }
    }
}

/// A memory key.
#[derive(Clone, Debug)]
pub struct Mkey {
    /// The context.
    pub context: [u8; size!(mkc)],
    /// Type of the memory, which never changes.
    pub mode: Mode,
    /// The translation table.
    table: Vec<u8>,
    /// In a table of ranges: ends of the first ranges, computed on demand, in bytes from the start of the key or of a
    /// repetition.
    ends: RefCell<Vec<u64>>,
}

impl Mkey {
    /// Returns a key with this context and table.
    pub fn new(context: [u8; size!(mkc)], mode: Mode, table: Vec<u8>) -> Mkey {
        Mkey {
            context,
            mode,
            table,
            ends: RefCell::default(),
        }
    }

    /// Returns the maximum memory of table and cached ends, in bytes.
    pub fn memory(&self) -> usize {
        let ends = match self.mode {
            Mode::Klm => self.table.len() / KLM * size_of::<u64>(),
            _ => 0,
        };
        self.table.len() + ends
    }

    /// The translation table.
    pub fn table(&self) -> &[u8] {
        &self.table
    }

    /// Replaces a part of the translation table, from byte `at` on. Returns `None` if the table is too small.
    pub fn set_table(&mut self, at: usize, part: &[u8]) -> Option<()> {
        let place = self.table.get_mut(at..at.checked_add(part.len())?)?;
        place.copy_from_slice(part);
        // Cached ends after the change are invalid. A changed first entry invalidates all of them.
        let known = match at / KLM {
            0 => 0,
            entry => entry - self.first_range(),
        };
        self.ends.get_mut().truncate(known);
        Some(())
    }

    /// Returns the low byte of the key, which the driver selects.
    pub fn variant(&self) -> u8 {
        get!(self.context, mkc, mkey_7_0) as u8
    }

    /// Returns the protection domain.
    pub fn pd(&self) -> u32 {
        get!(self.context, mkc, pd)
    }

    /// Returns `true` if the key is not bound, or bound to this queue pair.
    pub fn is_for(&self, qp: u32) -> bool {
        const ANY: u32 = 0xff_ffff;
        [ANY, qp].contains(&get!(self.context, mkc, qpn))
    }

    /// Returns log2 of the page size, for modes with pages.
    pub fn log_page_size(&self) -> u32 {
        get!(self.context, mkc, log_page_size)
    }

    fn start(&self) -> u64 {
        match self.mode {
            // The start in the context is the offset in BAR 0. Addresses of the key begin at 0.
            Mode::Memic => 0,
            _ => get64!(self.context, mkc, start_addr),
        }
    }

    /// Returns the offset of a key in the memory of the device.
    fn memic_start(&self) -> u64 {
        get64!(self.context, mkc, start_addr).wrapping_sub(memic::BAR_OFFSET)
    }

    fn allows(&self, access: Access) -> bool {
        let right = match access {
            Access::LocalRead => get!(self.context, mkc, lr),
            Access::LocalWrite => get!(self.context, mkc, lw),
            Access::RemoteRead => get!(self.context, mkc, rr),
            Access::RemoteWrite => get!(self.context, mkc, rw),
            Access::RemoteAtomic => get!(self.context, mkc, a),
        };
        right != 0
    }

    fn check(&self, user: User) -> Result<(), MkeyFault> {
        if get!(self.context, mkc, free) != 0 {
            Err(MkeyFault::Free)
        } else if self.pd() != user.pd {
            Err(MkeyFault::Domain)
        } else if !self.is_for(user.qp) {
            Err(MkeyFault::Owner)
        } else if !self.allows(user.access) {
            Err(MkeyFault::Rights)
        } else {
            Ok(())
        }
    }

    /// Returns the offset of `address` in the memory of the key.
    fn offset(&self, address: u64, length: u64) -> Result<u64, MkeyFault> {
        if get!(self.context, mkc, length64) != 0 {
            return Ok(address.wrapping_sub(self.start()));
        }
        let offset = address.checked_sub(self.start()).ok_or(MkeyFault::Range)?;
        let end = offset.checked_add(length).ok_or(MkeyFault::Range)?;
        if end > get64!(self.context, mkc, len) {
            return Err(MkeyFault::Range);
        }
        Ok(offset)
    }

    fn entry(&self, index: u64) -> Result<&[u8], MkeyFault> {
        let start = usize::try_from(index)
            .ok()
            .and_then(|index| index.checked_mul(self.mode.entry()));
        let start = start.ok_or(MkeyFault::Range)?;
        self.table
            .get(start..)
            .and_then(|rest| rest.get(..self.mode.entry()))
            .ok_or(MkeyFault::Range)
    }

    /// Returns `true` if the ranges repeat.
    fn is_repeated(&self) -> bool {
        let head = self.table.get(..KLM).map(Klm::decode);
        head.is_some_and(|head| head.key == REPEATED)
    }

    /// Returns the index of the entry of the first range.
    fn first_range(&self) -> usize {
        usize::from(self.is_repeated())
    }

    /// Returns the number of bytes of a range, by its number.
    fn range_length(&self, number: usize) -> Result<u64, MkeyFault> {
        let entry = |index: usize| Ok(Klm::decode(self.entry(index as u64)?));
        if !self.is_repeated() {
            return Ok(entry(number)?.length.into());
        }
        let ranges = entry(0)?.address & 0xffff;
        if number as u64 >= ranges {
            return Err(MkeyFault::Range);
        }
        Ok(u64::from(entry(number + 1)?.length & 0xffff))
    }

    /// Returns the range of the byte `at`: its number, the offset of the byte in the range, and the number of bytes
    /// from this offset on. Skips empty ranges.
    fn range(&self, at: u64) -> Result<(usize, u64, u64), MkeyFault> {
        let mut ends = self.ends.borrow_mut();
        let mut last = ends.last().copied().unwrap_or(0);
        while last <= at {
            last += self.range_length(ends.len())?;
            ends.push(last);
        }
        let number = ends.partition_point(|end| *end <= at);
        let start = number.checked_sub(1).map_or(0, |before| ends[before]);
        Ok((number, at - start, ends[number] - at))
    }
}

/// Entry of a table of keys.
#[derive(Clone, Copy, Debug)]
struct Klm {
    length: u32,
    key: u32,
    address: u64,
}

impl Klm {
    fn decode(entry: &[u8]) -> Klm {
        let word = |at: usize| {
            u32::from_be_bytes([entry[at], entry[at + 1], entry[at + 2], entry[at + 3]])
        };
        Klm {
            length: word(0),
            key: word(4),
            address: (u64::from(word(8)) << 32) | u64::from(word(12)),
        }
    }
}

/// Puts a key into the free state, for SEND with invalidate of the peer of queue pair `qp` in `pd`. The key must allow
/// remote invalidation and UMR.
pub fn invalidate(keys: &mut Table<Mkey>, key: u32, pd: u32, qp: u32) -> Result<(), MkeyFault> {
    let mkey = find(keys, key)?;
    let user = User {
        pd,
        qp,
        access: Access::LocalRead,
    };
    mkey.check(user)?;
    if get!(mkey.context, mkc, en_rinval) == 0 || get!(mkey.context, mkc, umr_en) == 0 {
        return Err(MkeyFault::Rights);
    }
    if let Some(mkey) = keys.get_mut(key >> 8) {
        set!(mkey.context, mkc, free, 1u32);
    }
    Ok(())
}

/// Checks that a message of `length` bytes at `address` of `key` may begin. The keys of its table are checked when the
/// message reaches them.
pub fn check(
    keys: &Table<Mkey>,
    key: u32,
    user: User,
    address: u64,
    length: u64,
) -> Result<(), MkeyFault> {
    if length == 0 {
        return Ok(());
    }
    let key = find(keys, key)?;
    key.check(user)?;
    key.offset(address, length).map(|_| ())
}

/// Returns the key with this index and variant.
fn find(keys: &Table<Mkey>, key: u32) -> Result<&Mkey, MkeyFault> {
    let mkey = keys
        .get(key >> 8)
        .filter(|mkey| u32::from(mkey.variant()) == key & 0xff);
    mkey.ok_or(MkeyFault::Key)
}
