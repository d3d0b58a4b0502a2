// SPDX-License-Identifier: GPL-2.0 OR MIT
//! RPC: calls, messages and servers.

use std::ffi::{c_int, c_void};
use std::slice;

use kite_rs::{Error, IncomingRpc, Region, Result, ServeOptions, RPC_MAX_BYTES};

use crate::arguments::{bytes_from_c, bytes_mut_from_c, to_count, to_status};
use crate::process;

/// `struct LT_call`.
#[repr(C)]
pub(crate) struct LtCall {
    pub(crate) id: u64,
    pub(crate) function: u32,
    pub(crate) node: u32,
    pub(crate) uid: u32,
}

#[no_mangle]
extern "C" fn LT_regRPC(lh: i64, ring_size: u32, data_max: u32) -> c_int {
    let options = ServeOptions::new().ring_size(ring_size).data_max(data_max);
    to_status(process::serve(lh, &options).map(|()| 0))
}

/// # Safety
/// `data` must be readable for `size` bytes, and `reply` writable for `room` bytes. No other thread may write `data`,
/// or access `reply`, during the call.
#[no_mangle]
unsafe extern "C" fn LT_RPC(
    lh: i64,
    function: u32,
    data: *const c_void,
    size: u64,
    reply: *mut c_void,
    room: u64,
) -> i64 {
    let call = |region: Region| {
        // SAFETY: `data` and `reply` are valid by the safety requirements.
        let (data, reply) = unsafe { (bytes_from_c(data, size)?, bytes_mut_from_c(reply, room)?) };
        region.call(function, data, reply)
    };
    to_count(process::region(lh).and_then(call))
}

/// `struct LT_reply`.
#[repr(C)]
struct LtReply {
    data: *mut c_void,
    room: u64,
    result: i64,
}

/// # Safety
/// `lhs` must be NULL or point to `count` handles, and `data` be readable for `size` bytes. `replies` must be NULL or
/// point to `count` writable replies, and the data of each be writable for its `room`. No other thread may write `lhs`
/// or `data`, or access `replies` or their data, during the call.
#[no_mangle]
unsafe extern "C" fn LT_multicast_RPC(
    lhs: *const i64,
    count: u32,
    function: u32,
    data: *const c_void,
    size: u64,
    replies: *mut LtReply,
) -> c_int {
    let call = || {
        let count = usize::try_from(count).map_err(|_| Error::Invalid)?;
        if count != 0 && (lhs.is_null() || replies.is_null()) {
            return Err(Error::Invalid);
        }
        if count == 0 {
            return Ok(0);
        }
        // SAFETY: `lhs` and `replies` are not NULL. The rest holds by the safety requirements.
        let (lhs, replies, data) = unsafe {
            (
                slice::from_raw_parts(lhs, count),
                slice::from_raw_parts_mut(replies, count),
                bytes_from_c(data, size)?,
            )
        };
        let regions: Result<Vec<Region>> = lhs.iter().map(|&lh| process::region(lh)).collect();
        let reply_max = replies.iter().map(|reply| reply.room).max().unwrap_or(0);
        let reply_max =
            usize::try_from(reply_max.min(RPC_MAX_BYTES as u64)).map_err(|_| Error::Invalid)?;
        let results = process::session()?.multicast(&regions?, function, data, reply_max)?;
        for (reply, result) in replies.iter_mut().zip(results) {
            let copied = result.and_then(|data| {
                // SAFETY: the data of `reply` are writable by the safety requirements.
                unsafe { copy_reply(reply, &data) }
            });
            reply.result = to_count(copied);
        }
        Ok(0)
    };
    to_status(call())
}

/// Copies a reply to the buffer of the caller. Returns its bytes.
///
/// # Errors
/// - [`Error::MessageTooLong`]: the buffer is too small.
///
/// # Safety
/// The data of `reply` must be writable for its `room`.
unsafe fn copy_reply(reply: &LtReply, data: &[u8]) -> Result<usize> {
    // SAFETY: the data are writable by the safety requirements.
    let buffer = unsafe { bytes_mut_from_c(reply.data, reply.room) }?;
    let to = buffer.get_mut(..data.len()).ok_or(Error::MessageTooLong)?;
    to.copy_from_slice(data);
    Ok(data.len())
}

/// # Safety
/// `data` must be readable for `size` bytes. No other thread may write it during the call.
#[no_mangle]
unsafe extern "C" fn LT_send(lh: i64, function: u32, data: *const c_void, size: u64) -> c_int {
    let send = |region: Region| {
        // SAFETY: `data` is valid by the safety requirements.
        let data = unsafe { bytes_from_c(data, size) }?;
        region.send(function, data).map(|()| 0)
    };
    to_status(process::region(lh).and_then(send))
}

/// # Safety
/// `call` must be NULL or writable, and `buffer` writable for `room` bytes. No other thread may access them during the
/// call.
#[no_mangle]
unsafe extern "C" fn LT_recvRPC(lh: i64, call: *mut LtCall, buffer: *mut c_void, room: u64) -> i64 {
    let receive = || {
        // SAFETY: `buffer` is valid by the safety requirements.
        let buffer = unsafe { bytes_mut_from_c(buffer, room) }?;
        let service = process::service(lh)?;
        // SAFETY: `call` is valid by the safety requirements.
        unsafe { write_call(lh, service.receive(buffer)?, call) }
    };
    to_count(receive())
}

/// # Safety
/// `data` must be readable for `size` bytes. No other thread may write it during the call.
#[no_mangle]
unsafe extern "C" fn LT_replyRPC(id: u64, data: *const c_void, size: u64) -> c_int {
    let reply = |call: kite_rs::PendingCall| {
        // SAFETY: `data` is valid by the safety requirements.
        let data = unsafe { bytes_from_c(data, size) }?;
        call.reply(data).map(|()| 0)
    };
    to_status(process::remove_call(id).and_then(reply))
}

/// # Safety
/// See [`LT_replyRPC`] and [`LT_recvRPC`]. `call` must also be readable.
#[no_mangle]
unsafe extern "C" fn LT_reply_recvRPC(
    lh: i64,
    call: *mut LtCall,
    data: *const c_void,
    size: u64,
    buffer: *mut c_void,
    room: u64,
) -> i64 {
    if call.is_null() {
        return to_count(Err(Error::Invalid));
    }
    // SAFETY: `call` is not NULL, and is readable by the safety requirements.
    let id = unsafe { (*call).id };
    if id == 0 {
        // SAFETY: the safety requirements include those of `LT_recvRPC`.
        return unsafe { LT_recvRPC(lh, call, buffer, room) };
    }
    let reply_receive = |call_to_reply: kite_rs::PendingCall| {
        // SAFETY: `data` and `buffer` are valid by the safety requirements.
        let (data, buffer) =
            unsafe { (bytes_from_c(data, size)?, bytes_mut_from_c(buffer, room)?) };
        let service = process::service(lh)?;
        // SAFETY: `call` is valid by the safety requirements.
        unsafe {
            write_call(
                lh,
                service.reply_receive(call_to_reply, data, buffer)?,
                call,
            )
        }
    };
    to_count(process::remove_call(id).and_then(reply_receive))
}

/// Writes the description of a received call or message to `to`. Returns the bytes of its data.
///
/// # Safety
/// `to` must be NULL or writable.
unsafe fn write_call(lh: i64, incoming: IncomingRpc<'_>, to: *mut LtCall) -> Result<usize> {
    if to.is_null() {
        return Err(Error::Invalid);
    }
    let call = LtCall {
        id: incoming
            .call
            .map_or(0, |call| process::insert_call(lh, call)),
        function: incoming.function,
        node: incoming.node,
        uid: incoming.uid,
    };
    // SAFETY: `to` is not NULL, and is writable by the safety requirements.
    unsafe { to.write(call) };
    Ok(incoming.data.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr::{null, null_mut};

    #[test]
    fn rpc_calls_without_join_return_ebadf() {
        let (bad, bad_long) = (-libc::EBADF, -i64::from(libc::EBADF));
        // SAFETY: all pointers are NULL, with a size of 0 or where NULL is rejected, or point to one handle.
        unsafe {
            assert_eq!(LT_send(1, 0, null(), 0), bad);
            assert_eq!(LT_replyRPC(1, null(), 0), bad);
            assert_eq!(LT_RPC(1, 0, null(), 0, null_mut(), 0), bad_long);
            assert_eq!(LT_recvRPC(1, null_mut(), null_mut(), 0), bad_long);
            let none = LT_multicast_RPC(null(), 0, 0, null(), 0, null_mut());
            assert_eq!(none, 0);
            let without_replies = LT_multicast_RPC(&1, 1, 0, null(), 0, null_mut());
            assert_eq!(without_replies, -libc::EINVAL);
        }
        assert_eq!(LT_regRPC(1, 0, 0), bad);
    }
}
