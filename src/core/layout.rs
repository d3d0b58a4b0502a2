// SPDX-License-Identifier: GPL-2.0

//! Chunk layout of a memory region, and its striping over nodes.
//!
//! A region has any size and consists of physically contiguous chunks, possibly on several nodes (LITE,
//! section 4). All chunks but the last have the same size, a power of two. The last chunk may be shorter.
//! Hence a shift and a mask convert a region offset to a chunk and an offset in the chunk. Chunks are
//! assigned to the nodes round robin.

use core::iter::FusedIterator;

/// Binary logarithm of the page size, and of the smallest chunk size.
pub const PAGE_SHIFT: u8 = 12;

/// Binary logarithm of the largest chunk size: the largest contiguous block of the page allocator.
pub const MAX_CHUNK_SHIFT: u8 = 22;

/// Chunk layout of a region of at least one byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Length in bytes. Less than 2⁵⁴, since the chunk count fits in 32 bits: a sum of two does not overflow.
    len: u64,
    chunk_count: u32,
    shift: u8,
}

/// Error for an offset and a length that reach outside the region: `ERANGE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfRange;

#[allow(clippy::len_without_is_empty, reason = "a region is never empty")]
impl Layout {
    /// Returns the layout of `len` bytes in chunks of `1 << shift` bytes.
    ///
    /// Returns `None` if `len` is 0, if `shift` is not in [`PAGE_SHIFT`] … [`MAX_CHUNK_SHIFT`], or if the
    /// chunk count does not fit in a `u32`.
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

    /// Returns the size of the region in bytes, at least 1.
    #[inline]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns the binary logarithm of the chunk size.
    #[inline]
    pub fn shift(&self) -> u8 {
        self.shift
    }

    /// Returns the total number of pages of all chunks. Only the last chunk can end within a page.
    #[inline]
    pub fn page_count(&self) -> u64 {
        self.len.div_ceil(1 << PAGE_SHIFT)
    }

    /// Returns the number of chunks, at least 1.
    #[inline]
    pub fn chunk_count(&self) -> u32 {
        self.chunk_count
    }

    /// Returns the length of chunk `i` in bytes. Only the last chunk may be shorter. 0 if there is no chunk
    /// `i`.
    #[inline]
    pub fn chunk_len(&self, i: u32) -> u32 {
        let remaining = self.len.saturating_sub(u64::from(i) << self.shift);
        remaining.min(1 << self.shift) as u32
    }

    /// Returns the number of pages of chunk `i`. 0 if there is no chunk `i`.
    #[inline]
    pub fn chunk_pages(&self, i: u32) -> u32 {
        self.chunk_len(i).div_ceil(1 << PAGE_SHIFT)
    }

    /// Splits the range of `len` bytes at `offset` at chunk boundaries. There are no pieces if `len` is 0.
    ///
    /// # Errors
    ///
    /// - [`OutOfRange`]: part of the range lies outside the region. With `len` 0, `offset` may equal the
    ///   length of the region.
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

/// Part of a transfer that lies in one chunk, of at least one byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Index of the chunk.
    pub chunk: u32,
    /// Offset in the chunk, in bytes.
    pub offset: u32,
    /// Length in bytes.
    pub len: u32,
    /// Offset in the caller's buffer, in bytes.
    pub buffer_offset: u64,
}

/// Iterator over the pieces of a transfer, in ascending order. Created by [`Layout::pieces`].
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

/// Returns the chunk shift to try first for a region of `len` bytes.
///
/// Returns the smallest shift for which one chunk holds the region, clamped to [`PAGE_SHIFT`] …
/// [`MAX_CHUNK_SHIFT`].
pub fn initial_shift(len: u64) -> u8 {
    let bits = u64::BITS - len.saturating_sub(1).leading_zeros();
    (bits as u8).clamp(PAGE_SHIFT, MAX_CHUNK_SHIFT)
}

/// Returns the index of the node that holds `chunk`, in a list of `nodes` nodes: round robin in list order.
///
/// The index of the chunk among the chunks of the same node is `chunk / nodes`. Returns 0 if `nodes` is 0.
#[inline]
pub fn stripe_index(chunk: u32, nodes: usize) -> usize {
    (chunk as usize).checked_rem(nodes).unwrap_or(0)
}

/// Chunks of a striped region on one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StripeShare {
    /// Number of chunks.
    pub chunk_count: u32,
    /// Length of the last chunk in bytes; all earlier chunks are full. 0 if there are no chunks.
    pub last_chunk_len: u32,
}

impl StripeShare {
    /// Returns the layout of the share on its own, as lent by its node, in chunks of `1 << shift` bytes.
    ///
    /// Returns `None` if the share has no chunks, if `last_chunk_len` is not a valid chunk length, or if
    /// [`Layout::new`] rejects the result.
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

/// Returns the share of node `node_index` when `layout` is striped over `node_count` nodes by
/// [`stripe_index`].
///
/// The share is empty if `node_index` is not below `node_count`.
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
