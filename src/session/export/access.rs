// SPDX-License-Identifier: GPL-2.0

//! Functions of `include/kite.h`: reads, writes, fills, copies, and atomic operations.

use super::{borrow_session, check};
use crate::{
    bindings,
    fabric::send::inflight::Direction,
    region::map::{
        atomic::AtomicRequest,
        copy::FillRequest,
        io::{AccessRequest, RegionRange},
    },
    session::{args::deadline, iovec::IoVec, uapi},
    sys::buffer::Buffer,
};
use core::ptr;
use kernel::{error::from_result, prelude::*};

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
    from_result(|| {
        let request = AccessRequest {
            direction,
            offset,
            len: len as u64,
            deadline: deadline(0),
        };
        // SAFETY: By the safety requirements the session is open, and `buf` is valid for `len` bytes and for
        // the direction.
        let (session, memory) = unsafe {
            (
                borrow_session(session),
                Buffer::from_kernel(buf.cast(), len),
            )
        };
        session.access(handle, &request, &memory).map(|()| 0)
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
    from_result(|| {
        if count > bindings::KITE_SEGMENTS_MAX || (vectors.is_null() && count != 0) {
            return Err(EINVAL);
        }
        let mut segments = IoVec::with_capacity(count as usize)?;
        for i in 0..count as usize {
            // SAFETY: `vectors` is not null, because `count` is not 0. By the safety requirements `vectors`
            // points to `count` vectors.
            let vector = unsafe { ptr::read(vectors.wrapping_add(i)) };
            let range = RegionRange {
                offset: vector.offset,
                len: vector.len as u64,
            };
            // SAFETY: By the safety requirements the buffer is valid for its length and for the direction.
            let memory = unsafe { Buffer::from_kernel(vector.buf.cast(), vector.len) };
            segments.push(range, memory)?;
        }
        // SAFETY: By the safety requirements the session is open.
        let session = unsafe { borrow_session(session) };
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
    from_result(|| {
        let request = FillRequest {
            offset,
            len,
            byte,
            deadline: deadline(0),
        };
        // SAFETY: By the safety requirements the session is open.
        unsafe { borrow_session(session) }
            .fill(handle, &request)
            .map(|()| 0)
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
    from_result(|| {
        // SAFETY: By the safety requirements the session is open.
        let session = unsafe { borrow_session(session) };
        let result = session.copy((from, from_offset), (to, to_offset), len, deadline(0));
        result.map(|()| 0)
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
    from_result(|| {
        let request = AtomicRequest {
            offset,
            op: uapi::parse_atomic(operation, operand, expected)?,
            deadline: deadline(0),
        };
        // SAFETY: By the safety requirements the session is open.
        let old_value = unsafe { borrow_session(session) }.atomic_update(handle, &request)?;
        if !value.is_null() {
            // SAFETY: By the safety requirements, and because `value` is not null, `value` is writable.
            unsafe { ptr::write(value, old_value) };
        }
        Ok(0)
    })
}
