// SPDX-License-Identifier: GPL-2.0

//! Functions of `include/kite.h`: RPC clients and servers.

use super::{borrow_session, check};
use crate::{
    bindings,
    session::{args::deadline, call_args::RpcRequest, source::ROOT_UID},
    sys::buffer::Buffer,
};
use core::ptr;
use kernel::{error::from_result, prelude::*};

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
    from_result(|| {
        // SAFETY: By the safety requirements the session is open.
        let session = unsafe { borrow_session(session) };
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
    from_result(|| {
        let deadline = deadline(timeout_ms);
        // SAFETY: By the safety requirements the session is open, and `buf` is writable for `len` bytes.
        let (session, memory) = unsafe {
            (
                borrow_session(session),
                Buffer::from_kernel(buf.cast(), len),
            )
        };
        let incoming = session.receive(handle, &memory, len as u64, Some(deadline))?;
        let received = bindings::kite_receive {
            handle,
            len: incoming.len,
            call: incoming.call_id,
            function: incoming.function,
            node: incoming.node,
            uid: incoming.uid,
            ..Default::default()
        };
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
    from_result(|| {
        // SAFETY: By the safety requirements `data` is readable for `len` bytes. A reply does not change the
        // buffer.
        let memory = unsafe { Buffer::from_kernel(data.cast_mut().cast(), len) };
        // SAFETY: By the safety requirements the session is open.
        let session = unsafe { borrow_session(session) };
        session
            .reply(call, &memory, len as u64, deadline(0))
            .map(|()| 0)
    })
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open.
#[no_mangle]
unsafe extern "C" fn kite_reply_abort(session: *mut bindings::kite_session, call: u64) -> c_int {
    from_result(|| {
        // SAFETY: By the safety requirements the session is open.
        let session = unsafe { borrow_session(session) };
        session.abandon_call(call).map(|()| 0)
    })
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
    from_result(|| {
        // SAFETY: By the safety requirements `reply_len` is readable.
        let max_reply_len = unsafe { ptr::read(reply_len) };
        let request = RpcRequest {
            function,
            uid: ROOT_UID,
            // SAFETY: By the safety requirements `data` is readable for `len` bytes. A call does not change
            // its data.
            data: unsafe { Buffer::from_kernel(data.cast_mut().cast(), len) },
            len: len as u64,
            // SAFETY: By the safety requirements `reply` is writable for `*reply_len` bytes.
            reply_buffer: unsafe { Buffer::from_kernel(reply.cast(), max_reply_len) },
            max_reply_len: max_reply_len as u64,
            wants_reply: true,
            deadline: deadline(0),
        };
        // SAFETY: By the safety requirements the session is open.
        let actual_reply_len = unsafe { borrow_session(session) }.call(handle, &request)?;
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
    from_result(|| {
        let request = RpcRequest {
            function,
            uid: ROOT_UID,
            // SAFETY: By the safety requirements `data` is readable for `len` bytes. A message does not
            // change its data.
            data: unsafe { Buffer::from_kernel(data.cast_mut().cast(), len) },
            len: len as u64,
            // SAFETY: A null pointer is valid for accesses of zero bytes.
            reply_buffer: unsafe { Buffer::from_kernel(ptr::null_mut(), 0) },
            max_reply_len: 0,
            wants_reply: false,
            deadline: deadline(0),
        };
        // SAFETY: By the safety requirements the session is open.
        unsafe { borrow_session(session) }
            .call(handle, &request)
            .map(|_| 0)
    })
}
