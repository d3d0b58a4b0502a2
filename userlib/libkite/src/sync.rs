// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Locks and barriers.

use std::ffi::c_int;

use kite_rs::{Error, LockGuard, Region};

use crate::arguments::{to_status, with_timeout_ms};
use crate::process;

/// `LT_SHARED` and `LT_TRY`.
const FLAG_SHARED: u32 = 1;
const FLAG_TRY: u32 = 2;
const FLAG_SHARED_TRY: u32 = FLAG_SHARED | FLAG_TRY;

/// # Safety
/// `id` must be NULL or writable.
#[no_mangle]
unsafe extern "C" fn LT_lock(
    lh: i64,
    number: u64,
    flags: u32,
    timeout_ms: u32,
    id: *mut u64,
) -> c_int {
    let lock = |region: Region| {
        let region = with_timeout_ms(region, timeout_ms);
        match flags {
            _ if id.is_null() => Err(Error::Invalid),
            0 => region.lock(number),
            FLAG_SHARED => region.lock_shared(number),
            FLAG_TRY => region.try_lock(number),
            FLAG_SHARED_TRY => region.try_lock_shared(number),
            _ => Err(Error::Invalid),
        }
    };
    to_status(process::region(lh).and_then(lock).map(|lock| {
        let owner_died = lock.owner_died();
        // SAFETY: `id` is not NULL, and is writable by the safety requirements.
        unsafe { id.write_unaligned(process::insert_lock(lh, lock)) };
        c_int::from(owner_died)
    }))
}

#[no_mangle]
extern "C" fn LT_unlock(id: u64) -> c_int {
    to_status(
        process::remove_lock(id)
            .and_then(LockGuard::unlock)
            .map(|()| 0),
    )
}

#[no_mangle]
extern "C" fn LT_barrier(lh: i64, number: u64, count: u32, timeout_ms: u32) -> i64 {
    let wait = |region: Region| with_timeout_ms(region, timeout_ms).barrier(number, count);
    let generation = process::region(lh).and_then(wait);
    let generation = generation.map(|generation| i64::try_from(generation).unwrap_or(i64::MAX));
    generation.unwrap_or_else(|error| -i64::from(error.errno()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sync_calls_without_join_return_ebadf() {
        assert_eq!(LT_unlock(1), -libc::EBADF);
        assert_eq!(LT_barrier(1, 0, 1, 0), -i64::from(libc::EBADF));
    }
}
