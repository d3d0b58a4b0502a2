// SPDX-License-Identifier: GPL-2.0

//! Pages that the kernel shares with a process, which may change all bytes at any time.
//!
//! As with memory that an RNIC writes, no Rust reference into the pages exists. Single words are loaded and
//! stored atomically. All other data are copied first and checked after the copy.
//!
//! The `kernel` crate has no pages of higher order for `VmaMixedMap::vm_insert_page`, and no getter for
//! `vm_pgoff`. With both abstractions this file can be removed.

use super::pages::{ContiguousPages, MemcgCharge};
use crate::bindings::{self, inline};
use kernel::{
    error::to_result,
    mm::virt::{flags, VmaNew},
    page::PAGE_SIZE,
    prelude::*,
    sync::atomic::{Acquire, Atomic, Release},
};

/// Zeroed pages that a process can map.
///
/// # Invariants
///
/// The memory has at least one page.
pub(crate) struct SharedPages(ContiguousPages);

/// Returns the offset in the file at which a mapping begins, in pages.
pub(crate) fn vma_pgoff(vma: &VmaNew) -> u64 {
    // SAFETY: The mapping is under construction, so no other thread changes the field.
    unsafe { (*vma.as_ptr()).vm_pgoff as u64 }
}

impl SharedPages {
    /// Allocates `len` zeroed bytes, rounded up to whole pages and charged to the cgroup of the caller.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory, or over the limit of the cgroup.
    pub(crate) fn new(len: usize) -> Result<Self> {
        // INVARIANT: [`ContiguousPages::new`] allocates at least one page.
        ContiguousPages::new(len, MemcgCharge::Caller).map(Self)
    }

    /// Returns the length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns the word at `OFFSET`, which must be aligned and in the first page.
    fn word_at<const OFFSET: usize>(&self) -> &Atomic<u32> {
        const { assert!(OFFSET % size_of::<u32>() == 0 && OFFSET + size_of::<u32>() <= PAGE_SIZE) };
        let word = self.0.as_ptr().wrapping_add(OFFSET).cast::<u32>();
        // SAFETY:
        // - By the type invariant and the assertion, the word is in the first page and aligned.
        // - The page stays allocated for as long as `self`.
        // - The process may change the word at any time, as a whole or in parts. Any bits are a valid word.
        unsafe { Atomic::from_ptr(word) }
    }

    /// Loads the word at `OFFSET`. Data that the process stored before the word are visible afterwards.
    pub(crate) fn load_acquire<const OFFSET: usize>(&self) -> u32 {
        self.word_at::<OFFSET>().load(Acquire)
    }

    /// Stores `value` to the word at `OFFSET`. The process that loads `value` also sees all earlier stores.
    pub(crate) fn store_release<const OFFSET: usize>(&self, value: u32) {
        self.word_at::<OFFSET>().store(value, Release);
    }

    /// Copies from offset `at` to `bytes`.
    ///
    /// # Errors
    ///
    /// - `ERANGE`: the range exceeds the memory.
    pub(crate) fn read(&self, at: usize, bytes: &mut [u8]) -> Result {
        self.0.read(at, bytes)
    }

    /// Copies `bytes` to offset `at`.
    ///
    /// # Errors
    ///
    /// - `ERANGE`: the range exceeds the memory.
    pub(crate) fn write(&self, at: usize, bytes: &[u8]) -> Result {
        self.0.write(at, bytes)
    }

    /// Maps all pages into a process. Child processes do not inherit the mapping, which may outlive `self`.
    ///
    /// # Errors
    ///
    /// - `EINVAL`: the mapping has another length, or is private.
    /// - Any error of `vm_insert_page`.
    pub(crate) fn mmap(&self, vma: &VmaNew) -> Result {
        if vma.end() - vma.start() != self.len() || vma.flags() & flags::SHARED == 0 {
            return Err(EINVAL);
        }
        vma.set_dontexpand();
        vma.set_dontcopy();
        vma.set_mixedmap();
        for at in (0..self.len()).step_by(PAGE_SIZE) {
            // SAFETY:
            // - The mapping is under construction and has the same length as the memory.
            // - Each page has a reference count of its own, so the mapping keeps the page.
            to_result(unsafe {
                let page = inline::kite_virt_to_page(self.0.as_ptr().wrapping_add(at).cast());
                bindings::vm_insert_page(vma.as_ptr(), vma.start() + at, page)
            })?;
        }
        Ok(())
    }
}
