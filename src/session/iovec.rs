// SPDX-License-Identifier: GPL-2.0

//! Parts of a region, and the memory that goes with each: a vectored read or write.

use crate::{region::map::io::RegionRange, sys::buffer::Buffer};
use kernel::{alloc::flags::GFP_KERNEL_ACCOUNT, prelude::*};

/// The segments of one request.
pub(super) struct IoVec {
    ranges: KVVec<RegionRange>,
    /// [`Memory::Several`]: as many, each as long as its span.
    buffer: Buffer,
    total_len: usize,
}

impl IoVec {
    /// None yet, with room for `count`.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(super) fn with_capacity(count: usize) -> Result<Self> {
        Ok(Self {
            ranges: KVVec::with_capacity(count, GFP_KERNEL_ACCOUNT)?,
            buffer: Buffer::Vectored(KVVec::with_capacity(count, GFP_KERNEL_ACCOUNT)?),
            total_len: 0,
        })
    }

    /// Adds one.
    ///
    /// # Errors
    ///
    /// `EINVAL` if all have more bytes than there are addresses, `ENOMEM`.
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

    /// What of the region.
    pub(super) fn ranges(&self) -> &[RegionRange] {
        &self.ranges
    }

    /// What memory.
    pub(super) fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// Bytes of all.
    pub(super) fn len(&self) -> u64 {
        self.total_len as u64
    }
}
