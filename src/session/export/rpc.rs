// SPDX-License-Identifier: GPL-2.0

//! Functions of `include/kite.h`: RPC clients and servers.
//!
//! # Operation
//!
//! Messages are in kernel memory. A call, a receive and a reply sleep in the caller's thread until they end.

use super::{borrow_session, check, status};
use crate::{
    bindings,
    session::{
        args::{deadline, parse_call, parse_reply},
        source::Requester,
    },
};
use core::ptr;
use kernel::prelude::*;

check! { kite_serve kite_receive kite_reply kite_reply_abort kite_call kite_send }

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open.
#[no_mangle]
unsafe extern "C" fn kite_serve(
    session: *mut bindings::kite_session,
    handle: u64,
    ring_size: u32,
    data_max: u32,
) -> c_int {
    // SAFETY: By the safety requirements the session is open.
    let session = unsafe { borrow_session(session) };
    status(session, || {
        session.serve(handle, ring_size, data_max).map(|()| 0)
    })
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open, `buf` writable for `len` bytes, and `got` writable.
#[no_mangle]
unsafe extern "C" fn kite_receive(
    session: *mut bindings::kite_session,
    handle: u64,
    buf: *mut c_void,
    len: usize,
    timeout_ms: u32,
    got: *mut bindings::kite_receive,
) -> c_int {
    // SAFETY: By the safety requirements the session is open.
    let session = unsafe { borrow_session(session) };
    status(session, || {
        let (deadline, len) = (deadline(timeout_ms), len as u64);
        let memory = Requester::KernelModule.buffer_at(buf as u64, len)?;
        let incoming = session.receive(handle, &memory, len, Some(deadline))?;
        let mut received = bindings::kite_receive {
            handle,
            ..Default::default()
        };
        incoming.store_in(&mut received);
        // SAFETY: By the safety requirements `got` is writable.
        unsafe { ptr::write(got, received) };
        Ok(0)
    })
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open, and `data` readable for `len` bytes.
#[no_mangle]
unsafe extern "C" fn kite_reply(
    session: *mut bindings::kite_session,
    call: u64,
    data: *const c_void,
    len: usize,
) -> c_int {
    // SAFETY: By the safety requirements the session is open.
    let session = unsafe { borrow_session(session) };
    status(session, || {
        let reply = bindings::kite_reply {
            call,
            addr: data as u64,
            len: len as u64,
            ..Default::default()
        };
        let reply = parse_reply(Requester::KernelModule, &reply)?;
        reply.run(session).map(|()| 0)
    })
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open.
#[no_mangle]
unsafe extern "C" fn kite_reply_abort(session: *mut bindings::kite_session, call: u64) -> c_int {
    // SAFETY: By the safety requirements the session is open.
    let session = unsafe { borrow_session(session) };
    status(session, || session.abort_call(call).map(|()| 0))
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open, `data` readable for `len` bytes, and `reply_len` readable and writable. `reply`
/// must be writable for `*reply_len` bytes.
#[no_mangle]
unsafe extern "C" fn kite_call(
    session: *mut bindings::kite_session,
    handle: u64,
    function: u32,
    data: *const c_void,
    len: usize,
    reply: *mut c_void,
    reply_len: *mut usize,
) -> c_int {
    // SAFETY: By the safety requirements the session is open.
    let session = unsafe { borrow_session(session) };
    status(session, || {
        // SAFETY: By the safety requirements `reply_len` is readable.
        let max_reply_len = unsafe { ptr::read(reply_len) };
        let call = bindings::kite_call {
            addr: data as u64,
            len: len as u64,
            reply: reply as u64,
            reply_len: max_reply_len as u64,
            function,
            ..Default::default()
        };
        let request = parse_call(Requester::KernelModule, &call)?;
        let actual_reply_len = session.call(handle, &request)?;
        // SAFETY: By the safety requirements `reply_len` is writable.
        unsafe { ptr::write(reply_len, actual_reply_len as usize) };
        Ok(0)
    })
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open, and `data` readable for `len` bytes.
#[no_mangle]
unsafe extern "C" fn kite_send(
    session: *mut bindings::kite_session,
    handle: u64,
    function: u32,
    data: *const c_void,
    len: usize,
) -> c_int {
    // SAFETY: By the safety requirements the session is open.
    let session = unsafe { borrow_session(session) };
    status(session, || {
        let message = bindings::kite_call {
            addr: data as u64,
            len: len as u64,
            function,
            flags: bindings::KITE_CALL_ONEWAY,
            ..Default::default()
        };
        let request = parse_call(Requester::KernelModule, &message)?;
        session.call(handle, &request).map(|_| 0)
    })
}
