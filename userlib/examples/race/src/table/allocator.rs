// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Allocator for blocks and segments.
//!
//! A worker allocates a chunk of a memory by fetch-and-add, and blocks and segments from its chunks. It uses all
//! memories in turn, so that the table is spread over them.
//!
//! Memory that other workers may have read is not freed, so that no word returns to an earlier value: blocks that were
//! replaced or deleted, and segments that were split, remain. The unused part of the chunks of a worker is lost when
//! the worker ends.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::layout::{
    memory_base, memory_of, segment_size, ROOT_ALLOC_NEXT, ROOT_SIZE, UNIT_BYTES, WORD_BYTES,
};
use crate::transport::{Request, Transport};

use super::Table;

/// Bytes of a chunk.
const CHUNK_BYTES: u64 = 64 << 10;

/// Chunks of a worker.
#[derive(Debug)]
pub(crate) struct Allocator {
    /// Chunk of each memory.
    chunks: Vec<Chunk>,
    /// Memory of the last allocation.
    last_memory: usize,
    /// Address of memory for both halves of the next segment that this worker splits.
    pub(super) reserve: Option<u64>,
}

/// Unused part of a chunk.
#[derive(Clone, Debug, Default)]
struct Chunk {
    addrs: Range<u64>,
    /// `true` if the memory has no further chunk.
    is_memory_full: bool,
}

impl Chunk {
    fn allocate(&mut self, len: u64) -> Option<u64> {
        let addr = self.addrs.start;
        let end = addr + len.next_multiple_of(UNIT_BYTES);
        (end <= self.addrs.end).then(|| {
            self.addrs.start = end;
            addr
        })
    }
}

impl Allocator {
    pub(super) fn new(memories: usize) -> Self {
        Self {
            chunks: vec![Chunk::default(); memories],
            last_memory: 0,
            reserve: None,
        }
    }

    /// Frees the last allocation from a memory. An earlier allocation is not freed, and its memory is lost.
    pub(super) fn undo_alloc(&mut self, addr: u64, len: u64) {
        let unused = &mut self.chunks[memory_of(addr)].addrs;
        if addr + len.next_multiple_of(UNIT_BYTES) == unused.start {
            unused.start = addr;
        }
    }
}

impl<T: Transport> Table<T> {
    /// Allocates `len` bytes, at most a chunk, from the next memory that is not full.
    ///
    /// # Errors
    /// - [`Error::Full`]: all memories are full.
    /// - [`Error::Transport`]: a memory cannot be reached.
    pub(super) fn allocate(&mut self, len: u64) -> Result<u64> {
        debug_assert!(len <= CHUNK_BYTES);
        let memories = self.allocator.chunks.len();
        for _ in 0..memories {
            self.allocator.last_memory = (self.allocator.last_memory + 1) % memories;
            if let Some(addr) = self.allocate_from(self.allocator.last_memory, len)? {
                return Ok(addr);
            }
        }
        Err(Error::Full)
    }

    /// Allocates from a memory. Returns `None` if the memory is full.
    fn allocate_from(&mut self, memory: usize, len: u64) -> Result<Option<u64>> {
        loop {
            let chunk = &mut self.allocator.chunks[memory];
            if let Some(addr) = chunk.allocate(len) {
                return Ok(Some(addr));
            }
            if chunk.is_memory_full {
                return Ok(None);
            }
            let addrs = self.allocate_chunk(memory)?;
            let chunk = &mut self.allocator.chunks[memory];
            match addrs {
                Some(addrs) => chunk.addrs = addrs,
                None => chunk.is_memory_full = true,
            }
        }
    }

    /// Reserves memory for both halves of a segment, unless it is reserved already.
    ///
    /// # Errors
    /// See [`Self::allocate`].
    pub(super) fn reserve(&mut self) -> Result<()> {
        if self.allocator.reserve.is_none() {
            self.allocator.reserve = Some(self.allocate(2 * segment_size(self.groups))?);
        }
        Ok(())
    }

    /// Allocates the next chunk of a memory. Returns `None` if the memory is full.
    fn allocate_chunk(&mut self, memory: usize) -> Result<Option<Range<u64>>> {
        let (mut offset, mut size) = (0, [0; WORD_BYTES]);
        let add = Request::FetchAdd {
            addr: memory_base(memory) + ROOT_ALLOC_NEXT,
            operand: CHUNK_BYTES,
            old_value: &mut offset,
        };
        let read_size = Request::Read {
            addr: memory_base(memory) + ROOT_SIZE,
            into: &mut size,
        };
        self.transport.run(&mut [add, read_size])?;
        let fits = offset + CHUNK_BYTES <= u64::from_le_bytes(size);
        let start = memory_base(memory) + offset;
        Ok(fits.then_some(start..start + CHUNK_BYTES))
    }
}
