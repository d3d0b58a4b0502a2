// SPDX-License-Identifier: GPL-2.0

//! Parts of a region, and the memory that goes with each: a vectored read or write.

use crate::{lmr::io::Span, sys::memory::Memory};
use kernel::{alloc::flags::GFP_KERNEL_ACCOUNT, prelude::*};

/// The segments of one request.
pub(super) struct Segments {
    spans: KVVec<Span>,
    /// [`Memory::Several`]: as many, each as long as its span.
    memory: Memory,
    len: usize,
}

impl Segments {
    /// None yet, with room for `count`.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(super) fn with_capacity(count: usize) -> Result<Self> {
        Ok(Self {
            spans: KVVec::with_capacity(count, GFP_KERNEL_ACCOUNT)?,
            memory: Memory::Several(KVVec::with_capacity(count, GFP_KERNEL_ACCOUNT)?),
            len: 0,
        })
    }

    /// Adds one.
    ///
    /// # Errors
    ///
    /// `EINVAL` if all have more bytes than there are addresses, `ENOMEM`.
    pub(super) fn push(&mut self, span: Span, memory: Memory) -> Result {
        let len = usize::try_from(span.len).map_err(|_| EINVAL)?;
        let end = self.len.checked_add(len).ok_or(EINVAL)?;
        if let Memory::Several(several) = &mut self.memory {
            several.push((self.len, memory), GFP_KERNEL_ACCOUNT)?;
        }
        self.spans.push(span, GFP_KERNEL_ACCOUNT)?;
        self.len = end;
        Ok(())
    }

    /// What of the region.
    pub(super) fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// What memory.
    pub(super) fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Bytes of all.
    pub(super) fn len(&self) -> u64 {
        self.len as u64
    }
}
