// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Memory that the kernel reads and writes while the program goes on.
//!
//! Nothing refers into it: words are atomic, and anything else is copied in and out. What the kernel
//! does to it at the same time can make a copy a mixture, but no more.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU32;

use crate::error::{Error, Result};
use crate::sys;

/// A mapping, unmapped on drop.
///
/// Its `len` bytes at `at` are mapped for reading and writing for as long as it lives.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    len: usize,
    /// The process that mapped it: a child may have something else there.
    owner_pid: u32,
}

// SAFETY: the memory belongs to no thread, and is only copied to and from, or atomic.
unsafe impl Send for Mapping {}
// SAFETY: likewise; who writes bytes that another thread reads gets a mixture at worst, as with the
// kernel.
unsafe impl Sync for Mapping {}

/// A structure of the ABI without padding and with any bits allowed.
///
/// # Safety
/// It must be that.
pub(crate) unsafe trait Pod: Copy {}

/// Says so of structures of the ABI.
macro_rules! impl_pod {
    ($($name:ident)*) => {
        $(
            // SAFETY: numbers, without padding, as the ABI has no other structures.
            unsafe impl Pod for sys::$name {}
        )*
    };
}

impl_pod! {
    kite_sqe kite_cqe kite_rw kite_fill kite_copy kite_atomic kite_call
    kite_receive kite_reply kite_recv_header kite_send_wr
}

impl Mapping {
    /// Memory of this process, zeroed.
    pub(crate) fn anonymous(len: usize) -> Result<Self> {
        Self::map(len, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
    }

    /// What the kernel offers for mapping at `offset` of the device.
    pub(crate) fn from_device(device: &File, offset: u64, len: usize) -> Result<Self> {
        Self::map(len, libc::MAP_SHARED, device.as_raw_fd(), offset)
    }

    fn map(len: usize, flags: libc::c_int, fd: RawFd, offset: u64) -> Result<Self> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let offset = libc::off_t::try_from(offset).map_err(|_| Error::Invalid)?;
        // SAFETY: a new mapping touches no memory of ours.
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

    /// Memory that somebody else has mapped.
    ///
    /// # Safety
    /// The `len` bytes at `at` must be valid for reads and writes for as long as the result lives.
    pub(crate) unsafe fn borrowed(start: NonNull<u8>, len: usize) -> Self {
        // There is no process 0, so nobody unmaps it.
        Self {
            start,
            len,
            owner_pid: 0,
        }
    }

    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Its first byte.
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Address of that.
    pub(crate) fn addr(&self) -> u64 {
        self.as_ptr() as u64
    }

    fn checked_ptr(&self, offset: usize, len: usize) -> Result<*mut u8> {
        if offset > self.len || len > self.len - offset {
            return Err(Error::OutOfRange);
        }
        Ok(self.start.as_ptr().wrapping_add(offset))
    }

    /// The word at `at`, a multiple of four.
    pub(crate) fn atomic_u32(&self, offset: usize) -> Result<&AtomicU32> {
        let ptr = self
            .checked_ptr(offset, size_of::<AtomicU32>())?
            .cast::<u32>();
        if !ptr.is_aligned() {
            return Err(Error::Invalid);
        }
        // SAFETY: it is mapped for as long as `self` is borrowed, and aligned; the kernel changes it
        // as a whole.
        Ok(unsafe { AtomicU32::from_ptr(ptr) })
    }

    /// Copies from `at` on.
    pub(crate) fn load(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        let from = self.checked_ptr(offset, bytes.len())?;
        // SAFETY: `span` checked the source, and `bytes` is memory of somebody else.
        unsafe { ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    /// Copies to `at`.
    pub(crate) fn store(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        let to = self.checked_ptr(offset, bytes.len())?;
        // SAFETY: `span` checked the destination, and `bytes` is memory of somebody else.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    /// Copies a structure out of the bytes from `at` on.
    pub(crate) fn load_pod<T: Pod>(&self, offset: usize) -> Result<T> {
        let from = self.checked_ptr(offset, size_of::<T>())?.cast::<T>();
        // SAFETY: `span` checked the source, and any bits are a `T`.
        Ok(unsafe { from.read_unaligned() })
    }

    /// Copies a structure to `at`.
    pub(crate) fn store_pod<T: Pod>(&self, offset: usize, value: T) -> Result<()> {
        let to = self.checked_ptr(offset, size_of::<T>())?.cast::<T>();
        // SAFETY: `span` checked the destination.
        unsafe { to.write_unaligned(value) };
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.owner_pid == std::process::id() {
            // SAFETY: we mapped it, and nobody borrows from it any more.
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
