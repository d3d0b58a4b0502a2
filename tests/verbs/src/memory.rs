// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Memory that an RNIC reads and writes: page-aligned, present, and never borrowed while it does.

use std::alloc::{alloc_zeroed, dealloc, handle_alloc_error, Layout};
use std::ptr::NonNull;

use anyhow::{ensure, Result};

const PAGE: usize = 4096;

/// Bytes at a fixed place.
#[derive(Debug)]
pub struct Memory {
    start: NonNull<u8>,
    layout: Layout,
}

impl Memory {
    /// So many, at least one, filled with seed 0.
    ///
    /// # Errors
    /// If there are none, or too many.
    pub fn new(len: usize) -> Result<Self> {
        ensure!(len > 0, "no bytes");
        let layout = Layout::from_size_align(len, PAGE)?;
        // SAFETY: the size is not zero.
        let start = unsafe { alloc_zeroed(layout) };
        let start = NonNull::new(start).unwrap_or_else(|| handle_alloc_error(layout));
        let memory = Self { start, layout };
        memory.fill(0);
        Ok(memory)
    }

    /// Returns the number of bytes.
    #[allow(clippy::len_without_is_empty)] // it never is
    pub fn len(&self) -> usize {
        self.layout.size()
    }

    /// Where they are.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Fills it with bytes that follow from `seed`.
    pub fn fill(&self, seed: u8) {
        for i in 0..self.len() {
            // SAFETY: in bounds. Volatile, since an RNIC may read the memory at any time.
            unsafe { self.as_ptr().add(i).write_volatile(byte(seed, i)) };
        }
    }

    /// Copies bytes out, from `at` on.
    ///
    /// # Errors
    /// If there are not so many.
    pub fn load(&self, at: usize, to: &mut [u8]) -> Result<()> {
        self.check(at, to.len())?;
        for (i, byte) in to.iter_mut().enumerate() {
            // SAFETY: in bounds; volatile, since an RNIC may have written it.
            *byte = unsafe { self.as_ptr().add(at + i).read_volatile() };
        }
        Ok(())
    }

    /// Copies bytes in, from `at` on.
    ///
    /// # Errors
    /// If there are not so many.
    pub fn store(&self, at: usize, from: &[u8]) -> Result<()> {
        self.check(at, from.len())?;
        for (i, byte) in from.iter().enumerate() {
            // SAFETY: in bounds. Volatile, since an RNIC may read the memory at any time.
            unsafe { self.as_ptr().add(at + i).write_volatile(*byte) };
        }
        Ok(())
    }

    fn check(&self, at: usize, len: usize) -> Result<()> {
        let end = at.checked_add(len);
        ensure!(
            end.is_some_and(|end| end <= self.len()),
            "more than there is"
        );
        Ok(())
    }

    /// Returns `true` if the memory has the content of [`Self::fill`] with `seed`.
    pub fn holds(&self, seed: u8) -> bool {
        // SAFETY: in bounds; volatile, since an RNIC may have written it.
        (0..self.len()).all(|i| unsafe { self.as_ptr().add(i).read_volatile() } == byte(seed, i))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: it was allocated with this layout.
        unsafe { dealloc(self.as_ptr(), self.layout) };
    }
}

fn byte(seed: u8, i: usize) -> u8 {
    (i % 251) as u8 ^ seed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn different_fill_patterns_are_distinguished() {
        let memory = Memory::new(5000).unwrap();
        assert!(memory.holds(0) && !memory.holds(1));
        memory.fill(1);
        assert!(memory.holds(1) && !memory.holds(0));
        assert_eq!(memory.as_ptr() as usize % PAGE, 0);
        assert!(Memory::new(0).is_err());
    }

    #[test]
    fn what_is_stored_is_loaded() {
        let (memory, mut found) = (Memory::new(10).unwrap(), [0; 3]);
        memory.store(7, b"abc").unwrap();
        memory.load(7, &mut found).unwrap();
        assert_eq!(&found, b"abc");
        assert!(memory.store(8, b"abc").is_err());
        assert!(memory.load(usize::MAX, &mut found).is_err());
    }
}
