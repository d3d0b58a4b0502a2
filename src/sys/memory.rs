// SPDX-License-Identifier: GPL-2.0

//! The caller's buffer of a read or write: memory of a process, or of another kernel module.

use super::{pages::Pages, pin::Pinned};
use kernel::prelude::*;

/// A buffer.
pub(crate) enum Memory {
    /// Of the current process, at this address. Every access checks it.
    User(usize),
}

impl Memory {
    /// Copies `len` bytes, from `at` in the buffer to `offset` in `pages`.
    ///
    /// # Errors
    ///
    /// `EFAULT`; `ERANGE` if they are not all in `pages`.
    pub(crate) fn copy_to(&self, pages: &Pages, offset: usize, at: usize, len: usize) -> Result {
        match self {
            Self::User(base) => pages.write_from_user(offset, base.wrapping_add(at), len),
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
        }
    }

    /// Pins `len` bytes, `at` bytes into the buffer.
    ///
    /// # Errors
    ///
    /// As for [`Pinned::new`].
    pub(crate) fn pin(&self, at: usize, len: usize, writable: bool) -> Result<Pinned> {
        match self {
            Self::User(base) => Pinned::new(base.checked_add(at).ok_or(EFAULT)?, len, writable),
        }
    }
}
