// SPDX-License-Identifier: GPL-2.0 OR MIT
//! I/O queues.
//!
//! Addresses of data are in the buffer of the queue. They are converted to offsets and checked, so no function accesses
//! memory by a pointer of C. A wrong address is rejected.

use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::time::Duration;

use kite_rs::{Completion, Error, IoQueue, Region, Result};

use crate::arguments::{checked_len, to_count, to_status};
use crate::process;
use crate::rpc::LtCall;

/// `struct LT_completion`.
#[repr(C)]
struct LtCompletion {
    tag: u64,
    value: u64,
    status: c_int,
}

/// # Safety
/// `memory` must be NULL or writable.
#[no_mangle]
unsafe extern "C" fn LT_queue(entries: u32, size: u64, memory: *mut *mut c_void) -> i64 {
    let create = || {
        if memory.is_null() {
            return Err(Error::Invalid);
        }
        let size = usize::try_from(size).map_err(|_| Error::Invalid)?;
        let queue = process::session()?.create_queue(entries, size)?;
        // SAFETY: `memory` is not NULL, and is writable by the safety requirements.
        unsafe { memory.write(queue.as_ptr().cast()) };
        Ok(process::insert_queue(queue))
    };
    create().unwrap_or_else(|error: Error| -i64::from(error.errno()))
}

#[no_mangle]
extern "C" fn LT_unqueue(queue: i64) -> c_int {
    to_status(process::remove_queue(queue).map(|_| 0))
}

#[no_mangle]
extern "C" fn LT_async_read(
    queue: i64,
    tag: u64,
    lh: i64,
    offset: u64,
    to: *mut c_void,
    size: u64,
) -> c_int {
    submit_for_region(queue, lh, |queue, region| {
        let range = buffer_range(queue, to, size)?;
        queue.read(tag, &region, offset, range)
    })
}

#[no_mangle]
extern "C" fn LT_async_write(
    queue: i64,
    tag: u64,
    lh: i64,
    offset: u64,
    from: *const c_void,
    size: u64,
) -> c_int {
    submit_for_region(queue, lh, |queue, region| {
        let range = buffer_range(queue, from, size)?;
        queue.write(tag, &region, offset, range)
    })
}

#[no_mangle]
extern "C" fn LT_async_memset(
    queue: i64,
    tag: u64,
    lh: i64,
    offset: u64,
    byte: c_int,
    size: u64,
) -> c_int {
    submit_for_region(queue, lh, |queue, region| {
        // As `memset`, which converts to `unsigned char`.
        queue.fill(tag, &region, byte as u8, offset, size)
    })
}

#[no_mangle]
extern "C" fn LT_async_memmove(
    queue: i64,
    tag: u64,
    to: i64,
    to_offset: u64,
    from: i64,
    from_offset: u64,
    size: u64,
) -> c_int {
    submit_for_region(queue, to, |queue, to| {
        let from = process::region(from)?;
        queue.copy(tag, (&from, from_offset), (&to, to_offset), size)
    })
}

#[no_mangle]
extern "C" fn LT_async_fetch_add(
    queue: i64,
    tag: u64,
    lh: i64,
    offset: u64,
    operand: u64,
) -> c_int {
    submit_for_region(queue, lh, |queue, region| {
        queue.fetch_add(tag, &region, offset, operand)
    })
}

#[no_mangle]
extern "C" fn LT_async_compare_swap(
    queue: i64,
    tag: u64,
    lh: i64,
    offset: u64,
    expected: u64,
    new: u64,
) -> c_int {
    submit_for_region(queue, lh, |queue, region| {
        queue.compare_swap(tag, &region, offset, expected, new)
    })
}

#[no_mangle]
extern "C" fn LT_async_swap(queue: i64, tag: u64, lh: i64, offset: u64, new: u64) -> c_int {
    submit_for_region(queue, lh, |queue, region| {
        queue.swap(tag, &region, offset, new)
    })
}

#[no_mangle]
extern "C" fn LT_async_RPC(
    queue: i64,
    tag: u64,
    lh: i64,
    function: u32,
    data: *const c_void,
    size: u64,
    reply: *mut c_void,
    room: u64,
) -> c_int {
    submit_for_region(queue, lh, |queue, region| {
        let (data, reply) = (
            buffer_range(queue, data, size)?,
            buffer_range(queue, reply, room)?,
        );
        queue.call(tag, &region, function, data, reply)
    })
}

#[no_mangle]
extern "C" fn LT_async_send(
    queue: i64,
    tag: u64,
    lh: i64,
    function: u32,
    data: *const c_void,
    size: u64,
) -> c_int {
    submit_for_region(queue, lh, |queue, region| {
        let data = buffer_range(queue, data, size)?;
        queue.send(tag, &region, function, data)
    })
}

#[no_mangle]
extern "C" fn LT_async_recvRPC(queue: i64, tag: u64, lh: i64, to: *mut c_void, size: u64) -> c_int {
    submit_for_region(queue, lh, |queue, _| {
        let to = buffer_range(queue, to, size)?;
        queue.receive(tag, &process::service(lh)?, to)
    })
}

/// # Safety
/// `call` must be NULL or writable.
#[no_mangle]
unsafe extern "C" fn LT_received(queue: i64, lh: i64, at: *const c_void, call: *mut LtCall) -> i64 {
    let parse = |queue: &mut IoQueue| {
        if call.is_null() {
            return Err(Error::Invalid);
        }
        let at = buffer_range(queue, at, IoQueue::RECV_HEADER_BYTES as u64)?.start;
        let received = queue.parse_received(&process::service(lh)?, at)?;
        let lt_call = LtCall {
            id: received
                .call
                .map_or(0, |call| process::insert_call(lh, call)),
            function: received.function,
            node: received.node,
            uid: received.uid,
        };
        // SAFETY: `call` is not NULL, and is writable by the safety requirements.
        unsafe { call.write(lt_call) };
        Ok(received.data.len())
    };
    to_count(process::with_queue(queue, parse))
}

#[no_mangle]
extern "C" fn LT_async_replyRPC(
    queue: i64,
    tag: u64,
    id: u64,
    data: *const c_void,
    size: u64,
) -> c_int {
    let reply = |queue: &mut IoQueue| {
        let data = buffer_range(queue, data, size)?;
        // The call remains pending, for a later reply.
        if queue.is_full() {
            return Err(Error::QueueFull);
        }
        queue.reply(tag, process::remove_call(id)?, data)
    };
    to_status(process::with_queue(queue, reply).map(|()| 0))
}

#[no_mangle]
extern "C" fn LT_submit(queue: i64) -> c_int {
    to_status(process::with_queue(queue, IoQueue::submit).map(|()| 0))
}

#[no_mangle]
extern "C" fn LT_cancel(queue: i64, tag: u64) -> c_int {
    to_status(process::with_queue(queue, |queue| queue.cancel(tag)).map(c_int::from))
}

/// # Safety
/// `completion` must be NULL or writable.
#[no_mangle]
unsafe extern "C" fn LT_wait(queue: i64, completion: *mut LtCompletion) -> c_int {
    // SAFETY: `completion` is valid by the safety requirements.
    unsafe { LT_wait_timeout(queue, completion, -1) }
}

/// # Safety
/// `completion` must be NULL or writable.
#[no_mangle]
unsafe extern "C" fn LT_wait_timeout(
    queue: i64,
    completion: *mut LtCompletion,
    timeout_ms: c_int,
) -> c_int {
    let timeout = u64::try_from(timeout_ms).ok().map(Duration::from_millis);
    let wait = || match completion.is_null() {
        true => Err(Error::Invalid),
        false => process::wait_completion(queue, timeout),
    };
    let write = |done| {
        // SAFETY: `wait` has checked for NULL. `completion` is writable by the safety requirements.
        unsafe { write_completion(done, completion) }
    };
    to_status(wait().map(write))
}

/// # Safety
/// `completion` must be NULL or writable.
#[no_mangle]
unsafe extern "C" fn LT_poll(queue: i64, completion: *mut LtCompletion) -> c_int {
    let poll = || match completion.is_null() {
        true => Err(Error::Invalid),
        false => process::with_queue(queue, IoQueue::try_next)?.ok_or(Error::WouldBlock),
    };
    let write = |done| {
        // SAFETY: `poll` has checked for NULL. `completion` is writable by the safety requirements.
        unsafe { write_completion(done, completion) }
    };
    to_status(poll().map(write))
}

/// Writes a completion to `to`. Returns 0.
///
/// # Safety
/// `to` must be writable.
unsafe fn write_completion(completion: Completion, to: *mut LtCompletion) -> c_int {
    let raw = LtCompletion {
        tag: completion.tag,
        value: completion.result.unwrap_or(0),
        status: to_status(completion.result.map(|_| 0)),
    };
    // SAFETY: `to` is writable by the safety requirements.
    unsafe { to.write(raw) };
    0
}

/// Submits a request for a region.
fn submit_for_region(
    queue: i64,
    lh: i64,
    f: impl FnOnce(&mut IoQueue, Region) -> Result<()>,
) -> c_int {
    let region = process::region(lh);
    let result = region.and_then(|region| process::with_queue(queue, |queue| f(queue, region)));
    to_status(result.map(|()| 0))
}

/// Returns the range of the queue's buffer at `ptr`. An empty range may be at any address.
fn buffer_range(queue: &IoQueue, ptr: *const c_void, size: u64) -> Result<Range<usize>> {
    let size = checked_len(ptr, size)?;
    if size == 0 {
        return Ok(0..0);
    }
    let start = (ptr as usize).wrapping_sub(queue.as_ptr() as usize);
    let end = start.checked_add(size).ok_or(Error::OutOfRange)?;
    Ok(start..end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr::{null, null_mut};

    #[test]
    fn queue_calls_on_unknown_id_return_ebadf() {
        assert_eq!(LT_unqueue(1), -libc::EBADF);
        assert_eq!(LT_submit(1), -libc::EBADF);
        assert_eq!(LT_cancel(1, 0), -libc::EBADF);
        assert_eq!(LT_async_read(1, 0, 1, 0, null_mut(), 0), -libc::EBADF);
        assert_eq!(LT_async_write(1, 0, 1, 0, null(), 0), -libc::EBADF);
        assert_eq!(LT_async_recvRPC(1, 0, 1, null_mut(), 0), -libc::EBADF);
        assert_eq!(LT_async_replyRPC(1, 0, 1, null(), 0), -libc::EBADF);
        let mut done = LtCompletion {
            tag: 0,
            value: 0,
            status: 0,
        };
        // SAFETY: all pointers are NULL or writable.
        unsafe {
            assert_eq!(LT_wait(1, &raw mut done), -libc::EBADF);
            assert_eq!(LT_wait_timeout(1, &raw mut done, 0), -libc::EBADF);
            assert_eq!(LT_poll(1, null_mut()), -libc::EINVAL);
            assert_eq!(LT_queue(8, 8, null_mut()), -i64::from(libc::EINVAL));
        }
    }
}
