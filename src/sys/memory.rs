// SPDX-License-Identifier: GPL-2.0

//! The caller's buffer of a read or write: memory of a process, or of another kernel module.

use super::{pages::Pages, pin::Pinned};
use kernel::prelude::*;

/// A buffer.
///
/// # Invariants
///
/// That of a kernel user is valid for its length for as long as this lives.
pub(crate) enum Memory {
    /// Of the current process, at this address. Every access checks it.
    User(usize),
    /// Of a kernel user.
    Kernel(KernelBuffer),
}

/// A kernel user's buffer; made by [`Memory::kernel`] only.
pub(crate) struct KernelBuffer {
    ptr: *mut u8,
    len: usize,
}

impl KernelBuffer {
    fn span(&self, at: usize, len: usize) -> Result<*mut u8> {
        if at > self.len || len > self.len - at {
            return Err(EFAULT);
        }
        Ok(self.ptr.wrapping_add(at))
    }
}

impl Memory {
    /// A buffer of the kernel.
    ///
    /// # Safety
    ///
    /// `ptr` must be valid for `len` bytes while the result lives, to be written if it is read into.
    pub(crate) unsafe fn kernel(ptr: *mut u8, len: usize) -> Self {
        // INVARIANT: By the safety requirements.
        Self::Kernel(KernelBuffer { ptr, len })
    }

    /// Copies `len` bytes, from `at` in the buffer to `offset` in `pages`.
    ///
    /// # Errors
    ///
    /// `EFAULT`; `ERANGE` if they are not all in `pages`.
    pub(crate) fn copy_to(&self, pages: &Pages, offset: usize, at: usize, len: usize) -> Result {
        match self {
            Self::User(base) => pages.write_from_user(offset, base.wrapping_add(at), len),
            Self::Kernel(buffer) => {
                let span = buffer.span(at, len)?;
                // SAFETY: By the type invariants, and `span` checked the range.
                pages.write(offset, unsafe { core::slice::from_raw_parts(span, len) })
            }
        }
    }

    /// Copies `len` bytes, from `offset` in `pages` to `at` in the buffer.
    ///
    /// # Errors
    ///
    /// As for [`Self::copy_to`].
    pub(crate) fn copy_from(&self, pages: &Pages, offset: usize, at: usize, len: usize) -> Result {
        match self {
            Self::User(base) => pages.read_to_user(offset, base.wrapping_add(at), len),
            Self::Kernel(buffer) => {
                let span = buffer.span(at, len)?;
                // SAFETY: By the type invariants, and `span` checked the range.
                pages.read(offset, unsafe {
                    core::slice::from_raw_parts_mut(span, len)
                })
            }
        }
    }

    /// Pins `len` bytes, `at` bytes into the buffer.
    ///
    /// # Errors
    ///
    /// As for [`Pinned::user`].
    pub(crate) fn pin(&self, at: usize, len: usize, writable: bool) -> Result<Pinned> {
        match self {
            Self::User(base) => Pinned::user(base.checked_add(at).ok_or(EFAULT)?, len, writable),
            // SAFETY: By the type invariants, and `span` checks the range; the caller of a read or
            // write waits for its end.
            Self::Kernel(buffer) => unsafe { Pinned::kernel(buffer.span(at, len)?, len) },
        }
    }
}
