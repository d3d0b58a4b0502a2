// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Descriptors that are readable while they count more than nothing.

use std::ffi::c_int;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};

use crate::errno::{last_errno, Result};

/// A descriptor that counts from 0, with flags of `eventfd`.
pub(crate) fn create_eventfd(flags: c_int) -> Result<File> {
    // SAFETY: it touches no memory of ours.
    let fd = unsafe { libc::eventfd(0, flags | libc::EFD_CLOEXEC) };
    if fd < 0 {
        return Err(last_errno());
    }
    // SAFETY: it is new, so nobody else has it.
    Ok(unsafe { File::from_raw_fd(fd) })
}

/// Takes one from what a descriptor counts, if that is more than nothing.
pub(crate) fn try_decrement(file: &File) {
    let mut one = [0; 8];
    let to = libc::iovec {
        iov_base: one.as_mut_ptr().cast(),
        iov_len: one.len(),
    };
    // SAFETY: it writes no more than there is room for. Others may be faster, so it must not wait.
    unsafe { libc::preadv2(file.as_raw_fd(), &to, 1, -1, libc::RWF_NOWAIT) };
}
