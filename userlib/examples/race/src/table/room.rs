// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Room for blocks and segments: a worker takes a chunk of a memory at a time, by fetch-and-add, and of that what it
//! needs. It takes from all memories in turn, so that the table is spread over them.
//!
//! Nothing that others may have seen is given back, so that no word is ever what it was before: a block that was replaced or
//! deleted, and a segment that was split, stay where they are. A worker that ends wastes what is left of its chunks.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::layout::{memory, segment_size, start, ROOT_NEXT, ROOT_SIZE, UNIT, WORD};
use crate::transport::{Request, Transport};

use super::Table;

/// Bytes of a chunk.
const CHUNK: u64 = 64 << 10;

/// Space of a worker in the memories.
#[derive(Debug)]
pub(crate) struct Room {
    shares: Vec<Share>,
    /// The memory from which it took last.
    turn: usize,
    /// Room for the halves of the next segment that this worker splits.
    pub(super) reserve: Option<u64>,
}

/// Space of a worker in one memory.
#[derive(Clone, Debug, Default)]
struct Share {
    chunk: Range<u64>,
    /// There is no other chunk.
    is_full: bool,
}

impl Share {
    fn take(&mut self, len: u64) -> Option<u64> {
        let place = self.chunk.start;
        let end = place + len.next_multiple_of(UNIT);
        (end <= self.chunk.end).then(|| {
            self.chunk.start = end;
            place
        })
    }
}

impl Room {
    pub(super) fn new(memories: usize) -> Self {
        Self {
            shares: vec![Share::default(); memories],
            turn: 0,
            reserve: None,
        }
    }

    /// Takes back what was taken last of a memory; what was taken before that is wasted.
    pub(super) fn give_back(&mut self, place: u64, len: u64) {
        let chunk = &mut self.shares[memory(place)].chunk;
        if place + len.next_multiple_of(UNIT) == chunk.start {
            chunk.start = place;
        }
    }
}

impl<T: Transport> Table<T> {
    /// Allocates at most a chunk, of the next memory that has room.
    ///
    /// # Errors
    /// [`Error::Full`], [`Error::Lost`].
    pub(super) fn allocate(&mut self, len: u64) -> Result<u64> {
        debug_assert!(len <= CHUNK);
        let memories = self.room.shares.len();
        for _ in 0..memories {
            self.room.turn = (self.room.turn + 1) % memories;
            if let Some(place) = self.allocate_of(self.room.turn, len)? {
                return Ok(place);
            }
        }
        Err(Error::Full)
    }

    fn allocate_of(&mut self, memory: usize, len: u64) -> Result<Option<u64>> {
        loop {
            let share = &mut self.room.shares[memory];
            if let Some(place) = share.take(len) {
                return Ok(Some(place));
            }
            if share.is_full {
                return Ok(None);
            }
            let chunk = self.take_chunk(memory)?;
            let share = &mut self.room.shares[memory];
            match chunk {
                Some(chunk) => share.chunk = chunk,
                None => share.is_full = true,
            }
        }
    }

    /// Sees that there is room for the halves of a segment.
    ///
    /// # Errors
    /// As of [`Self::allocate`].
    pub(super) fn reserve(&mut self) -> Result<()> {
        if self.room.reserve.is_none() {
            self.room.reserve = Some(self.allocate(2 * segment_size(self.groups))?);
        }
        Ok(())
    }

    /// Takes the next chunk of a memory; there is none if it is full.
    fn take_chunk(&mut self, memory: usize) -> Result<Option<Range<u64>>> {
        let (mut next, mut size) = (0, [0; WORD]);
        let take = Request::FetchAdd {
            place: start(memory) + ROOT_NEXT,
            operand: CHUNK,
            found: &mut next,
        };
        let look = Request::Read {
            place: start(memory) + ROOT_SIZE,
            into: &mut size,
        };
        self.transport.run(&mut [take, look])?;
        let fits = next + CHUNK <= u64::from_le_bytes(size);
        Ok(fits.then(|| start(memory) + next..start(memory) + next + CHUNK))
    }
}
