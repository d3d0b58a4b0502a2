// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Memory of this program that can be a region: others read and write it while the program does.

use std::ptr::NonNull;

use crate::error::Result;
use crate::shared::Mapping;

/// Memory that [`Cluster::register_region`](crate::Cluster::register_region) makes regions of.
///
/// It is copied in and out. What others do to it at the same time can make a copy a mixture of bytes, but no more.
/// A region keeps the memory that it has, also when this is dropped.
#[derive(Debug)]
pub struct Buffer(Mapping);

impl Buffer {
    /// New memory of `len` bytes, at least 1, zeroed.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid), [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub fn new(len: usize) -> Result<Self> {
        Mapping::anonymous(len).map(Self)
    }

    /// Memory that is there, which begins at a page.
    ///
    /// # Safety
    /// The `len` bytes at `at` must be valid for reads and writes for as long as the result lives. For as long as
    /// it lives, or any region that is made of it, nothing may refer into them, as they change at any time.
    pub unsafe fn from_raw(start: NonNull<u8>, len: usize) -> Self {
        // SAFETY: the caller vouches for it.
        Self(unsafe { Mapping::borrowed(start, len) })
    }

    /// Bytes.
    #[allow(clippy::len_without_is_empty)] // it never is
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Where it is.
    pub fn as_ptr(&self) -> *mut u8 {
        self.0.as_ptr()
    }

    /// Copies the bytes from `at` on to `bytes`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`](crate::Error::OutOfRange).
    pub fn load(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        self.0.load(offset, bytes)
    }

    /// Copies `bytes` to `at`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`](crate::Error::OutOfRange).
    pub fn store(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        self.0.store(offset, bytes)
    }

    pub(crate) fn mapping(&self) -> &Mapping {
        &self.0
    }
}
