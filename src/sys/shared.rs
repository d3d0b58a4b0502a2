// SPDX-License-Identifier: GPL-2.0

//! Memory that the kernel shares with a process, which may change all of it at any time.
//!
//! As with memory that an RNIC writes to, nothing refers into it: words are read and written as a whole,
//! anything else is copied, and checked after that.

use super::pages::{Charge, Pages};
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
pub(crate) struct Shared(Pages);

/// Where in the file a mapping is to begin, in pages.
pub(crate) fn page_offset(vma: &VmaNew) -> u64 {
    // SAFETY: The mapping is being made, and nobody else changes it.
    unsafe { (*vma.as_ptr()).vm_pgoff as u64 }
}

impl Shared {
    /// Allocates `len` bytes, rounded up to whole pages, zeroed, which the caller pays for.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn new(len: usize) -> Result<Self> {
        // INVARIANT: There is no less than a page.
        Pages::new(len, Charge::Caller).map(Self)
    }

    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// The word at `AT`.
    fn word<const AT: usize>(&self) -> &Atomic<u32> {
        const { assert!(AT % size_of::<u32>() == 0 && AT + size_of::<u32>() <= PAGE_SIZE) };
        let word = self.0.as_ptr().wrapping_add(AT).cast::<u32>();
        // SAFETY: It is in the first page, by the type invariant, aligned, and stays for as long as `self`.
        // The process may change it at any time, as a whole or in parts: any bits are a word.
        unsafe { Atomic::from_ptr(word) }
    }

    /// What the process says in the word at `AT`; what it wrote before can be read then.
    pub(crate) fn load<const AT: usize>(&self) -> u32 {
        self.word::<AT>().load(Acquire)
    }

    /// Says so in the word at `AT`; the process can then read what was written before.
    pub(crate) fn store<const AT: usize>(&self, value: u32) {
        self.word::<AT>().store(value, Release);
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
    pub(crate) fn map(&self, vma: &VmaNew) -> Result {
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
