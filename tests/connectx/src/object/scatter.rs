// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Scatter and gather: between bytes of a message and the memory that data segments name.

use crate::cost::Cost;
use crate::memory::Dma;
use crate::object::memic::Memic;
use crate::object::mkey::{self, Access, Mkey, MkeyFault, Place, User};
use crate::object::table::Table;

/// A data segment of a work request: memory by key, address and length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The local key.
    pub key: u32,
    /// The first byte.
    pub address: u64,
    /// Number of bytes.
    pub length: u32,
}

impl Segment {
    /// The bytes of a segment in a work request.
    pub const SIZE: usize = 16;

    /// Decodes the first [`Self::SIZE`] bytes of `bytes`, which must be there.
    pub fn decode(bytes: &[u8]) -> Segment {
        let word = |at: usize| {
            u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        // A length of 0 means 2 GiB: a driver omits an empty segment.
        let length = match word(0) {
            0 => 1 << 31,
            length => length,
        };
        Segment {
            key: word(4),
            address: (u64::from(word(8)) << 32) | u64::from(word(12)),
            length,
        }
    }
}

/// Returns the number of bytes of the segments.
pub fn capacity(segments: &[Segment]) -> u64 {
    segments
        .iter()
        .map(|segment| u64::from(segment.length))
        .sum()
}

/// All memory that keys lead to, and the account of getting there.
pub struct KeyMemory<'a> {
    /// The guest's memory.
    pub dma: &'a Dma,
    /// The device's memory.
    pub memic: &'a Memic,
    /// The keys.
    pub keys: &'a Table<Mkey>,
    /// Where look-ups are counted.
    pub cost: &'a mut Cost,
}

impl KeyMemory<'_> {
    /// Reads `bytes.len()` bytes at `address` of `key`.
    pub fn read(
        &mut self,
        key: u32,
        user: User,
        address: u64,
        bytes: &mut [u8],
    ) -> Result<(), MkeyFault> {
        let mut rest = bytes;
        for piece in self.translate(key, user, address, rest.len())? {
            let (here, next) = rest.split_at_mut(piece.length as usize);
            match piece.place {
                Place::Guest(at) => self.dma.read(at, here).map_err(|_| MkeyFault::Bus)?,
                Place::Memic(at) => self.memic.read(at, here).ok_or(MkeyFault::Bus)?,
                Place::Null => here.fill(0),
            }
            rest = next;
        }
        Ok(())
    }

    /// Writes `bytes` at `address` of `key`. If a part of it may not be written, none is.
    pub fn write(
        &mut self,
        key: u32,
        user: User,
        address: u64,
        bytes: &[u8],
    ) -> Result<(), MkeyFault> {
        let mut rest = bytes;
        for piece in self.translate(key, user, address, rest.len())? {
            let (here, next) = rest.split_at(piece.length as usize);
            match piece.place {
                Place::Guest(at) => self.dma.write(at, here).map_err(|_| MkeyFault::Bus)?,
                Place::Memic(at) => self.memic.write(at, here).ok_or(MkeyFault::Bus)?,
                Place::Null => {}
            }
            rest = next;
        }
        Ok(())
    }

    /// Checks that `length` bytes at `address` of `key` may be used. A responder calls this before it executes a
    /// request.
    pub fn check(&self, key: u32, user: User, address: u64, length: u64) -> Result<(), MkeyFault> {
        mkey::check(self.keys, key, user, address, length)
    }

    /// Reads all of `bytes`, from `skip` on of what the segments name, for a queue pair `qp` of `pd` to send.
    pub fn gather(
        &mut self,
        pd: u32,
        qp: u32,
        segments: &[Segment],
        skip: u64,
        bytes: &mut [u8],
    ) -> Result<(), MkeyFault> {
        let user = User {
            pd,
            qp,
            access: Access::LocalRead,
        };
        let mut rest = &mut *bytes;
        for part in window(segments, skip, rest.len()) {
            let (here, next) = rest.split_at_mut(part.length as usize);
            self.read(part.key, user, part.address, here)?;
            rest = next;
        }
        if rest.is_empty() {
            Ok(())
        } else {
            Err(MkeyFault::Range)
        }
    }

    /// Puts `bytes` where the segments from `skip` on say, for a queue pair `qp` of `pd` that received them.
    pub fn scatter(
        &mut self,
        pd: u32,
        qp: u32,
        segments: &[Segment],
        skip: u64,
        bytes: &[u8],
    ) -> Result<(), MkeyFault> {
        let user = User {
            pd,
            qp,
            access: Access::LocalWrite,
        };
        let mut rest = bytes;
        for part in window(segments, skip, bytes.len()) {
            let (here, next) = rest.split_at(part.length as usize);
            self.write(part.key, user, part.address, here)?;
            rest = next;
        }
        if rest.is_empty() {
            Ok(())
        } else {
            Err(MkeyFault::Range)
        }
    }

    fn translate(
        &mut self,
        key: u32,
        user: User,
        address: u64,
        length: usize,
    ) -> Result<Vec<mkey::Piece>, MkeyFault> {
        let cost = &mut *self.cost;
        mkey::translate(
            self.keys,
            key,
            user,
            address,
            length as u64,
            &mut |key, entry| cost.looked_up(key, entry),
        )
    }
}

/// The parts of the segments that hold the `length` bytes from `skip` on.
fn window(segments: &[Segment], skip: u64, length: usize) -> impl Iterator<Item = Segment> + '_ {
    let (mut skip, mut left) = (skip, length as u64);
    segments.iter().filter_map(move |segment| {
        let here = u64::from(segment.length).saturating_sub(skip).min(left);
        let part = Segment {
            address: segment.address.wrapping_add(skip),
            length: here as u32,
            ..*segment
        };
        skip = skip.saturating_sub(u64::from(segment.length));
        left -= here;
        (here > 0).then_some(part)
    })
}
