// SPDX-License-Identifier: GPL-2.0 OR MIT
//! How functions fail: those of verbs that make something return NULL and set `errno`, others return it; those of
//! librdmacm return -1 and set it.

use std::ffi::c_int;
use std::ptr;

/// An errno, positive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Errno(pub(crate) c_int);

pub(crate) type Result<T> = std::result::Result<T, Errno>;

impl From<kite::Error> for Errno {
    fn from(error: kite::Error) -> Self {
        Self(error.errno())
    }
}

impl From<std::io::Error> for Errno {
    fn from(error: std::io::Error) -> Self {
        Self(error.raw_os_error().unwrap_or(libc::EIO))
    }
}

/// Does what signals end without effect, until none does. The program has dealt with them, and verbs do not know them.
pub(crate) fn retry_interrupted<T>(mut f: impl FnMut() -> kite::Result<T>) -> kite::Result<T> {
    loop {
        match f() {
            Err(kite::Error::Interrupted) => continue,
            result => return result,
        }
    }
}

/// Why the last call of libc failed.
pub(crate) fn last_errno() -> Errno {
    std::io::Error::last_os_error().into()
}

/// Sets `errno` of the thread.
pub(crate) fn set_errno(errno: Errno) {
    // SAFETY: libc gives each thread a place for it.
    unsafe { *libc::__errno_location() = errno.0 };
}

/// What a function returns that makes something.
pub(crate) fn ptr_or_null<T>(result: Result<*mut T>) -> *mut T {
    result.unwrap_or_else(|errno| {
        set_errno(errno);
        ptr::null_mut()
    })
}

/// What any other function returns.
pub(crate) fn errno_or_zero(result: Result<()>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(errno) => errno.0,
    }
}

/// What any function of librdmacm returns.
pub(crate) fn zero_or_minus_one(result: Result<()>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(errno) => {
            set_errno(errno);
            -1
        }
    }
}
