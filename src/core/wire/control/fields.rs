// SPDX-License-Identifier: GPL-2.0

//! Types of single fields of control messages.

use crate::wire::{
    codec::{Field, Reader, Writer},
    Malformed,
};

/// Location in a chunk that the receiver lends to a region.
///
/// The region is part of the location, so that the lender can reject a request for a freed chunk. The memory
/// of a freed chunk may belong to another region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LentChunkAddr {
    /// Home of the region.
    pub home: u32,
    /// Region ID.
    pub region: u64,
    /// Address of the chunk.
    pub chunk_addr: u64,
    /// Offset in the chunk, in bytes.
    pub offset: u32,
}

impl Field<'_> for LentChunkAddr {
    fn get(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        let ((home, region), (chunk, offset)) = Field::get(from)?;
        Ok(Self {
            home,
            region,
            chunk_addr: chunk,
            offset,
        })
    }

    fn put(&self, to: &mut Writer<'_>) {
        ((self.home, self.region), (self.chunk_addr, self.offset)).put(to);
    }
}

/// Reason for the invalidation of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InvalidateReason {
    /// The region was freed.
    Freed,
    /// The user lost a right of the mapping.
    Revoked,
}

impl Field<'_> for InvalidateReason {
    fn get(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        match u8::get(from)? {
            1 => Ok(Self::Freed),
            2 => Ok(Self::Revoked),
            _ => Err(Malformed),
        }
    }

    fn put(&self, to: &mut Writer<'_>) {
        let number: u8 = match self {
            Self::Freed => 1,
            Self::Revoked => 2,
        };
        number.put(to);
    }
}
