// SPDX-License-Identifier: GPL-2.0

//! Functions of `include/kite.h`: reads, writes, fills, copies, and atomic operations.
//!
//! # Operation
//!
//! Each function parses its arguments as the ioctl does, with buffers in kernel memory, and runs the request
//! in the caller's thread, which may sleep.

use super::{borrow_session, check, status};
use crate::{
    bindings,
    fabric::send::inflight::Direction,
    session::{
        args::{
            deadline, parse_access, parse_atomic_update, parse_copy, parse_fill, parse_segments,
        },
        source::Requester,
    },
};
use core::ptr;
use kernel::prelude::*;

check! { kite_read kite_write kite_readv kite_writev kite_fill kite_copy kite_atomic }

/// # Safety
///
/// `session` must be open. `buf` must be valid for `len` bytes, and writable if `direction` is to read.
unsafe fn access(
    session: *mut bindings::kite_session,
    handle: u64,
    direction: Direction,
    offset: u64,
    buf: *mut c_void,
    len: usize,
) -> c_int {
    // SAFETY: By the safety requirements the session is open.
    let session = unsafe { borrow_session(session) };
    status(session, || {
        let rw = bindings::kite_rw {
            offset,
            addr: buf as u64,
            len: len as u64,
            ..Default::default()
        };
        let (access, memory) = parse_access(Requester::KernelModule, direction, &rw)?;
        session.access(handle, &access, &memory).map(|()| 0)
    })
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open, and `buf` writable for `len` bytes.
#[no_mangle]
unsafe extern "C" fn kite_read(
    session: *mut bindings::kite_session,
    handle: u64,
    offset: u64,
    buf: *mut c_void,
    len: usize,
) -> c_int {
    // SAFETY: By the safety requirements the session is open, and `buf` is writable for `len` bytes.
    unsafe { access(session, handle, Direction::Read, offset, buf, len) }
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open, and `buf` readable for `len` bytes.
#[no_mangle]
unsafe extern "C" fn kite_write(
    session: *mut bindings::kite_session,
    handle: u64,
    offset: u64,
    buf: *const c_void,
    len: usize,
) -> c_int {
    // SAFETY: By the safety requirements the session is open, and `buf` is readable for `len` bytes. A write
    // to a region does not change the buffer.
    unsafe {
        access(
            session,
            handle,
            Direction::Write,
            offset,
            buf.cast_mut(),
            len,
        )
    }
}

/// # Safety
///
/// `session` must be open, and `vectors` null or `count` vectors. Their buffers must be valid for their
/// lengths, and writable if `direction` is to read.
unsafe fn access_vectors(
    session: *mut bindings::kite_session,
    handle: u64,
    direction: Direction,
    vectors: *const bindings::kite_vector,
    count: u32,
) -> c_int {
    // SAFETY: By the safety requirements the session is open.
    let session = unsafe { borrow_session(session) };
    status(session, || {
        if vectors.is_null() && count != 0 {
            return Err(EINVAL);
        }
        let segments = parse_segments(Requester::KernelModule, count, |i| {
            // SAFETY: `vectors` is not null, because `count` is not 0. By the safety requirements `vectors`
            // points to `count` vectors.
            let vector = unsafe { ptr::read(vectors.wrapping_add(i)) };
            Ok(bindings::kite_segment {
                offset: vector.offset,
                addr: vector.buf as u64,
                len: vector.len as u64,
            })
        })?;
        session
            .access_segments(handle, direction, &segments, deadline(0))
            .map(|()| 0)
    })
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open, and `vectors` null or `count` vectors of writable memory.
#[no_mangle]
unsafe extern "C" fn kite_readv(
    session: *mut bindings::kite_session,
    handle: u64,
    vectors: *const bindings::kite_vector,
    count: u32,
) -> c_int {
    // SAFETY: By the safety requirements the session is open, and `vectors` is null or `count` vectors of
    // writable memory.
    unsafe { access_vectors(session, handle, Direction::Read, vectors, count) }
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open, and `vectors` null or `count` vectors of readable memory.
#[no_mangle]
unsafe extern "C" fn kite_writev(
    session: *mut bindings::kite_session,
    handle: u64,
    vectors: *const bindings::kite_vector,
    count: u32,
) -> c_int {
    // SAFETY: By the safety requirements the session is open, and `vectors` is null or `count` vectors of
    // readable memory.
    unsafe { access_vectors(session, handle, Direction::Write, vectors, count) }
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open.
#[no_mangle]
unsafe extern "C" fn kite_fill(
    session: *mut bindings::kite_session,
    handle: u64,
    offset: u64,
    byte: u8,
    len: u64,
) -> c_int {
    // SAFETY: By the safety requirements the session is open.
    let session = unsafe { borrow_session(session) };
    status(session, || {
        let request = parse_fill(&bindings::kite_fill {
            offset,
            len,
            byte: byte.into(),
            ..Default::default()
        })?;
        session.fill(handle, &request).map(|()| 0)
    })
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open.
#[no_mangle]
unsafe extern "C" fn kite_copy(
    session: *mut bindings::kite_session,
    to: u64,
    to_offset: u64,
    from: u64,
    from_offset: u64,
    len: u64,
) -> c_int {
    // SAFETY: By the safety requirements the session is open.
    let session = unsafe { borrow_session(session) };
    status(session, || {
        let copy = parse_copy(&bindings::kite_copy {
            from,
            from_offset,
            to,
            to_offset,
            len,
            ..Default::default()
        })?;
        copy.run(session).map(|()| 0)
    })
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open, and `value` null or writable.
#[no_mangle]
unsafe extern "C" fn kite_atomic(
    session: *mut bindings::kite_session,
    handle: u64,
    offset: u64,
    operation: u32,
    operand: u64,
    expected: u64,
    value: *mut u64,
) -> c_int {
    // SAFETY: By the safety requirements the session is open.
    let session = unsafe { borrow_session(session) };
    status(session, || {
        let request = parse_atomic_update(&bindings::kite_atomic {
            offset,
            operand,
            expected,
            operation,
            ..Default::default()
        })?;
        let old_value = session.atomic_update(handle, &request)?;
        if !value.is_null() {
            // SAFETY: By the safety requirements, and because `value` is not null, `value` is writable.
            unsafe { ptr::write(value, old_value) };
        }
        Ok(0)
    })
}
