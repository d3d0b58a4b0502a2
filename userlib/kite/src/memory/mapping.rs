// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Memory that this process and the kernel or RNIC access concurrently.
//!
//! The only Rust references to the memory are those to atomic words. Other values are copied in and out. A concurrent
//! access can at most make a copy inconsistent.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU32;

use crate::error::{Error, Result};

/// Mapping, unmapped on drop.
///
/// # Invariants
/// `len` bytes at `start` are mapped readable and writable.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    len: usize,
    /// Process that mapped the memory. A forked child may have another mapping at the address.
    owner_pid: u32,
}

// SAFETY: the memory belongs to no thread. It is accessed by copies and atomically only.
unsafe impl Send for Mapping {}
// SAFETY: as above. Concurrent copies of two threads can be inconsistent, as with the kernel.
unsafe impl Sync for Mapping {}

/// Structure of the ABI.
///
/// # Safety
/// The type must have no padding, and every bit pattern must be a valid value.
pub(crate) unsafe trait Pod: Copy {}

impl Mapping {
    /// Maps zeroed private memory.
    pub(crate) fn anonymous(len: usize) -> Result<Self> {
        Self::map(len, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
    }

    /// Maps memory of the kernel at `offset` of the device.
    pub(crate) fn from_device(device: &File, offset: u64, len: usize) -> Result<Self> {
        Self::map(len, libc::MAP_SHARED, device.as_raw_fd(), offset)
    }

    fn map(len: usize, flags: libc::c_int, fd: RawFd, offset: u64) -> Result<Self> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let offset = libc::off_t::try_from(offset).map_err(|_| Error::Invalid)?;
        // SAFETY: a new mapping changes no memory in use.
        let addr = unsafe { libc::mmap(ptr::null_mut(), len, protection, flags, fd, offset) };
        if addr == libc::MAP_FAILED {
            let errno = io::Error::last_os_error().raw_os_error();
            return Err(Error::from_errno(errno.unwrap_or(libc::ENOMEM)));
        }
        let start = NonNull::new(addr.cast()).ok_or(Error::Fault)?;
        Ok(Self {
            start,
            len,
            owner_pid: std::process::id(),
        })
    }

    /// Returns a view of memory that the caller has mapped.
    ///
    /// # Safety
    /// `len` bytes at `start` must stay valid for reads and writes while the result exists.
    pub(crate) unsafe fn borrowed(start: NonNull<u8>, len: usize) -> Self {
        // No process has the number 0, so the memory is not unmapped.
        Self {
            start,
            len,
            owner_pid: 0,
        }
    }

    /// Returns the bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns a pointer to the first byte.
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Returns the address of the first byte.
    pub(crate) fn addr(&self) -> u64 {
        self.as_ptr() as u64
    }

    fn checked_ptr(&self, offset: usize, len: usize) -> Result<*mut u8> {
        if offset > self.len || len > self.len - offset {
            return Err(Error::OutOfRange);
        }
        Ok(self.start.as_ptr().wrapping_add(offset))
    }

    /// Returns the word at `offset`, a multiple of 4.
    pub(crate) fn atomic_u32(&self, offset: usize) -> Result<&AtomicU32> {
        let ptr = self
            .checked_ptr(offset, size_of::<AtomicU32>())?
            .cast::<u32>();
        if !ptr.is_aligned() {
            return Err(Error::Invalid);
        }
        // SAFETY: the word is aligned, and mapped while `self` is borrowed. The kernel accesses it atomically.
        Ok(unsafe { AtomicU32::from_ptr(ptr) })
    }

    /// Copies from `offset` to `bytes`.
    pub(crate) fn load(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        let from = self.checked_ptr(offset, bytes.len())?;
        // SAFETY: `checked_ptr` checked the source. A reference cannot overlap the mapping.
        unsafe { ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    /// Copies `bytes` to `offset`.
    pub(crate) fn store(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        let to = self.checked_ptr(offset, bytes.len())?;
        // SAFETY: `checked_ptr` checked the destination. A reference cannot overlap the mapping.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    /// Copies a structure from `offset`.
    pub(crate) fn load_pod<T: Pod>(&self, offset: usize) -> Result<T> {
        let from = self.checked_ptr(offset, size_of::<T>())?.cast::<T>();
        // SAFETY: `checked_ptr` checked the source, and every bit pattern is a valid `T`.
        Ok(unsafe { from.read_unaligned() })
    }

    /// Copies a structure to `offset`.
    pub(crate) fn store_pod<T: Pod>(&self, offset: usize, value: T) -> Result<()> {
        let to = self.checked_ptr(offset, size_of::<T>())?.cast::<T>();
        // SAFETY: `checked_ptr` checked the destination.
        unsafe { to.write_unaligned(value) };
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.owner_pid == std::process::id() {
            // SAFETY: this process mapped the memory, and no borrow of `self` is left.
            unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_beyond_the_mapping_returns_out_of_range() {
        let shared = Mapping::anonymous(4096).unwrap();
        shared.store(4090, b"kitten").unwrap();
        let mut read_back = [0; 6];
        shared.load(4090, &mut read_back).unwrap();
        assert_eq!(&read_back, b"kitten");
        for at in [4091, 4097, usize::MAX] {
            assert_eq!(shared.load(at, &mut read_back), Err(Error::OutOfRange));
            assert_eq!(shared.store(at, &read_back), Err(Error::OutOfRange));
        }
        assert!(shared.atomic_u32(4092).is_ok());
        assert_eq!(shared.atomic_u32(4096).err(), Some(Error::OutOfRange));
        assert_eq!(shared.atomic_u32(2).err(), Some(Error::Invalid));
    }
}
