// SPDX-License-Identifier: GPL-2.0

//! How a memory region is cut into chunks, and how these are spread over nodes.
//!
//! A region is of any size and consists of physically contiguous chunks that may lie on several nodes
//! (LITE, section 4). All chunks have the same power of two of bytes, but the last may be shorter, so
//! that an address is found with a shift and a mask. Chunks go round robin over the nodes.

use core::iter::FusedIterator;

/// Binary logarithm of the size of a page, and of the smallest chunk.
pub const PAGE_SHIFT: u8 = 12;

/// Binary logarithm of the size of the largest chunk: what the page allocator gives in one piece.
pub const MAX_CHUNK_SHIFT: u8 = 22;

/// A region of at least one byte, in chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Less than 2⁵⁴, since the count of chunks fits 32 bits: sums of two do not overflow.
    len: u64,
    chunk_count: u32,
    shift: u8,
}

/// An offset and a length reach outside the region: `ERANGE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfRange;

#[allow(clippy::len_without_is_empty, reason = "a region is never empty")]
impl Layout {
    /// Cuts `len` bytes into chunks of `1 << shift` bytes.
    ///
    /// `None` if `len` is 0, if `shift` is not in [`PAGE_SHIFT`] … [`MAX_CHUNK_SHIFT`], or if there
    /// would be more chunks than a `u32` counts.
    pub fn new(len: u64, shift: u8) -> Option<Self> {
        if len == 0 || !is_valid_chunk_shift(shift) {
            return None;
        }
        let chunk_count = u32::try_from(len.div_ceil(1 << shift)).ok()?;
        Some(Self {
            len,
            chunk_count,
            shift,
        })
    }

    /// Bytes of the region, at least 1.
    #[inline]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Binary logarithm of the size of a chunk.
    #[inline]
    pub fn shift(&self) -> u8 {
        self.shift
    }

    /// Pages of all chunks together. Only the last chunk can end within a page.
    #[inline]
    pub fn page_count(&self) -> u64 {
        self.len.div_ceil(1 << PAGE_SHIFT)
    }

    /// Number of chunks, at least 1.
    #[inline]
    pub fn chunk_count(&self) -> u32 {
        self.chunk_count
    }

    /// Bytes of chunk `i`: all the same but for the last. 0 if there is no such chunk.
    #[inline]
    pub fn chunk_len(&self, i: u32) -> u32 {
        let remaining = self.len.saturating_sub(u64::from(i) << self.shift);
        remaining.min(1 << self.shift) as u32
    }

    /// Pages that chunk `i` takes. 0 if there is no such chunk.
    #[inline]
    pub fn chunk_pages(&self, i: u32) -> u32 {
        self.chunk_len(i).div_ceil(1 << PAGE_SHIFT)
    }

    /// Splits `len` bytes from `offset` on at the borders of chunks. There is no piece if `len` is 0.
    ///
    /// # Errors
    ///
    /// [`OutOfRange`] if not all of them are in the region. `offset` may be its end if `len` is 0.
    #[inline]
    pub fn pieces(&self, offset: u64, len: u64) -> Result<Pieces, OutOfRange> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(Pieces {
                offset,
                len,
                done: 0,
                shift: self.shift,
            }),
            _ => Err(OutOfRange),
        }
    }
}

/// A part of a transfer that lies in one chunk. It has at least one byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Number of the chunk.
    pub chunk: u32,
    /// First byte in the chunk.
    pub offset: u32,
    /// Bytes.
    pub len: u32,
    /// First byte in the buffer of the caller.
    pub buffer_offset: u64,
}

/// The pieces of a transfer, in ascending order. Made by [`Layout::pieces`].
#[derive(Clone, Debug)]
pub struct Pieces {
    offset: u64,
    len: u64,
    done: u64,
    shift: u8,
}

impl Iterator for Pieces {
    type Item = Piece;

    #[inline]
    fn next(&mut self) -> Option<Piece> {
        let remaining = self.len - self.done;
        if remaining == 0 {
            return None;
        }
        let size = 1 << self.shift;
        let start = self.offset + self.done;
        let offset = start & (size - 1);
        let len = remaining.min(size - offset);
        let piece = Piece {
            chunk: (start >> self.shift) as u32,
            offset: offset as u32,
            len: len as u32,
            buffer_offset: self.done,
        };
        self.done += len;
        Some(piece)
    }
}

impl FusedIterator for Pieces {}

/// The size of chunks to try first for a region of `len` bytes, as a binary logarithm: the smallest
/// of which one chunk holds all, within [`PAGE_SHIFT`] … [`MAX_CHUNK_SHIFT`].
pub fn initial_shift(len: u64) -> u8 {
    let bits = u64::BITS - len.saturating_sub(1).leading_zeros();
    (bits as u8).clamp(PAGE_SHIFT, MAX_CHUNK_SHIFT)
}

/// The place of `chunk` in a list of `nodes` nodes: round robin, in the order of the list.
///
/// Its number among the chunks of that node is `chunk / nodes`. 0 if `nodes` is 0.
#[inline]
pub fn stripe_index(chunk: u32, nodes: usize) -> usize {
    (chunk as usize).checked_rem(nodes).unwrap_or(0)
}

/// What one node holds of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StripeShare {
    /// Number of chunks.
    pub chunk_count: u32,
    /// Bytes of the last of them; the others are full. 0 if there is none.
    pub last_chunk_len: u32,
}

impl StripeShare {
    /// The share by itself, as its node lends it, in chunks of `1 << shift` bytes.
    ///
    /// `None` if there is no chunk, if `tail` is no length of a chunk, or as [`Layout::new`].
    pub fn layout(&self, shift: u8) -> Option<Layout> {
        let full = u64::from(self.chunk_count.checked_sub(1)?);
        if !is_valid_chunk_shift(shift)
            || self.last_chunk_len == 0
            || self.last_chunk_len > 1 << shift
        {
            return None;
        }
        Layout::new((full << shift) + u64::from(self.last_chunk_len), shift)
    }
}

/// What falls on place `k` when `layout` is spread over `n` nodes by [`stripe_index`]. Nothing if `k` is
/// not below `n`.
pub fn stripe_share(layout: &Layout, node_index: usize, node_count: usize) -> StripeShare {
    const EMPTY: StripeShare = StripeShare {
        chunk_count: 0,
        last_chunk_len: 0,
    };
    let last = layout.chunk_count as usize - 1;
    if node_index >= node_count || node_index > last {
        return EMPTY;
    }
    let full_rounds = (last - node_index) / node_count;
    StripeShare {
        chunk_count: full_rounds as u32 + 1,
        last_chunk_len: layout.chunk_len((node_index + full_rounds * node_count) as u32),
    }
}

#[inline]
fn is_valid_chunk_shift(shift: u8) -> bool {
    (PAGE_SHIFT..=MAX_CHUNK_SHIFT).contains(&shift)
}

#[cfg(test)]
mod tests;
