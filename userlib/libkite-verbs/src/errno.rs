// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Error conventions. Verbs that create an object return NULL and set `errno`, other verbs return the errno. Functions
//! of librdmacm return -1 and set `errno`.

use std::ffi::c_int;
use std::ptr;

/// Positive errno.
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

/// Repeats a call until no signal interrupts it. Verbs have no such error, and the program has handled the signal.
pub(crate) fn retry_interrupted<T>(mut f: impl FnMut() -> kite::Result<T>) -> kite::Result<T> {
    loop {
        match f() {
            Err(kite::Error::Interrupted) => continue,
            result => return result,
        }
    }
}

/// Returns the errno of the last call of libc.
pub(crate) fn last_errno() -> Errno {
    std::io::Error::last_os_error().into()
}

/// Sets `errno` of the thread.
pub(crate) fn set_errno(errno: Errno) {
    // SAFETY: libc returns a valid pointer for each thread.
    unsafe { *libc::__errno_location() = errno.0 };
}

/// Returns the pointer. On an error sets `errno` and returns NULL.
pub(crate) fn ptr_or_null<T>(result: Result<*mut T>) -> *mut T {
    result.unwrap_or_else(|errno| {
        set_errno(errno);
        ptr::null_mut()
    })
}

/// Returns 0, or the errno.
pub(crate) fn errno_or_zero(result: Result<()>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(errno) => errno.0,
    }
}

/// Returns 0. On an error sets `errno` and returns -1.
pub(crate) fn zero_or_minus_one(result: Result<()>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(errno) => {
            set_errno(errno);
            -1
        }
    }
}
