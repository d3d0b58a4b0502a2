// SPDX-License-Identifier: GPL-2.0

//! Memory that the kernel shares with a process, which may change all of it at any time.
//!
//! As with memory that an RNIC writes to, nothing refers into it: words are read and written as a whole,
//! anything else is copied, and checked after that.

use super::pages::{ContiguousPages, MemcgCharge};
use crate::bindings::{self, inline};
use kernel::{
    error::to_result,
    mm::virt::{flags, VmaNew},
    page::PAGE_SIZE,
    prelude::*,
    sync::atomic::{Acquire, Atomic, Release},
};

/// Shared memory.
///
/// # Invariants
///
/// It has at least a page.
pub(crate) struct SharedPages(ContiguousPages);

/// Where in the file a mapping is to begin, in pages.
pub(crate) fn vma_pgoff(vma: &VmaNew) -> u64 {
    // SAFETY: The mapping is being made, and nobody else changes it.
    unsafe { (*vma.as_ptr()).vm_pgoff as u64 }
}

impl SharedPages {
    /// Allocates `len` bytes, rounded up to whole pages, zeroed, which the caller pays for.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn new(len: usize) -> Result<Self> {
        // INVARIANT: There is no less than a page.
        ContiguousPages::new(len, MemcgCharge::Caller).map(Self)
    }

    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// The word at `AT`.
    fn word_at<const OFFSET: usize>(&self) -> &Atomic<u32> {
        const { assert!(OFFSET % size_of::<u32>() == 0 && OFFSET + size_of::<u32>() <= PAGE_SIZE) };
        let word = self.0.as_ptr().wrapping_add(OFFSET).cast::<u32>();
        // SAFETY: It is in the first page, by the type invariant, aligned, and stays for as long as `self`.
        // The process may change it at any time, as a whole or in parts: any bits are a word.
        unsafe { Atomic::from_ptr(word) }
    }

    /// What the process says in the word at `AT`; what it wrote before can be read then.
    pub(crate) fn load_acquire<const OFFSET: usize>(&self) -> u32 {
        self.word_at::<OFFSET>().load(Acquire)
    }

    /// Says so in the word at `AT`; the process can then read what was written before.
    pub(crate) fn store_release<const OFFSET: usize>(&self, value: u32) {
        self.word_at::<OFFSET>().store(value, Release);
    }

    /// Copies from `at` to `bytes`.
    ///
    /// # Errors
    ///
    /// `ERANGE` if they are not all there.
    pub(crate) fn read(&self, at: usize, bytes: &mut [u8]) -> Result {
        self.0.read(at, bytes)
    }

    /// Copies `bytes` to `at`.
    ///
    /// # Errors
    ///
    /// `ERANGE` if they are not all there.
    pub(crate) fn write(&self, at: usize, bytes: &[u8]) -> Result {
        self.0.write(at, bytes)
    }

    /// Maps all of it into a process, whose children do not get it. The mapping may outlive this.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the process asks for another length, or for a copy of its own.
    pub(crate) fn mmap(&self, vma: &VmaNew) -> Result {
        if vma.end() - vma.start() != self.len() || vma.flags() & flags::SHARED == 0 {
            return Err(EINVAL);
        }
        vma.set_dontexpand();
        vma.set_dontcopy();
        vma.set_mixedmap();
        for at in (0..self.len()).step_by(PAGE_SIZE) {
            // SAFETY: The mapping is being made and has as many bytes as the memory, each of whose pages has
            // a count of references of its own.
            to_result(unsafe {
                let page = inline::kite_virt_to_page(self.0.as_ptr().wrapping_add(at).cast());
                bindings::vm_insert_page(vma.as_ptr(), vma.start() + at, page)
            })?;
        }
        Ok(())
    }
}
