// SPDX-License-Identifier: GPL-2.0

//! The caller's buffer of a read or write: memory of a process, or of another kernel module.

use super::{
    pages::ContiguousPages,
    pin::{PinMode, PinnedPages},
};
use crate::bindings;
use kernel::{
    prelude::*,
    sync::Arc,
    uaccess::{UserPtr, UserSlice},
};

/// A buffer.
///
/// # Invariants
///
/// That of a kernel user is valid for its length for as long as this lives.
pub(crate) enum Buffer {
    /// Of the current process, at this address. Every access checks it.
    User(usize),
    /// Of a kernel user.
    Kernel(KernelBuffer),
    /// Of a process that need not be the current one, from this byte of what is pinned on.
    Pinned(Arc<PinnedPages>, usize),
    /// Several, one after the other, with the place where each begins. What is asked for is within one.
    Vectored(KVVec<(usize, Buffer)>),
}

/// A kernel user's buffer; made by [`Memory::kernel`] only.
pub(crate) struct KernelBuffer {
    ptr: *mut u8,
    len: usize,
}

// SAFETY: The memory is valid on any thread, and only copied to and from.
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
    /// A buffer of the kernel.
    ///
    /// # Safety
    ///
    /// `ptr` must be valid for `len` bytes while the result lives, to be written if it is read into.
    pub(crate) unsafe fn from_kernel(ptr: *mut u8, len: usize) -> Self {
        // INVARIANT: By the safety requirements.
        Self::Kernel(KernelBuffer { ptr, len })
    }

    /// What is pinned already, and from which byte of that on it is this buffer.
    pub(crate) fn as_pinned(&self) -> Option<(&Arc<PinnedPages>, usize)> {
        match self {
            Self::Pinned(pinned, base) => Some((pinned, *base)),
            _ => None,
        }
    }

    /// That of several which has byte `at`, and where it is there.
    fn segment_at(segments: &[(usize, Self)], at: usize) -> Result<(&Self, usize)> {
        let next = segments.partition_point(|(start, _)| *start <= at);
        let (start, segment) = segments.get(next.wrapping_sub(1)).ok_or(EFAULT)?;
        Ok((segment, at - start))
    }

    /// Copies `len` bytes, from `at` in the buffer to `offset` in `pages`.
    ///
    /// # Errors
    ///
    /// - `EAGAIN` if memory of the process is not present: [`Self::fault_in`] and try again.
    /// - `EFAULT`; `ERANGE` if they are not all in `pages`.
    pub(crate) fn try_copy_to_pages(
        &self,
        pages: &ContiguousPages,
        offset: usize,
        at: usize,
        len: usize,
    ) -> Result {
        match self {
            Self::User(base) => pages.try_write_from_user(offset, base.wrapping_add(at), len),
            Self::Kernel(buffer) => {
                let (from, to) = (buffer.range_ptr(at, len)?, pages.range_ptr(offset, len)?);
                // SAFETY: By the type invariants, and `span` checked both ranges, which are not one another's.
                unsafe { core::ptr::copy_nonoverlapping(from, to, len) };
                Ok(())
            }
            Self::Pinned(pinned, base) => {
                let range = pages.range_ptr(offset, len)?;
                // SAFETY: `span` checked the destination.
                unsafe { pinned.read(base.wrapping_add(at), range, len) }
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
    /// As for [`Self::try_copy_to`].
    pub(crate) fn try_copy_from_pages(
        &self,
        pages: &ContiguousPages,
        offset: usize,
        at: usize,
        len: usize,
    ) -> Result {
        match self {
            Self::User(base) => pages.try_read_to_user(offset, base.wrapping_add(at), len),
            Self::Kernel(buffer) => {
                let (from, to) = (pages.range_ptr(offset, len)?, buffer.range_ptr(at, len)?);
                // SAFETY: As for `try_copy_to`.
                unsafe { core::ptr::copy_nonoverlapping(from, to, len) };
                Ok(())
            }
            Self::Pinned(pinned, base) => {
                let range = pages.range_ptr(offset, len)?;
                // SAFETY: `span` checked the source.
                unsafe { pinned.write(base.wrapping_add(at), range, len) }
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
    /// `EFAULT`.
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
                // SAFETY: By the type invariants, and `span` checked the range; `bytes` are somebody else's.
                unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), range, bytes.len()) };
                Ok(())
            }
            // SAFETY: A slice may be read.
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
    /// `EFAULT`.
    pub(crate) fn read_slice(&self, at: usize, bytes: &mut [u8]) -> Result {
        match self {
            Self::User(base) => {
                let user = UserPtr::from_addr(base.wrapping_add(at));
                UserSlice::new(user, bytes.len()).reader().read_slice(bytes)
            }
            Self::Kernel(buffer) => {
                let range = buffer.range_ptr(at, bytes.len())?;
                // SAFETY: By the type invariants, and `span` checked the range; `bytes` are somebody else's.
                unsafe { core::ptr::copy_nonoverlapping(range, bytes.as_mut_ptr(), bytes.len()) };
                Ok(())
            }
            // SAFETY: A mutable slice may be written.
            Self::Pinned(pinned, base) => unsafe {
                pinned.read(base.wrapping_add(at), bytes.as_mut_ptr(), bytes.len())
            },
            Self::Vectored(segments) => {
                let (segment, at) = Self::segment_at(segments, at)?;
                segment.read_slice(at, bytes)
            }
        }
    }

    /// Makes `len` bytes, `at` bytes into the buffer, present to be copied from, or to if `writable`. May
    /// wait for as long as the owner of the memory likes.
    ///
    /// # Errors
    ///
    /// `EFAULT` if there is no such memory.
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
        // SAFETY: Any address may be tried, and `current` has an `mm`: it asked for its memory to be used.
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

    /// As [`Self::fault_in`], to be pinned, which takes more: what is shared since a fork is copied.
    ///
    /// # Errors
    ///
    /// As for [`Pinned::user`].
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

    /// Pins `len` bytes, `at` bytes into the buffer.
    ///
    /// # Errors
    ///
    /// - `EAGAIN` if memory of the process cannot be pinned as it is: [`Self::fault_in_to_pin`] says why
    ///   not, or try again.
    /// - `EFAULT`, `ENOMEM` for a kernel user.
    pub(crate) fn try_pin(&self, at: usize, len: usize, writable: bool) -> Result<PinnedPages> {
        match self {
            Self::User(base) => {
                let addr = base.checked_add(at).ok_or(EFAULT)?;
                PinnedPages::pin_user(addr, len, writable, PinMode::NoFault).map_err(|_| EAGAIN)
            }
            Self::Pinned(pinned, base) => pinned.slice(base.wrapping_add(at), len),
            Self::Vectored(segments) => {
                let (segment, at) = Self::segment_at(segments, at)?;
                segment.try_pin(at, len, writable)
            }
            // SAFETY: By the type invariants, and `span` checks the range; the caller of a read or
            // write waits for its end.
            Self::Kernel(buffer) => unsafe {
                PinnedPages::from_kernel(buffer.range_ptr(at, len)?, len, None)
            },
        }
    }
}
