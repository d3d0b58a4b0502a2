// SPDX-License-Identifier: GPL-2.0

//! Functions of `include/kite.h`: virtual queue pairs (VQPs), and memory regions (MRs) for their requests.
//!
//! # Operation
//!
//! MRs are pinned kernel memory, which requests address from 0. `kite_push` adds work requests, and
//! `kite_pop` takes their completions.

use super::{borrow_session, check, status};
use crate::{
    bindings,
    session::{
        args::{
            check_mr_len, check_pop_count, check_push_count, deadline, parse_pop_message,
            parse_rights, wait_until,
        },
        source::ROOT_UID,
        uapi,
    },
    sys::pin::{PinnedPages, ReleaseCallback},
};
use core::{ptr, slice};
use kernel::{page::PAGE_SIZE, prelude::*};

check! {
    kite_reg_mr kite_dereg_mr kite_connect kite_listen kite_accept kite_close_vqp
    kite_close_listener kite_push kite_pop kite_pop_message
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open, and `key` writable. `buf` must be valid for `len` bytes until `release` is called.
/// Any thread that may sleep may call `release`.
#[no_mangle]
unsafe extern "C" fn kite_reg_mr(
    session: *mut bindings::kite_session,
    buf: *mut c_void,
    len: usize,
    others: u32,
    release: Option<unsafe extern "C" fn(context: *mut c_void)>,
    context: *mut c_void,
    key: *mut u32,
) -> c_int {
    // SAFETY: By the safety requirements the session is open.
    let session = unsafe { borrow_session(session) };
    status(session, || {
        // SAFETY: By the safety requirements any thread that may sleep may call `release` with `context`.
        let release = release.map(|release| unsafe { ReleaseCallback::new(release, context) });
        let len = check_mr_len(len as u64)?;
        if buf as usize % PAGE_SIZE != 0 || release.is_none() {
            return Err(EINVAL);
        }
        let others = parse_rights(others)?;
        // SAFETY: By the safety requirements the memory stays valid until `release` is called, when `pinned`
        // is dropped.
        let pinned = unsafe { PinnedPages::from_kernel(buf.cast(), len, release)? };
        // Requests address the MR from 0, so that no kernel address is disclosed.
        let mr_key = session.register_mr(pinned, (0, len as u64), ROOT_UID, others)?;
        // SAFETY: By the safety requirements `key` is writable.
        unsafe { ptr::write(key, mr_key) };
        Ok(0)
    })
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open.
#[no_mangle]
unsafe extern "C" fn kite_dereg_mr(session: *mut bindings::kite_session, key: u32) -> c_int {
    // SAFETY: By the safety requirements the session is open.
    let session = unsafe { borrow_session(session) };
    status(session, || session.deregister_mr(key).map(|()| 0))
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open, and `vqp` writable.
#[no_mangle]
unsafe extern "C" fn kite_connect(
    session: *mut bindings::kite_session,
    node: u32,
    port: u32,
    timeout_ms: u32,
    vqp: *mut u64,
) -> c_int {
    // SAFETY: By the safety requirements the session is open.
    let session = unsafe { borrow_session(session) };
    status(session, || {
        let vqp_id = session.connect((node, port), (ROOT_UID, None), deadline(timeout_ms))?;
        // SAFETY: By the safety requirements `vqp` is writable.
        unsafe { ptr::write(vqp, vqp_id) };
        Ok(0)
    })
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open, and `listener` writable.
#[no_mangle]
unsafe extern "C" fn kite_listen(
    session: *mut bindings::kite_session,
    port: u32,
    listener: *mut u64,
) -> c_int {
    // SAFETY: By the safety requirements the session is open.
    let session = unsafe { borrow_session(session) };
    status(session, || {
        let listener_id = session.listen(port, ROOT_UID)?;
        // SAFETY: By the safety requirements `listener` is writable.
        unsafe { ptr::write(listener, listener_id) };
        Ok(0)
    })
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open, and `accepted` readable and writable.
#[no_mangle]
unsafe extern "C" fn kite_accept(
    session: *mut bindings::kite_session,
    accepted: *mut bindings::kite_accept,
) -> c_int {
    // SAFETY: By the safety requirements the session is open.
    let session = unsafe { borrow_session(session) };
    status(session, || {
        // SAFETY: By the safety requirements `accepted` is readable and writable.
        let accept = unsafe { &mut *accepted };
        let wait_until = wait_until(accept.flags, accept.timeout_ms)?;
        (accept.vqp, accept.node, accept.uid) = session.accept(accept.listener, wait_until)?;
        Ok(0)
    })
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open.
#[no_mangle]
unsafe extern "C" fn kite_close_vqp(session: *mut bindings::kite_session, vqp: u64) -> c_int {
    // SAFETY: By the safety requirements the session is open.
    let session = unsafe { borrow_session(session) };
    status(session, || session.close_vqp(vqp).map(|()| 0))
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open.
#[no_mangle]
unsafe extern "C" fn kite_close_listener(
    session: *mut bindings::kite_session,
    listener: u64,
) -> c_int {
    // SAFETY: By the safety requirements the session is open.
    let session = unsafe { borrow_session(session) };
    status(session, || session.close_listener(listener).map(|()| 0))
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open, and `wrs` must point to `count` work requests.
#[no_mangle]
unsafe extern "C" fn kite_push(
    session: *mut bindings::kite_session,
    vqp: u64,
    wrs: *const bindings::kite_send_wr,
    count: u32,
) -> c_int {
    // SAFETY: By the safety requirements the session is open.
    let session = unsafe { borrow_session(session) };
    status(session, || {
        let count = check_push_count(count)?;
        // SAFETY: By the safety requirements `wrs` points to `count` work requests.
        let wrs = unsafe { slice::from_raw_parts(wrs, count) };
        let read_wr = |i: usize| wrs.get(i).copied().ok_or(EINVAL);
        let result = session.push(vqp, count, read_wr, ROOT_UID, deadline(0));
        result.map(|()| 0)
    })
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open, and `done` writable for `count` CQEs.
#[no_mangle]
unsafe extern "C" fn kite_pop(
    session: *mut bindings::kite_session,
    vqp: u64,
    done: *mut bindings::kite_cqe,
    count: u32,
    flags: u32,
    timeout_ms: u32,
) -> c_int {
    // SAFETY: By the safety requirements the session is open.
    let session = unsafe { borrow_session(session) };
    status(session, || {
        let count = check_pop_count(count)?;
        let wait_until = wait_until(flags, timeout_ms)?;
        let popped = session.pop(vqp, count, wait_until)?;
        for (i, (tag, result)) in popped.iter().enumerate() {
            let completion = uapi::cqe(*tag, result.map(|()| 0));
            // SAFETY: By the safety requirements `done` is writable for `count` CQEs, and at most `count`
            // completions were popped.
            unsafe { ptr::write(done.add(i), completion) };
        }
        Ok(popped.len() as c_int)
    })
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open, and `message` readable and writable.
#[no_mangle]
unsafe extern "C" fn kite_pop_message(
    session: *mut bindings::kite_session,
    message: *mut bindings::kite_pop_message,
) -> c_int {
    // SAFETY: By the safety requirements the session is open.
    let session = unsafe { borrow_session(session) };
    status(session, || {
        // SAFETY: By the safety requirements `message` is readable and writable.
        let message = unsafe { &mut *message };
        let wait_until = parse_pop_message(message)?;
        session.pop_message_into(message, wait_until).map(|()| 0)
    })
}
