// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Reads, writes, fills and copies.

use std::mem::MaybeUninit;
use std::os::fd::AsFd;

use super::Region;
use crate::error::{Error, Result};
use crate::sys;

impl Region {
    /// Reads `buffer.len()` bytes at `offset` to `buffer`. After an error the content of `buffer` is unspecified. An
    /// empty buffer checks the handle and the offset only. Needs [`Rights::READ`](crate::Rights::READ).
    ///
    /// # Errors
    /// - [`Error::BadHandle`]: the region was freed through a clone.
    /// - [`Error::Denied`]: the handle lacks the right, or the right was revoked.
    /// - [`Error::HostDown`]: a node that holds the range, or the home, is not in the view.
    /// - [`Error::Io`]: the RNIC or the peer rejected the operation.
    /// - [`Error::NoRnic`]: the RNIC was removed.
    /// - [`Error::NotJoined`]: this node is in no cluster.
    /// - [`Error::OutOfMemory`]: no memory, or the limit of locked memory.
    /// - [`Error::OutOfRange`]: offset and length reach outside the region.
    /// - [`Error::Stale`]: the region was freed.
    /// - [`Error::TimedOut`]: the deadline passed.
    pub fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        sys::read(self.cluster().as_fd(), self.transfer_at(offset)?, buffer)
    }

    /// Reads to memory that may be uninitialized, and returns it initialized. See [`read_at`](Self::read_at).
    ///
    /// # Errors
    /// See [`read_at`](Self::read_at).
    pub fn read_uninit_at<'a>(
        &self,
        buffer: &'a mut [MaybeUninit<u8>],
        offset: u64,
    ) -> Result<&'a mut [u8]> {
        sys::read_uninit(self.cluster().as_fd(), self.transfer_at(offset)?, buffer)
    }

    /// Writes `data` at `offset`. After success each later read by any node returns the data. After an error an
    /// unspecified part is written. Bytes are written in no particular order, and only single bytes are atomic.
    /// Needs [`Rights::WRITE`](crate::Rights::WRITE).
    ///
    /// # Errors
    /// See [`read_at`](Self::read_at).
    pub fn write_at(&self, data: &[u8], offset: u64) -> Result<()> {
        sys::write(self.cluster().as_fd(), self.transfer_at(offset)?, data)
    }

    /// Reads several ranges, each given by its offset and its buffer, concurrently.
    ///
    /// Up to [`SEGMENTS_MAX`](crate::SEGMENTS_MAX) ranges are one request of the kernel. Each request has its own
    /// deadline, and fails before any byte moves if a range reaches outside the region.
    ///
    /// # Errors
    /// See [`read_at`](Self::read_at).
    pub fn read_vectored_at(&self, segments: &mut [(u64, &mut [u8])]) -> Result<()> {
        sys::read_vectored(self.cluster().as_fd(), self.rwv_args()?, segments)
    }

    /// Writes several ranges, each given by its offset and its data, in no particular order. See
    /// [`read_vectored_at`](Self::read_vectored_at) and [`write_at`](Self::write_at).
    ///
    /// # Errors
    /// See [`read_at`](Self::read_at).
    pub fn write_vectored_at(&self, segments: &[(u64, &[u8])]) -> Result<()> {
        sys::write_vectored(self.cluster().as_fd(), self.rwv_args()?, segments)
    }

    /// Fills `len` bytes at `offset` with `byte`. The nodes that hold the range fill it, so no data is transferred.
    /// Needs [`Rights::WRITE`](crate::Rights::WRITE).
    ///
    /// # Errors
    /// See [`read_at`](Self::read_at). After any error but [`Error::OutOfRange`] an unspecified part is filled. After
    /// [`Error::HostDown`], [`Error::Io`], [`Error::NoRnic`], [`Error::NotJoined`], [`Error::Stale`] and
    /// [`Error::TimedOut`] up to 256 KiB may be filled later.
    pub fn fill(&self, byte: u8, offset: u64, len: u64) -> Result<()> {
        let mut fill = self.fill_args(byte, offset, len)?;
        sys::fill(self.cluster().as_fd(), &mut fill)
    }

    /// Copies `len` bytes at `offset` to `to` at `to_offset`. Both regions must be open in one
    /// [`Cluster`](crate::Cluster). The regions may be the same: an overlapping destination receives the former
    /// content of the source. Needs [`Rights::READ`](crate::Rights::READ) for the source and
    /// [`Rights::WRITE`](crate::Rights::WRITE) for the destination.
    ///
    /// A node that holds both ranges copies them. Otherwise this node reads and writes them. The deadline is that of
    /// the source.
    ///
    /// # Errors
    /// - [`Error::Invalid`]: the regions are open in different sessions.
    /// - For the others see [`fill`](Self::fill). Up to 64 KiB may be copied later.
    pub fn copy_to(&self, offset: u64, to: &Region, to_offset: u64, len: u64) -> Result<()> {
        let mut copy = self.copy_args(offset, to, to_offset, len)?;
        sys::copy(self.cluster().as_fd(), &mut copy)
    }

    fn transfer_at(&self, offset: u64) -> Result<sys::Transfer> {
        Ok(sys::Transfer {
            handle: self.open_handle()?,
            offset,
            timeout_ms: self.timeout_ms,
        })
    }

    fn rwv_args(&self) -> Result<sys::kite_rwv> {
        Ok(sys::kite_rwv {
            handle: self.open_handle()?,
            timeout_ms: self.timeout_ms,
            ..Default::default()
        })
    }

    pub(crate) fn rw_args(&self, offset: u64, addr: u64, len: u64) -> Result<sys::kite_rw> {
        Ok(sys::kite_rw {
            handle: self.open_handle()?,
            offset,
            addr,
            len,
            timeout_ms: self.timeout_ms,
            ..Default::default()
        })
    }

    pub(crate) fn fill_args(&self, byte: u8, offset: u64, len: u64) -> Result<sys::kite_fill> {
        Ok(sys::kite_fill {
            handle: self.open_handle()?,
            offset,
            len,
            byte: byte.into(),
            timeout_ms: self.timeout_ms,
        })
    }

    pub(crate) fn copy_args(
        &self,
        offset: u64,
        to: &Region,
        to_offset: u64,
        len: u64,
    ) -> Result<sys::kite_copy> {
        if !self.cluster().is_same_session(to.cluster()) {
            return Err(Error::Invalid);
        }
        Ok(sys::kite_copy {
            from: self.open_handle()?,
            from_offset: offset,
            to: to.open_handle()?,
            to_offset,
            len,
            timeout_ms: self.timeout_ms,
            ..Default::default()
        })
    }
}
