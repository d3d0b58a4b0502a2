// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Page-aligned memory that an RNIC may access at any time. No references to its bytes are created.

use std::alloc::{alloc_zeroed, dealloc, handle_alloc_error, Layout};
use std::ptr::NonNull;

use anyhow::{ensure, Result};

const PAGE: usize = 4096;

/// Memory with a fixed address.
#[derive(Debug)]
pub struct Memory {
    start: NonNull<u8>,
    layout: Layout,
}

impl Memory {
    /// Allocates `len` bytes with the content of seed 0.
    ///
    /// # Errors
    /// `len` is 0, or exceeds the address space.
    pub fn new(len: usize) -> Result<Self> {
        ensure!(len > 0, "memory length must be greater than 0");
        let layout = Layout::from_size_align(len, PAGE)?;
        // SAFETY: the size is not zero.
        let start = unsafe { alloc_zeroed(layout) };
        let start = NonNull::new(start).unwrap_or_else(|| handle_alloc_error(layout));
        let memory = Self { start, layout };
        memory.fill(0);
        Ok(memory)
    }

    /// Returns the number of bytes.
    #[allow(clippy::len_without_is_empty)] // the length is never 0
    pub fn len(&self) -> usize {
        self.layout.size()
    }

    /// Returns the address of the first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Fills the memory with the pattern of `seed`.
    pub fn fill(&self, seed: u8) {
        for i in 0..self.len() {
            // SAFETY: in bounds. Volatile, since an RNIC may read the memory at any time.
            unsafe { self.as_ptr().add(i).write_volatile(pattern(seed, i)) };
        }
    }

    /// Copies the bytes at `offset` to `to`.
    ///
    /// # Errors
    /// The range exceeds the memory.
    pub fn load(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        self.check_range(offset, to.len())?;
        for (i, byte) in to.iter_mut().enumerate() {
            // SAFETY: in bounds. Volatile, since an RNIC may write the memory at any time.
            *byte = unsafe { self.as_ptr().add(offset + i).read_volatile() };
        }
        Ok(())
    }

    /// Copies `from` to `offset`.
    ///
    /// # Errors
    /// The range exceeds the memory.
    pub fn store(&self, offset: usize, from: &[u8]) -> Result<()> {
        self.check_range(offset, from.len())?;
        for (i, byte) in from.iter().enumerate() {
            // SAFETY: in bounds. Volatile, since an RNIC may read the memory at any time.
            unsafe { self.as_ptr().add(offset + i).write_volatile(*byte) };
        }
        Ok(())
    }

    fn check_range(&self, offset: usize, len: usize) -> Result<()> {
        let end = offset.checked_add(len);
        ensure!(
            end.is_some_and(|end| end <= self.len()),
            "range exceeds the memory of {} bytes",
            self.len()
        );
        Ok(())
    }

    /// Returns `true` if the memory has the content of [`Self::fill`] with `seed`.
    pub fn matches(&self, seed: u8) -> bool {
        // SAFETY: in bounds. Volatile, since an RNIC may write the memory at any time.
        (0..self.len()).all(|i| unsafe { self.as_ptr().add(i).read_volatile() } == pattern(seed, i))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: `new` allocated the memory with this layout.
        unsafe { dealloc(self.as_ptr(), self.layout) };
    }
}

/// Returns byte `i` of the content of [`Memory::fill`].
fn pattern(seed: u8, i: usize) -> u8 {
    (i % 251) as u8 ^ seed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn different_fill_patterns_are_distinguished() {
        let memory = Memory::new(5000).unwrap();
        assert!(memory.matches(0) && !memory.matches(1));
        memory.fill(1);
        assert!(memory.matches(1) && !memory.matches(0));
        assert_eq!(memory.as_ptr() as usize % PAGE, 0);
        assert!(Memory::new(0).is_err());
    }

    #[test]
    fn load_after_store_returns_the_stored_bytes() {
        let (memory, mut found) = (Memory::new(10).unwrap(), [0; 3]);
        memory.store(7, b"abc").unwrap();
        memory.load(7, &mut found).unwrap();
        assert_eq!(&found, b"abc");
        assert!(memory.store(8, b"abc").is_err());
        assert!(memory.load(usize::MAX, &mut found).is_err());
    }
}
