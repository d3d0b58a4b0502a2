// SPDX-License-Identifier: GPL-2.0

//! Physically contiguous memory that the RNIC may read and write at any time: zeroed at first, or that of somebody
//! else, pinned.
//!
//! Because a peer can change the bytes while we look, no reference into the memory is ever made: it
//! is copied in and out through raw pointers, and what is copied out is checked after the copy.

use super::pin::PinnedPages;
use crate::bindings::{self, inline};
use core::ptr::NonNull;
use kernel::{
    page::PAGE_SIZE,
    prelude::*,
    sync::{
        atomic::{Atomic, Full, Relaxed},
        Arc,
    },
};
use kite_core::atomic::AtomicOp as Change;

/// Reclaim and compact memory, but fail rather than call the OOM killer: `__GFP_RETRY_MAYFAIL`.
const GFP_RETRY_MAYFAIL: bindings::gfp_t = 1 << bindings::___GFP_RETRY_MAYFAIL_BIT;
/// Give up early: `__GFP_NORETRY`.
const GFP_NORETRY: bindings::gfp_t = 1 << bindings::___GFP_NORETRY_BIT;
/// Blocks up to this many bytes are worth an effort (`PAGE_ALLOC_COSTLY_ORDER`).
const COSTLY_ALLOC_BYTES: usize = PAGE_SIZE << 3;

/// Who pays for memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum MemcgCharge {
    /// The cgroup of the current task.
    Caller,
    /// The kernel.
    Kernel,
}

/// Changes a word as one step to all processors. Returns what it was.
pub(super) fn apply_atomic(word: &Atomic<u64>, atomic: Change) -> u64 {
    let mut old = word.load(Relaxed);
    while let Some(new) = atomic.apply(old) {
        match word.cmpxchg(old, new, Full) {
            Ok(_) => break,
            Err(now) => old = now,
        }
    }
    old
}

/// Bytes of all memory of this machine.
pub(crate) fn total_ram_bytes() -> u64 {
    let mut info = bindings::sysinfo::default();
    // SAFETY: `info` may be written.
    unsafe { bindings::si_meminfo(&mut info) };
    info.totalram as u64 * u64::from(info.mem_unit)
}

/// Whose pages they are.
enum PagesOwner {
    /// Ours, from `alloc_pages_exact`.
    Allocated,
    /// Those of a process or module, which are pinned.
    Pinned { _pinned: Arc<PinnedPages> },
}

/// Contiguous pages.
///
/// # Invariants
///
/// `ptr` is the start of `len` bytes (whole pages) in the kernel's linear mapping, that stay for as long as this
/// lives, as `owner` says.
pub(crate) struct ContiguousPages {
    ptr: NonNull<u8>,
    len: usize,
    owner: PagesOwner,
}

// SAFETY: The memory is only copied to and from; nothing is tied to a thread.
unsafe impl Send for ContiguousPages {}
// SAFETY: As above. Concurrent copies may tear, as with any memory that an RNIC writes to.
unsafe impl Sync for ContiguousPages {}

impl ContiguousPages {
    /// Allocates `len` bytes, rounded up to whole pages, zeroed.
    ///
    /// # Errors
    ///
    /// `ENOMEM`, without a warning and without killing anybody for memory: whoever asks for much can be
    /// told no, and who asked for large contiguous blocks has smaller ones to try.
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
        // SAFETY: Any length and these flags are fine; we may sleep.
        let ptr = unsafe { bindings::alloc_pages_exact_noprof(len, flags) };
        // INVARIANT: We just allocated it.
        Ok(Self {
            ptr: NonNull::new(ptr.cast()).ok_or(ENOMEM)?,
            len,
            owner: PagesOwner::Allocated,
        })
    }

    /// `count` pinned pages from `first` on, which have what they have.
    ///
    /// # Errors
    ///
    /// `EINVAL` if they are not contiguous.
    pub(crate) fn from_pinned(
        pinned: &Arc<PinnedPages>,
        first: usize,
        count: usize,
    ) -> Result<Self> {
        let ptr = pinned.contiguous_addr(first, count).ok_or(EINVAL)?;
        // INVARIANT: They are contiguous, and pinned for as long as the owner lives.
        Ok(Self {
            ptr,
            len: count * PAGE_SIZE,
            owner: PagesOwner::Pinned {
                _pinned: pinned.clone(),
            },
        })
    }

    /// Bytes, a multiple of the page size.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Address in the kernel.
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// The first page.
    pub(crate) fn first_page(&self) -> *mut bindings::page {
        // SAFETY: The memory is in the kernel's linear mapping, by the type invariants.
        unsafe { inline::kite_virt_to_page(self.as_ptr().cast()) }
    }

    /// Returns a pointer to `len` bytes at `offset`.
    ///
    /// # Errors
    ///
    /// `ERANGE` if they are not all ours.
    pub(super) fn range_ptr(&self, offset: usize, len: usize) -> Result<*mut u8> {
        if offset > self.len || len > self.len - offset {
            return Err(ERANGE);
        }
        // SAFETY: `offset` is within the allocation, or one past it.
        Ok(unsafe { self.ptr.as_ptr().add(offset) })
    }

    /// Copies `src` to `offset`.
    pub(crate) fn write(&self, offset: usize, src: &[u8]) -> Result {
        let dst = self.range_ptr(offset, src.len())?;
        // SAFETY: `span` checked the destination, and `src` is a slice of somebody else's.
        unsafe { core::ptr::copy_nonoverlapping(src.as_ptr(), dst, src.len()) };
        Ok(())
    }

    /// Copies from `offset` to `dst`.
    pub(crate) fn read(&self, offset: usize, dst: &mut [u8]) -> Result {
        let src = self.range_ptr(offset, dst.len())?;
        // SAFETY: `span` checked the source, and `dst` is a slice of somebody else's.
        unsafe { core::ptr::copy_nonoverlapping(src, dst.as_mut_ptr(), dst.len()) };
        Ok(())
    }

    /// Sets `len` bytes at `offset`.
    ///
    /// # Errors
    ///
    /// `ERANGE` if they are not all ours.
    pub(crate) fn fill(&self, offset: usize, len: usize, byte: u8) -> Result {
        let dst = self.range_ptr(offset, len)?;
        // SAFETY: `span` checked the destination.
        unsafe { core::ptr::write_bytes(dst, byte, len) };
        Ok(())
    }

    /// Copies `len` bytes at `from_offset` of `from` to `offset`. The two may overlap.
    ///
    /// # Errors
    ///
    /// `ERANGE` if they are not all there.
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
        // SAFETY: `span` checked both places.
        unsafe { core::ptr::copy(src, dst, len) };
        Ok(())
    }

    /// Changes the word at `offset`, a multiple of 8, as one step to all processors. Returns what it was.
    ///
    /// # Errors
    ///
    /// `ERANGE` if it is not ours; `EINVAL` if it is no word's place.
    pub(crate) fn apply_atomic(&self, offset: usize, atomic: Change) -> Result<u64> {
        let word = self.range_ptr(offset, size_of::<u64>())?.cast::<u64>();
        if !word.is_aligned() {
            return Err(EINVAL);
        }
        // SAFETY: `span` checked the place, which is aligned, and stays for as long as `self`. All other
        // accesses are raw copies, by RNICs and by us, to or from bytes that may change at any time: of
        // those that race nothing is expected, and none can make this one tear.
        Ok(apply_atomic(unsafe { Atomic::from_ptr(word) }, atomic))
    }

    /// Copies `len` bytes of the current process at `user` to `offset`, if they are present.
    ///
    /// # Errors
    ///
    /// `EAGAIN` if they are not.
    pub(crate) fn try_write_from_user(&self, offset: usize, user: usize, len: usize) -> Result {
        let dst = self.range_ptr(offset, len)?.cast();
        // SAFETY: `span` checked the destination; the source is checked by the call.
        let copied = unsafe { bindings::copy_from_user_nofault(dst, user as *const c_void, len) };
        if copied == 0 {
            Ok(())
        } else {
            Err(EAGAIN)
        }
    }

    /// Copies `len` bytes at `offset` to the current process at `user`, if its memory is present.
    ///
    /// # Errors
    ///
    /// `EAGAIN` if it is not.
    pub(crate) fn try_read_to_user(&self, offset: usize, user: usize, len: usize) -> Result {
        let src = self.range_ptr(offset, len)?.cast();
        // SAFETY: `span` checked the source; the destination is checked by the call.
        let copied = unsafe { bindings::copy_to_user_nofault(user as *mut c_void, src, len) };
        if copied == 0 {
            Ok(())
        } else {
            Err(EAGAIN)
        }
    }
}

impl Drop for ContiguousPages {
    fn drop(&mut self) {
        if matches!(self.owner, PagesOwner::Allocated) {
            // SAFETY: By the type invariants, and `owner`.
            unsafe { bindings::free_pages_exact(self.ptr.as_ptr().cast(), self.len) };
        }
    }
}
