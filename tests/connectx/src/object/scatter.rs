// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Scatter and gather: copies between messages and the memory of data segments.

use crate::cost::Cost;
use crate::memory::Dma;
use crate::object::memic::Memic;
use crate::object::mkey::{self, Access, Mkey, MkeyFault, Place, User};
use crate::object::table::Table;

/// Data segment of a WQE: key, address and length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Local key.
    pub key: u32,
    /// Address of the first byte.
    pub address: u64,
    /// Number of bytes.
    pub length: u32,
}

impl Segment {
    /// Size of a segment in a WQE.
    pub const SIZE: usize = 16;

    /// Decodes the first [`Self::SIZE`] bytes of `bytes`.
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

/// Access to the memory of keys, with the counters of look-ups.
pub struct KeyMemory<'a> {
    /// Guest memory.
    pub dma: &'a Dma,
    /// Device memory.
    pub memic: &'a Memic,
    /// Memory keys.
    pub keys: &'a Table<Mkey>,
    /// Counters of look-ups.
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

    /// Writes `bytes` at `address` of `key`. If the translation of any part fails, no byte is written.
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

    /// Checks the access to `length` bytes at `address` of `key`. The responder calls this before it executes a
    /// request.
    pub fn check(&self, key: u32, user: User, address: u64, length: u64) -> Result<(), MkeyFault> {
        mkey::check(self.keys, key, user, address, length)
    }

    /// Fills `bytes` from the memory of the segments after the first `skip` bytes. The queue pair `qp` of `pd` sends
    /// them.
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
        for part in select_parts(segments, skip, rest.len()) {
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

    /// Writes `bytes` to the memory of the segments after the first `skip` bytes. The queue pair `qp` of `pd` received
    /// them.
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
        for part in select_parts(segments, skip, bytes.len()) {
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
            &mut |key, entry| cost.record_translation(key, entry),
        )
    }
}

/// Returns the parts of the segments for `length` bytes after the first `skip` bytes.
fn select_parts(
    segments: &[Segment],
    skip: u64,
    length: usize,
) -> impl Iterator<Item = Segment> + '_ {
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
