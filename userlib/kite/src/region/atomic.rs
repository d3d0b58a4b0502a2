// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Atomic operations on 8-byte words.

use std::os::fd::AsFd;

use super::Region;
use crate::error::Result;
use crate::sys;

impl Region {
    /// Adds `operand` to the 8-byte word at `offset`, modulo 2⁶⁴, and returns the previous value. `offset` is a
    /// multiple of 8.
    ///
    /// Atomic operations of all nodes on one word take effect one after the other, each at most once, and exactly once
    /// on success. They are not atomic with respect to concurrent reads and writes. The word is in native byte order.
    /// Needs [`Rights::READ`](crate::Rights::READ) and [`Rights::WRITE`](crate::Rights::WRITE).
    ///
    /// [`write_at`](Self::write_at) may write its bytes more than once until it returns. Release a word that atomic
    /// operations protect, such as a spin lock, by [`swap`](Self::swap), not by a write.
    ///
    /// # Errors
    /// - [`Error::Invalid`](crate::Error::Invalid): the offset is not a multiple of 8.
    /// - For the others see [`read_at`](Self::read_at).
    ///
    /// After [`Error::HostDown`](crate::Error::HostDown), [`Error::Io`](crate::Error::Io),
    /// [`Error::NoRnic`](crate::Error::NoRnic), [`Error::NotJoined`](crate::Error::NotJoined),
    /// [`Error::Stale`](crate::Error::Stale) and [`Error::TimedOut`](crate::Error::TimedOut) the operation may have
    /// been executed, or may be executed later.
    pub fn fetch_add(&self, offset: u64, operand: u64) -> Result<u64> {
        self.atomic(offset, sys::KITE_ATOMIC_FETCH_ADD, operand, 0)
    }

    /// Replaces the word at `offset` by `new` if it is `expected`. Returns the previous value, which is `expected`
    /// on success. See [`fetch_add`](Self::fetch_add).
    ///
    /// # Errors
    /// See [`fetch_add`](Self::fetch_add).
    pub fn compare_swap(&self, offset: u64, expected: u64, new: u64) -> Result<u64> {
        self.atomic(offset, sys::KITE_ATOMIC_COMPARE_SWAP, new, expected)
    }

    /// Replaces the word at `offset` by `new` and returns the previous value. See [`fetch_add`](Self::fetch_add).
    ///
    /// # Errors
    /// See [`fetch_add`](Self::fetch_add).
    pub fn swap(&self, offset: u64, new: u64) -> Result<u64> {
        self.atomic(offset, sys::KITE_ATOMIC_SWAP, new, 0)
    }

    /// Replaces the word at `offset` by 1 if it is 0. Returns `true` if it was 0. See
    /// [`fetch_add`](Self::fetch_add).
    ///
    /// # Errors
    /// See [`fetch_add`](Self::fetch_add).
    pub fn test_and_set(&self, offset: u64) -> Result<bool> {
        Ok(self.compare_swap(offset, 0, 1)? == 0)
    }

    fn atomic(&self, offset: u64, operation: u32, operand: u64, expected: u64) -> Result<u64> {
        let mut atomic = self.atomic_args(offset, operation, operand, expected)?;
        sys::atomic(self.cluster().as_fd(), &mut atomic)?;
        Ok(atomic.value)
    }

    pub(crate) fn atomic_args(
        &self,
        offset: u64,
        operation: u32,
        operand: u64,
        expected: u64,
    ) -> Result<sys::kite_atomic> {
        Ok(sys::kite_atomic {
            handle: self.open_handle()?,
            offset,
            operand,
            expected,
            operation,
            timeout_ms: self.timeout_ms,
            ..Default::default()
        })
    }
}
