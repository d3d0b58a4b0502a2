// SPDX-License-Identifier: GPL-2.0

//! Functions of `include/kite.h`: locks and barriers.
//!
//! # Operation
//!
//! `kite_lock` and `kite_barrier` sleep in the caller's thread until the lock is granted or the barrier is
//! passed. `kite_lock` returns 1 if the previous owner died.

use super::{borrow_session, check, status};
use crate::{
    bindings,
    session::{args::deadline, lock},
};
use core::ptr;
use kernel::prelude::*;

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
    // SAFETY: By the safety requirements the session is open.
    let session = unsafe { borrow_session(session) };
    status(session, || {
        let request = lock::parse_lock_request(number, flags, deadline(timeout_ms))?;
        let acquired = session.lock(handle, &request)?;
        // SAFETY: By the safety requirements `lock` is writable.
        unsafe { ptr::write(lock, acquired.lock_id) };
        Ok(acquired.owner_died.into())
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
    // SAFETY: By the safety requirements the session is open.
    let session = unsafe { borrow_session(session) };
    status(session, || {
        let reason = lock::parse_release_reason(flags)?;
        session.unlock(lock, reason, deadline(0)).map(|()| 0)
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
    // SAFETY: By the safety requirements the session is open.
    let session = unsafe { borrow_session(session) };
    status(session, || {
        let deadline = deadline(timeout_ms);
        let current_generation = session.barrier(handle, number, count, deadline)?;
        if !generation.is_null() {
            // SAFETY: By the safety requirements, and because `generation` is not null, `generation` is
            // writable.
            unsafe { ptr::write(generation, current_generation) };
        }
        Ok(0)
    })
}
