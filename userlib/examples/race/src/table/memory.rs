// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Memory for blocks and segments: a worker takes a chunk of the table's memory at a time, by fetch-and-add, and of that
//! what it needs.
//!
//! Nothing that others may have seen is given back, so that no word is ever what it was before: a block that was replaced or
//! deleted, and a segment that was split, stay where they are. A worker that ends wastes what is left of its chunk.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::layout::{segment_size, ROOT_NEXT, UNIT};
use crate::transport::{Request, Transport};

use super::Table;

/// Bytes of a chunk.
const CHUNK: u64 = 64 << 10;

/// What a worker has of the memory.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    chunk: Range<u64>,
    size: u64,
    /// Room for the halves of the next segment that this worker splits.
    pub(super) reserve: Option<u64>,
}

impl Memory {
    /// Says how much there is for all.
    pub(crate) fn limit(&mut self, size: u64) {
        self.size = size;
    }

    fn take(&mut self, len: u64) -> Option<u64> {
        let place = self.chunk.start;
        let end = place + len.next_multiple_of(UNIT);
        (end <= self.chunk.end).then(|| {
            self.chunk.start = end;
            place
        })
    }

    /// Takes back what was taken last; what was taken before that is wasted.
    pub(super) fn give_back(&mut self, place: u64, len: u64) {
        if place + len.next_multiple_of(UNIT) == self.chunk.start {
            self.chunk.start = place;
        }
    }
}

impl<T: Transport> Table<T> {
    /// Allocates at most a chunk.
    ///
    /// # Errors
    /// [`Error::Full`], [`Error::Lost`].
    pub(super) fn allocate(&mut self, len: u64) -> Result<u64> {
        debug_assert!(len <= CHUNK);
        loop {
            if let Some(place) = self.memory.take(len) {
                return Ok(place);
            }
            let start = self.take_chunk()?;
            if start + CHUNK > self.memory.size {
                return Err(Error::Full);
            }
            self.memory.chunk = start..start + CHUNK;
        }
    }

    /// Sees that there is room for the halves of a segment.
    ///
    /// # Errors
    /// As of [`Self::allocate`].
    pub(super) fn reserve(&mut self) -> Result<()> {
        if self.memory.reserve.is_none() {
            self.memory.reserve = Some(self.allocate(2 * segment_size(self.groups))?);
        }
        Ok(())
    }

    fn take_chunk(&mut self) -> Result<u64> {
        let mut start = 0;
        let take = Request::FetchAdd {
            place: ROOT_NEXT,
            operand: CHUNK,
            found: &mut start,
        };
        self.transport.run(&mut [take])?;
        Ok(start)
    }
}
