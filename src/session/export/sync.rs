// SPDX-License-Identifier: GPL-2.0

//! Locks and barriers of other kernel modules.

use super::{borrow, check};
use crate::{
    bindings,
    session::{lock, request::deadline},
};
use core::ptr;
use kernel::{error::from_result, prelude::*};

check! { kite_lock kite_unlock kite_barrier }

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open, and `lock` writable.
#[no_mangle]
unsafe extern "C" fn kite_lock(
    session: *mut bindings::kite_session,
    handle: u64,
    number: u64,
    flags: u32,
    timeout_ms: u32,
    lock: *mut u64,
) -> c_int {
    from_result(|| {
        let wanted = lock::wanted(number, flags, deadline(timeout_ms))?;
        // SAFETY: By the safety requirements.
        let taken = unsafe { borrow(session) }.lock(handle, &wanted)?;
        // SAFETY: By the safety requirements.
        unsafe { ptr::write(lock, taken.lock) };
        Ok(taken.died.into())
    })
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open.
#[no_mangle]
unsafe extern "C" fn kite_unlock(
    session: *mut bindings::kite_session,
    lock: u64,
    flags: u32,
) -> c_int {
    from_result(|| {
        let how = lock::end(flags)?;
        // SAFETY: By the safety requirements.
        let session = unsafe { borrow(session) };
        session.unlock(lock, how, deadline(0)).map(|()| 0)
    })
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open, and `generation` null or writable.
#[no_mangle]
unsafe extern "C" fn kite_barrier(
    session: *mut bindings::kite_session,
    handle: u64,
    number: u64,
    count: u32,
    timeout_ms: u32,
    generation: *mut u64,
) -> c_int {
    from_result(|| {
        let deadline = deadline(timeout_ms);
        // SAFETY: By the safety requirements.
        let passed = unsafe { borrow(session) }.barrier(handle, number, count, deadline)?;
        if !generation.is_null() {
            // SAFETY: By the safety requirements.
            unsafe { ptr::write(generation, passed) };
        }
        Ok(0)
    })
}
