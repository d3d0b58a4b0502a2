// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Memory of this program that can be registered.

use std::ptr::NonNull;

use super::Mapping;
use crate::error::Result;

/// Memory for [`Cluster::register_region`](crate::Cluster::register_region) and
/// [`Cluster::reg_mr`](crate::Cluster::reg_mr).
///
/// The memory is accessed by copies. A concurrent access of another node can make a copy inconsistent. A region keeps
/// the pages, also after the buffer is dropped.
///
/// # Examples
/// ```
/// let buffer = kite::Buffer::new(4096)?;
/// buffer.store(0, b"hello")?;
/// let mut bytes = [0; 5];
/// buffer.load(0, &mut bytes)?;
/// assert_eq!(&bytes, b"hello");
/// # Ok::<(), kite::Error>(())
/// ```
#[derive(Debug)]
pub struct Buffer(Mapping);

impl Buffer {
    /// Allocates `len` zeroed bytes, at least 1.
    ///
    /// # Errors
    /// - [`Error::Invalid`](crate::Error::Invalid): a length of 0.
    /// - [`Error::OutOfMemory`](crate::Error::OutOfMemory): no memory or address space.
    pub fn new(len: usize) -> Result<Self> {
        Mapping::anonymous(len).map(Self)
    }

    /// Returns a buffer of existing memory. [`Cluster::register_region`](crate::Cluster::register_region) needs memory
    /// that begins at a page.
    ///
    /// # Safety
    /// `len` bytes at `start` must stay valid for reads and writes while the result exists. While the result, or a
    /// region or MR of the memory, exists, there must be no reference to the memory: it changes at any time.
    pub unsafe fn from_raw(start: NonNull<u8>, len: usize) -> Self {
        // SAFETY: by the safety requirements of this function.
        Self(unsafe { Mapping::borrowed(start, len) })
    }

    /// Returns the bytes, at least 1.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns a pointer to the first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.0.as_ptr()
    }

    /// Copies from `offset` to `bytes`.
    ///
    /// # Errors
    /// - [`Error::OutOfRange`](crate::Error::OutOfRange): the range is outside the buffer.
    pub fn load(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        self.0.load(offset, bytes)
    }

    /// Copies `bytes` to `offset`.
    ///
    /// # Errors
    /// - [`Error::OutOfRange`](crate::Error::OutOfRange): the range is outside the buffer.
    pub fn store(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        self.0.store(offset, bytes)
    }

    pub(crate) fn mapping(&self) -> &Mapping {
        &self.0
    }
}
