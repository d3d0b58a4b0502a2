// SPDX-License-Identifier: GPL-2.0

//! Caller's buffer of a read or write: memory of a process or of another kernel module.
//!
//! `kernel::uaccess` covers copies for the current process only. The `kernel` crate wraps neither
//! `fault_in_readable` nor `fault_in_safe_writeable`, and its iterators over buffers do not cover pinned
//! pages. With such an iterator this file can be removed.

use super::{
    pages::ContiguousPages,
    pin::{PinMode, PinnedPages},
};
use crate::{
    bindings,
    errno::{TryError, TryResult},
};
use kernel::{
    prelude::*,
    sync::Arc,
    uaccess::{UserPtr, UserSlice},
};

/// Buffer of one of four kinds.
///
/// # Invariants
///
/// The memory of [`KernelBuffer`] is valid for its length for as long as this value lives.
pub(crate) enum Buffer {
    /// Memory of the current process at this address. Every access checks the address.
    User(usize),
    /// Memory of another kernel module.
    Kernel(KernelBuffer),
    /// Pinned memory of any process, and the offset in bytes at which the buffer begins there.
    Pinned(Arc<PinnedPages>, usize),
    /// Consecutive segments, each with its start offset. Every access must lie within one segment.
    Vectored(KVVec<(usize, Buffer)>),
}

/// Buffer of another kernel module, created only by [`Buffer::from_kernel`].
pub(crate) struct KernelBuffer {
    ptr: *mut u8,
    len: usize,
}

// SAFETY: The memory is valid on any thread, and is only copied from and to.
unsafe impl Send for KernelBuffer {}

impl KernelBuffer {
    fn range_ptr(&self, at: usize, len: usize) -> Result<*mut u8> {
        if at > self.len || len > self.len - at {
            return Err(EFAULT);
        }
        Ok(self.ptr.wrapping_add(at))
    }
}

impl Buffer {
    /// Creates a buffer from kernel memory.
    ///
    /// # Safety
    ///
    /// `ptr` must be valid for reads of `len` bytes while the result lives, and for writes if data are read
    /// into the buffer.
    pub(crate) unsafe fn from_kernel(ptr: *mut u8, len: usize) -> Self {
        // INVARIANT: By the safety requirements, the memory is valid for `len` bytes.
        Self::Kernel(KernelBuffer { ptr, len })
    }

    /// Returns the pinned pages and the offset of this buffer in them, or `None` if the buffer is of another
    /// kind.
    pub(crate) fn as_pinned(&self) -> Option<(&Arc<PinnedPages>, usize)> {
        match self {
            Self::Pinned(pinned, base) => Some((pinned, *base)),
            _ => None,
        }
    }

    /// Returns the segment that contains byte `at`, and the offset of the byte in the segment.
    fn segment_at(segments: &[(usize, Self)], at: usize) -> Result<(&Self, usize)> {
        let next = segments.partition_point(|(start, _)| *start <= at);
        let (start, segment) = segments.get(next.wrapping_sub(1)).ok_or(EFAULT)?;
        Ok((segment, at - start))
    }

    /// Copies `len` bytes, from `at` in the buffer to `offset` in `pages`.
    ///
    /// # Errors
    ///
    /// - [`TryError::WouldBlock`]: memory of the process is not present. Call [`Self::fault_in`] and try
    ///   again.
    /// - `EFAULT`: the range exceeds the buffer.
    /// - `ERANGE`: the range exceeds `pages`.
    pub(crate) fn try_copy_to_pages(
        &self,
        pages: &ContiguousPages,
        offset: usize,
        at: usize,
        len: usize,
    ) -> TryResult {
        match self {
            Self::User(base) => pages.try_write_from_user(offset, base.wrapping_add(at), len),
            Self::Kernel(buffer) => {
                let (from, to) = (buffer.range_ptr(at, len)?, pages.range_ptr(offset, len)?);
                // SAFETY: By the type invariants, the source is valid. `range_ptr` checked both ranges, which
                // do not overlap.
                unsafe { core::ptr::copy_nonoverlapping(from, to, len) };
                Ok(())
            }
            Self::Pinned(pinned, base) => {
                let range = pages.range_ptr(offset, len)?;
                // SAFETY: `range_ptr` checked the destination.
                Ok(unsafe { pinned.read(base.wrapping_add(at), range, len) }?)
            }
            Self::Vectored(segments) => {
                let (segment, at) = Self::segment_at(segments, at)?;
                segment.try_copy_to_pages(pages, offset, at, len)
            }
        }
    }

    /// Copies `len` bytes, from `offset` in `pages` to `at` in the buffer.
    ///
    /// # Errors
    ///
    /// See [`Self::try_copy_to_pages`].
    pub(crate) fn try_copy_from_pages(
        &self,
        pages: &ContiguousPages,
        offset: usize,
        at: usize,
        len: usize,
    ) -> TryResult {
        match self {
            Self::User(base) => pages.try_read_to_user(offset, base.wrapping_add(at), len),
            Self::Kernel(buffer) => {
                let (from, to) = (pages.range_ptr(offset, len)?, buffer.range_ptr(at, len)?);
                // SAFETY: By the type invariants, the destination is valid. `range_ptr` checked both ranges,
                // which do not overlap.
                unsafe { core::ptr::copy_nonoverlapping(from, to, len) };
                Ok(())
            }
            Self::Pinned(pinned, base) => {
                let range = pages.range_ptr(offset, len)?;
                // SAFETY: `range_ptr` checked the source.
                Ok(unsafe { pinned.write(base.wrapping_add(at), range, len) }?)
            }
            Self::Vectored(segments) => {
                let (segment, at) = Self::segment_at(segments, at)?;
                segment.try_copy_from_pages(pages, offset, at, len)
            }
        }
    }

    /// Copies `bytes` to `at` in the buffer.
    ///
    /// # Errors
    ///
    /// - `EFAULT`: the range exceeds the buffer, or memory of the process is not accessible.
    pub(crate) fn write_slice(&self, at: usize, bytes: &[u8]) -> Result {
        match self {
            Self::User(base) => {
                let user = UserPtr::from_addr(base.wrapping_add(at));
                UserSlice::new(user, bytes.len())
                    .writer()
                    .write_slice(bytes)
            }
            Self::Kernel(buffer) => {
                let range = buffer.range_ptr(at, bytes.len())?;
                // SAFETY: By the type invariants, the destination is valid, and `range_ptr` checked the
                // range. `bytes` is a separate slice.
                unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), range, bytes.len()) };
                Ok(())
            }
            // SAFETY: The slice is valid for reads of its length.
            Self::Pinned(pinned, base) => unsafe {
                pinned.write(base.wrapping_add(at), bytes.as_ptr(), bytes.len())
            },
            Self::Vectored(segments) => {
                let (segment, at) = Self::segment_at(segments, at)?;
                segment.write_slice(at, bytes)
            }
        }
    }

    /// Copies from `at` in the buffer to `bytes`.
    ///
    /// # Errors
    ///
    /// - `EFAULT`: the range exceeds the buffer, or memory of the process is not accessible.
    pub(crate) fn read_slice(&self, at: usize, bytes: &mut [u8]) -> Result {
        match self {
            Self::User(base) => {
                let user = UserPtr::from_addr(base.wrapping_add(at));
                UserSlice::new(user, bytes.len()).reader().read_slice(bytes)
            }
            Self::Kernel(buffer) => {
                let range = buffer.range_ptr(at, bytes.len())?;
                // SAFETY: By the type invariants, the source is valid, and `range_ptr` checked the range.
                // `bytes` is a separate slice.
                unsafe { core::ptr::copy_nonoverlapping(range, bytes.as_mut_ptr(), bytes.len()) };
                Ok(())
            }
            // SAFETY: The mutable slice is valid for writes of its length.
            Self::Pinned(pinned, base) => unsafe {
                pinned.read(base.wrapping_add(at), bytes.as_mut_ptr(), bytes.len())
            },
            Self::Vectored(segments) => {
                let (segment, at) = Self::segment_at(segments, at)?;
                segment.read_slice(at, bytes)
            }
        }
    }

    /// Faults in `len` bytes at `at` in the buffer, for reading, or for writing if `writable`.
    ///
    /// The wait is unbounded: a page fault handler in user space (`userfaultfd`) can delay the call.
    ///
    /// # Errors
    ///
    /// - `EFAULT`: the process has no such memory.
    pub(crate) fn fault_in(&self, at: usize, len: usize, writable: bool) -> Result {
        let base = match self {
            Self::User(base) => base,
            Self::Kernel(_) | Self::Pinned(..) => return Ok(()),
            Self::Vectored(segments) => {
                let (segment, at) = Self::segment_at(segments, at)?;
                return segment.fault_in(at, len, writable);
            }
        };
        let addr = base.wrapping_add(at) as *const c_char;
        // SAFETY: Any address may be tried. `current` has an `mm`, because the request came from this
        // process.
        let not_faulted = unsafe {
            if writable {
                bindings::fault_in_safe_writeable(addr, len)
            } else {
                bindings::fault_in_readable(addr, len)
            }
        };
        if not_faulted == 0 {
            Ok(())
        } else {
            Err(EFAULT)
        }
    }

    /// Like [`Self::fault_in`], for a later pin, which needs more: pages shared since a fork are copied.
    ///
    /// # Errors
    ///
    /// See [`PinnedPages::pin_user`].
    pub(crate) fn fault_in_for_pin(&self, at: usize, len: usize, writable: bool) -> Result {
        match self {
            Self::User(base) => {
                let addr = base.checked_add(at).ok_or(EFAULT)?;
                PinnedPages::pin_user(addr, len, writable, PinMode::Fault).map(drop)
            }
            Self::Kernel(_) | Self::Pinned(..) => Ok(()),
            Self::Vectored(segments) => {
                let (segment, at) = Self::segment_at(segments, at)?;
                segment.fault_in_for_pin(at, len, writable)
            }
        }
    }

    /// Pins `len` bytes at `at` in the buffer.
    ///
    /// # Errors
    ///
    /// - [`TryError::WouldBlock`]: memory of the process cannot be pinned without a fault. Call
    ///   [`Self::fault_in_for_pin`], which returns the cause of a permanent failure, and try again.
    /// - `EFAULT`, `ENOMEM`: memory of another kernel module or pinned memory: the range exceeds the buffer,
    ///   or out of memory.
    pub(crate) fn try_pin(&self, at: usize, len: usize, writable: bool) -> TryResult<PinnedPages> {
        match self {
            Self::User(base) => {
                let addr = base.checked_add(at).ok_or(EFAULT)?;
                PinnedPages::pin_user(addr, len, writable, PinMode::NoFault)
                    .map_err(|_| TryError::WouldBlock)
            }
            Self::Pinned(pinned, base) => Ok(pinned.slice(base.wrapping_add(at), len)?),
            Self::Vectored(segments) => {
                let (segment, at) = Self::segment_at(segments, at)?;
                segment.try_pin(at, len, writable)
            }
            // SAFETY: By the type invariants, the memory is valid, and `range_ptr` checks the range. The
            // caller of a read or write waits for its end, so the memory outlives the result.
            Self::Kernel(buffer) => unsafe {
                Ok(PinnedPages::from_kernel(
                    buffer.range_ptr(at, len)?,
                    len,
                    None,
                )?)
            },
        }
    }
}
