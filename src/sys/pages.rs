// SPDX-License-Identifier: GPL-2.0

//! Physically contiguous memory that the RNIC may read and write at any time.
//!
//! The memory is either allocated, and then zeroed at first, or part of [`PinnedPages`]. A peer can change
//! the bytes during an access, so no Rust reference into the memory exists. Data are copied in and out
//! through raw pointers, and copies are checked after the copy.
//!
//! `kernel::page::Page` covers single pages only. The `kernel` crate has no `alloc_pages_exact`, no
//! `copy_from_user_nofault` and no `si_meminfo`. With these abstractions this file can be removed.

use super::{atomic::apply_atomic, pin::PinnedPages};
use crate::{
    bindings::{self, inline},
    errno::{TryError, TryResult},
};
use core::ptr::NonNull;
use kernel::{
    page::PAGE_SIZE,
    prelude::*,
    sync::{atomic::Atomic, Arc},
};
use kite_core::atomic::AtomicOp as Change;

/// Flag `__GFP_RETRY_MAYFAIL`: reclaim and compact memory, but fail rather than call the OOM killer.
const GFP_RETRY_MAYFAIL: bindings::gfp_t = 1 << bindings::___GFP_RETRY_MAYFAIL_BIT;
/// Flag `__GFP_NORETRY`: fail after a light attempt.
const GFP_NORETRY: bindings::gfp_t = 1 << bindings::___GFP_NORETRY_BIT;
/// Maximum size in bytes of an allocation with [`GFP_RETRY_MAYFAIL`] (`PAGE_ALLOC_COSTLY_ORDER`). Larger
/// allocations use [`GFP_NORETRY`].
const COSTLY_ALLOC_BYTES: usize = PAGE_SIZE << 3;

/// Memory cgroup to which an allocation is charged.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum MemcgCharge {
    /// Cgroup of the current task.
    Caller,
    /// No cgroup.
    Kernel,
}

/// Returns the size of the machine's RAM in bytes.
pub(crate) fn total_ram_bytes() -> u64 {
    let mut info = bindings::sysinfo::default();
    // SAFETY: `info` may be written.
    unsafe { bindings::si_meminfo(&mut info) };
    info.totalram as u64 * u64::from(info.mem_unit)
}

/// Owner of the pages.
enum PagesOwner {
    /// This value, which allocated the pages with `alloc_pages_exact`.
    Allocated,
    /// A process or module. The pages are pinned for as long as the reference is held.
    Pinned { _pinned: Arc<PinnedPages> },
}

/// Contiguous pages.
///
/// # Invariants
///
/// `ptr` is the start of `len` bytes (whole pages) in the kernel's linear mapping. As `owner` states, the
/// pages stay allocated for as long as this value lives.
pub(crate) struct ContiguousPages {
    ptr: NonNull<u8>,
    len: usize,
    owner: PagesOwner,
}

// SAFETY: The memory is only copied from and to, and is not tied to a thread.
unsafe impl Send for ContiguousPages {}
// SAFETY: See `Send`. Concurrent copies may tear, as with any memory that an RNIC writes.
unsafe impl Sync for ContiguousPages {}

impl ContiguousPages {
    /// Allocates `len` zeroed bytes, rounded up to whole pages, at least one page.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory. The kernel logs no warning and kills no process. The caller can report the
    ///   error, or try smaller contiguous blocks.
    pub(crate) fn new(len: usize, charge: MemcgCharge) -> Result<Self> {
        let len = len.max(1).next_multiple_of(PAGE_SIZE);
        let base = match charge {
            MemcgCharge::Caller => bindings::GFP_KERNEL_ACCOUNT,
            MemcgCharge::Kernel => bindings::GFP_KERNEL,
        };
        let retry_flags = if len > COSTLY_ALLOC_BYTES {
            GFP_NORETRY
        } else {
            GFP_RETRY_MAYFAIL
        };
        let flags = base | retry_flags | bindings::__GFP_ZERO | bindings::__GFP_NOWARN;
        // SAFETY: Any length is allowed with these flags. The caller may sleep.
        let ptr = unsafe { bindings::alloc_pages_exact_noprof(len, flags) };
        // INVARIANT: The pages were just allocated and belong to this value.
        Ok(Self {
            ptr: NonNull::new(ptr.cast()).ok_or(ENOMEM)?,
            len,
            owner: PagesOwner::Allocated,
        })
    }

    /// Returns `count` pinned pages from page `first` on, with their present contents.
    ///
    /// # Errors
    ///
    /// - `EINVAL`: the pages are not contiguous.
    pub(crate) fn from_pinned(
        pinned: &Arc<PinnedPages>,
        first: usize,
        count: usize,
    ) -> Result<Self> {
        let ptr = pinned.contiguous_addr(first, count).ok_or(EINVAL)?;
        // INVARIANT: The pages are contiguous and stay pinned for as long as `owner` lives.
        Ok(Self {
            ptr,
            len: count * PAGE_SIZE,
            owner: PagesOwner::Pinned {
                _pinned: pinned.clone(),
            },
        })
    }

    /// Returns the length in bytes, a multiple of the page size.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns the address in the kernel.
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// Returns the first page.
    pub(crate) fn first_page(&self) -> *mut bindings::page {
        // SAFETY: By the type invariants, the memory is in the kernel's linear mapping.
        unsafe { inline::kite_virt_to_page(self.as_ptr().cast()) }
    }

    /// Returns a pointer to `len` bytes at `offset`.
    ///
    /// # Errors
    ///
    /// - `ERANGE`: the range exceeds the memory.
    pub(super) fn range_ptr(&self, offset: usize, len: usize) -> Result<*mut u8> {
        if offset > self.len || len > self.len - offset {
            return Err(ERANGE);
        }
        // SAFETY: `offset` is within the allocation, or one past its end.
        Ok(unsafe { self.ptr.as_ptr().add(offset) })
    }

    /// Copies `src` to `offset`.
    ///
    /// # Errors
    ///
    /// - `ERANGE`: the range exceeds the memory.
    pub(crate) fn write(&self, offset: usize, src: &[u8]) -> Result {
        let dst = self.range_ptr(offset, src.len())?;
        // SAFETY: `range_ptr` checked the destination, and `src` is a separate slice.
        unsafe { core::ptr::copy_nonoverlapping(src.as_ptr(), dst, src.len()) };
        Ok(())
    }

    /// Copies from `offset` to `dst`.
    ///
    /// # Errors
    ///
    /// - `ERANGE`: the range exceeds the memory.
    pub(crate) fn read(&self, offset: usize, dst: &mut [u8]) -> Result {
        let src = self.range_ptr(offset, dst.len())?;
        // SAFETY: `range_ptr` checked the source, and `dst` is a separate slice.
        unsafe { core::ptr::copy_nonoverlapping(src, dst.as_mut_ptr(), dst.len()) };
        Ok(())
    }

    /// Sets `len` bytes at `offset` to `byte`.
    ///
    /// # Errors
    ///
    /// - `ERANGE`: the range exceeds the memory.
    pub(crate) fn fill(&self, offset: usize, len: usize, byte: u8) -> Result {
        let dst = self.range_ptr(offset, len)?;
        // SAFETY: `range_ptr` checked the destination.
        unsafe { core::ptr::write_bytes(dst, byte, len) };
        Ok(())
    }

    /// Copies `len` bytes at `from_offset` of `from` to `offset`. The ranges may overlap.
    ///
    /// # Errors
    ///
    /// - `ERANGE`: one of the ranges exceeds its memory.
    pub(crate) fn copy_from(
        &self,
        offset: usize,
        from: &Self,
        from_offset: usize,
        len: usize,
    ) -> Result {
        let (dst, src) = (
            self.range_ptr(offset, len)?,
            from.range_ptr(from_offset, len)?,
        );
        // SAFETY: `range_ptr` checked both ranges.
        unsafe { core::ptr::copy(src, dst, len) };
        Ok(())
    }

    /// Applies an atomic operation to the word at `offset`, atomically to all processors. Returns the old
    /// value.
    ///
    /// # Errors
    ///
    /// - `ERANGE`: the word exceeds the memory.
    /// - `EINVAL`: `offset` is not a multiple of 8.
    pub(crate) fn apply_atomic(&self, offset: usize, atomic: Change) -> Result<u64> {
        let word = self.range_ptr(offset, size_of::<u64>())?.cast::<u64>();
        if !word.is_aligned() {
            return Err(EINVAL);
        }
        // SAFETY:
        // - `range_ptr` checked the word, which is aligned and stays allocated for as long as `self`.
        // - All other accesses are raw copies by RNICs and by this module, of bytes that may change at any
        //   time.
        // - No code relies on the result of a racing copy, and no copy can tear this operation.
        Ok(apply_atomic(unsafe { Atomic::from_ptr(word) }, atomic))
    }

    /// Copies `len` bytes at `user` of the current process to `offset`, if the memory is present.
    ///
    /// # Errors
    ///
    /// - [`TryError::WouldBlock`]: the memory of the process is not present.
    /// - `ERANGE`: the range exceeds the memory of `self`.
    pub(crate) fn try_write_from_user(&self, offset: usize, user: usize, len: usize) -> TryResult {
        let dst = self.range_ptr(offset, len)?.cast();
        // SAFETY: `range_ptr` checked the destination. The call checks the source.
        let copied = unsafe { bindings::copy_from_user_nofault(dst, user as *const c_void, len) };
        if copied == 0 {
            Ok(())
        } else {
            Err(TryError::WouldBlock)
        }
    }

    /// Copies `len` bytes at `offset` to `user` of the current process, if the memory is present.
    ///
    /// # Errors
    ///
    /// - [`TryError::WouldBlock`]: the memory of the process is not present.
    /// - `ERANGE`: the range exceeds the memory of `self`.
    pub(crate) fn try_read_to_user(&self, offset: usize, user: usize, len: usize) -> TryResult {
        let src = self.range_ptr(offset, len)?.cast();
        // SAFETY: `range_ptr` checked the source. The call checks the destination.
        let copied = unsafe { bindings::copy_to_user_nofault(user as *mut c_void, src, len) };
        if copied == 0 {
            Ok(())
        } else {
            Err(TryError::WouldBlock)
        }
    }
}

impl Drop for ContiguousPages {
    fn drop(&mut self) {
        if matches!(self.owner, PagesOwner::Allocated) {
            // SAFETY: By the type invariants and `owner`, this value allocated the pages, which are freed
            // once.
            unsafe { bindings::free_pages_exact(self.ptr.as_ptr().cast(), self.len) };
        }
    }
}
