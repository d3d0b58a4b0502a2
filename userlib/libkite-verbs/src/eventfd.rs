// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Event descriptors (eventfd), readable while their counter is above 0.

use std::ffi::c_int;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};

use crate::errno::{last_errno, Result};

/// Creates a descriptor with the counter 0 and flags of `eventfd`.
pub(crate) fn create_eventfd(flags: c_int) -> Result<File> {
    // SAFETY: the call accesses no memory.
    let fd = unsafe { libc::eventfd(0, flags | libc::EFD_CLOEXEC) };
    if fd < 0 {
        return Err(last_errno());
    }
    // SAFETY: the descriptor is new, so it has no other owner.
    Ok(unsafe { File::from_raw_fd(fd) })
}

/// Decrements the counter of a semaphore, if it is above 0.
pub(crate) fn try_decrement(file: &File) {
    let mut one = [0; 8];
    let to = libc::iovec {
        iov_base: one.as_mut_ptr().cast(),
        iov_len: one.len(),
    };
    // SAFETY: the call writes at most the length of the buffer. Another thread may be faster, so the call must not
    // block.
    unsafe { libc::preadv2(file.as_raw_fd(), &to, 1, -1, libc::RWF_NOWAIT) };
}
