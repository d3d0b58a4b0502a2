// SPDX-License-Identifier: GPL-2.0

//! Segments of a vectored read or write: ranges of a region, each with a local buffer.

use crate::{region::map::access::RegionRange, sys::buffer::Buffer};
use kernel::{alloc::flags::GFP_KERNEL_ACCOUNT, prelude::*};

/// Segments of one vectored request.
pub(super) struct IoVec {
    ranges: KVVec<RegionRange>,
    /// [`Buffer::Vectored`] with one buffer per range, each as long as its range.
    buffer: Buffer,
    total_len: usize,
}

impl IoVec {
    /// Returns an empty list with capacity for `count` segments.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory.
    pub(super) fn with_capacity(count: usize) -> Result<Self> {
        Ok(Self {
            ranges: KVVec::with_capacity(count, GFP_KERNEL_ACCOUNT)?,
            buffer: Buffer::Vectored(KVVec::with_capacity(count, GFP_KERNEL_ACCOUNT)?),
            total_len: 0,
        })
    }

    /// Appends a segment.
    ///
    /// # Errors
    ///
    /// - `EINVAL`: the total length exceeds the address space.
    /// - `ENOMEM`: out of memory.
    pub(super) fn push(&mut self, range: RegionRange, memory: Buffer) -> Result {
        let len = usize::try_from(range.len).map_err(|_| EINVAL)?;
        let total = self.total_len.checked_add(len).ok_or(EINVAL)?;
        if let Buffer::Vectored(segments) = &mut self.buffer {
            segments.push((self.total_len, memory), GFP_KERNEL_ACCOUNT)?;
        }
        self.ranges.push(range, GFP_KERNEL_ACCOUNT)?;
        self.total_len = total;
        Ok(())
    }

    /// Returns the ranges of the region.
    pub(super) fn ranges(&self) -> &[RegionRange] {
        &self.ranges
    }

    /// Returns the local buffers.
    pub(super) fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// Returns the total length in bytes.
    pub(super) fn len(&self) -> u64 {
        self.total_len as u64
    }
}
