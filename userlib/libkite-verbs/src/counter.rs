// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Descriptors that are readable while they count more than nothing.

use std::ffi::c_int;
use std::fs::File;
use std::os::fd::FromRawFd;

use crate::errno::{last, Result};

/// A descriptor that counts from 0, with flags of `eventfd`.
pub(crate) fn counter(flags: c_int) -> Result<File> {
    // SAFETY: it touches no memory of ours.
    let fd = unsafe { libc::eventfd(0, flags | libc::EFD_CLOEXEC) };
    if fd < 0 {
        return Err(last());
    }
    // SAFETY: it is new, so nobody else has it.
    Ok(unsafe { File::from_raw_fd(fd) })
}
