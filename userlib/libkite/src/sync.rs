// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Locks and barriers.

use std::ffi::c_int;

use kite_rs::{Error, Lock, Region};

use crate::arguments::{patient, status};
use crate::process;

/// `LT_SHARED` and `LT_TRY`.
const SHARED: u32 = 1;
const TRY: u32 = 2;
const SHARED_TRY: u32 = SHARED | TRY;

/// # Safety
/// `id` is NULL, which is refused, or points to a number that may be written.
#[no_mangle]
unsafe extern "C" fn LT_lock(
    lh: i64,
    number: u64,
    flags: u32,
    timeout_ms: u32,
    id: *mut u64,
) -> c_int {
    let lock = |region: Region| {
        let region = patient(region, timeout_ms);
        match flags {
            _ if id.is_null() => Err(Error::Invalid),
            0 => region.lock(number),
            SHARED => region.lock_shared(number),
            TRY => region.try_lock(number),
            SHARED_TRY => region.try_lock_shared(number),
            _ => Err(Error::Invalid),
        }
    };
    status(process::region(lh).and_then(lock).map(|lock| {
        let died = lock.holder_died();
        // SAFETY: it is not NULL, and the caller vouches for the rest.
        unsafe { id.write_unaligned(process::keep_lock(lh, lock)) };
        c_int::from(died)
    }))
}

#[no_mangle]
extern "C" fn LT_unlock(id: u64) -> c_int {
    status(process::take_lock(id).and_then(Lock::unlock).map(|()| 0))
}

#[no_mangle]
extern "C" fn LT_barrier(lh: i64, number: u64, count: u32, timeout_ms: u32) -> i64 {
    let pass = |region: Region| patient(region, timeout_ms).barrier(number, count);
    let passed = process::region(lh).and_then(pass);
    let passed = passed.map(|generation| i64::try_from(generation).unwrap_or(i64::MAX));
    passed.unwrap_or_else(|error| -i64::from(error.errno()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_joining_there_is_nothing() {
        assert_eq!(LT_unlock(1), -libc::EBADF);
        assert_eq!(LT_barrier(1, 0, 1, 0), -i64::from(libc::EBADF));
    }
}
