// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The functions that C calls: they check arguments, and turn results into negative errno.

use std::ffi::{c_char, c_int, c_void, CStr};
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::slice;
use std::time::Duration;

use kite_rs::{
    AllocOptions, Error, Incoming, Lock, Memory, Priority, Region, Result, Rights, ServeOptions,
    DATA_MAX, STRIPE_MAX,
};

use crate::process;

/// # Safety
/// `rnic` is NULL or a C string.
#[no_mangle]
unsafe extern "C" fn LT_join(rnic: *const c_char) -> c_int {
    // SAFETY: the caller vouches for it.
    let rnic = unsafe { text(rnic) };
    status(rnic.and_then(process::join))
}

#[no_mangle]
extern "C" fn LT_set_priority(priority: u32) -> c_int {
    let priority = match priority {
        0 => Ok(Priority::High),
        1 => Ok(Priority::Low),
        _ => Err(Error::Invalid),
    };
    let set = |priority| process::session()?.set_priority(priority);
    status(priority.and_then(set).map(|()| 0))
}

/// # Safety
/// `nodes` points to `node_count` numbers, unless that is 0; `name` is NULL or a C string.
#[no_mangle]
unsafe extern "C" fn LT_malloc(
    nodes: *const u32,
    node_count: u32,
    size: u64,
    name: *const c_char,
    others: u32,
) -> i64 {
    let options = || {
        // SAFETY: the caller vouches for it.
        let name = unsafe { text(name) }?;
        // SAFETY: likewise.
        let nodes = unsafe { numbers(nodes, node_count) }?;
        let others = Rights::from_bits(others).ok_or(Error::Invalid)?;
        Ok(AllocOptions::new(size)
            .nodes(nodes)
            .name(name)
            .others(others))
    };
    handle(options().and_then(|options| process::session()?.alloc(&options)))
}

/// # Safety
/// `memory` points to `size` bytes that may be read and written for as long as the region lives, and that change at
/// any time; `name` is NULL or a C string.
#[no_mangle]
unsafe extern "C" fn LT_register(
    memory: *mut c_void,
    size: u64,
    name: *const c_char,
    others: u32,
) -> i64 {
    let register = || {
        let at = NonNull::new(memory.cast()).ok_or(Error::Fault)?;
        // SAFETY: the caller vouches for it.
        let memory = unsafe { Memory::from_raw(at, length(memory, size)?) };
        // SAFETY: likewise.
        let name = unsafe { text(name) }?;
        let others = Rights::from_bits(others).ok_or(Error::Invalid)?;
        process::session()?.register(&memory, name, others)
    };
    handle(register())
}

#[no_mangle]
extern "C" fn LT_free(lh: i64) -> c_int {
    status(process::close(lh, Region::free).map(|()| 0))
}

/// # Safety
/// `name` is NULL or a C string.
#[no_mangle]
unsafe extern "C" fn LT_map(name: *const c_char, rights: u32) -> i64 {
    // SAFETY: the caller vouches for it.
    let name = unsafe { text(name) };
    let map = |name| {
        let rights = Rights::from_bits(rights).ok_or(Error::Invalid)?;
        process::session()?.map(name, rights)
    };
    handle(name.and_then(map))
}

#[no_mangle]
extern "C" fn LT_unmap(lh: i64) -> c_int {
    let unmap = |region: Region| {
        drop(region);
        Ok(())
    };
    status(process::close(lh, unmap).map(|()| 0))
}

/// # Safety
/// `buffer` points to `size` bytes that may be written, and that nobody else accesses meanwhile.
#[no_mangle]
unsafe extern "C" fn LT_read(lh: i64, offset: u64, buffer: *mut c_void, size: u64) -> c_int {
    let read = |region: Region| {
        let buffer: &mut [MaybeUninit<u8>] = match length(buffer, size)? {
            0 => &mut [],
            // SAFETY: it is not NULL, the length fits, and the caller vouches for the rest.
            size => unsafe { slice::from_raw_parts_mut(buffer.cast(), size) },
        };
        region.read_uninit_at(buffer, offset).map(|_| 0)
    };
    status(process::region(lh).and_then(read))
}

/// # Safety
/// `buffer` points to `size` bytes that may be read, and that nobody writes meanwhile.
#[no_mangle]
unsafe extern "C" fn LT_write(lh: i64, offset: u64, buffer: *const c_void, size: u64) -> c_int {
    let write = |region: Region| {
        // SAFETY: the caller vouches for it.
        let buffer = unsafe { bytes(buffer, size) }?;
        region.write_at(buffer, offset).map(|()| 0)
    };
    status(process::region(lh).and_then(write))
}

/// `struct LT_segment`.
#[repr(C)]
#[derive(Clone, Copy)]
struct LtSegment {
    offset: u64,
    data: *mut c_void,
    size: u64,
}

/// The segments at `segments`.
///
/// # Safety
/// `segments` points to `count` of them that may be read, and that nobody writes meanwhile.
unsafe fn segments<'a>(segments: *const LtSegment, count: u32) -> Result<&'a [LtSegment]> {
    match usize::try_from(count).map_err(|_| Error::Invalid)? {
        0 => Ok(&[]),
        _ if segments.is_null() => Err(Error::Invalid),
        // SAFETY: it is not NULL, and the caller vouches for the rest.
        count => Ok(unsafe { slice::from_raw_parts(segments, count) }),
    }
}

/// # Safety
/// `list` points to `count` segments, whose data point to as many bytes as they say that may be written, no byte
/// in two of them, and that nobody else accesses meanwhile.
#[no_mangle]
unsafe extern "C" fn LT_readv(lh: i64, list: *const LtSegment, count: u32) -> c_int {
    let read = |region: Region| {
        // SAFETY: the caller vouches for it.
        let list = unsafe { segments(list, count) }?;
        let parts: Result<Vec<_>> = list
            .iter()
            // SAFETY: the caller vouches for it.
            .map(|one| Ok((one.offset, unsafe { bytes_mut(one.data, one.size) }?)))
            .collect();
        region.read_vectored_at(&mut parts?).map(|()| 0)
    };
    status(process::region(lh).and_then(read))
}

/// # Safety
/// `list` points to `count` segments, whose data point to as many bytes as they say that may be read, and that
/// nobody writes meanwhile.
#[no_mangle]
unsafe extern "C" fn LT_writev(lh: i64, list: *const LtSegment, count: u32) -> c_int {
    let write = |region: Region| {
        // SAFETY: the caller vouches for it.
        let list = unsafe { segments(list, count) }?;
        let parts: Result<Vec<_>> = list
            .iter()
            // SAFETY: the caller vouches for it.
            .map(|one| Ok((one.offset, unsafe { bytes(one.data, one.size) }?)))
            .collect();
        region.write_vectored_at(&parts?).map(|()| 0)
    };
    status(process::region(lh).and_then(write))
}

#[no_mangle]
extern "C" fn LT_grant(lh: i64, uid: u32, rights: u32) -> c_int {
    let rights = Rights::from_bits(rights).ok_or(Error::Invalid);
    let grant = |rights| process::region(lh)?.grant(uid, rights);
    status(rights.and_then(grant).map(|()| 0))
}

#[no_mangle]
extern "C" fn LT_grant_others(lh: i64, rights: u32) -> c_int {
    let rights = Rights::from_bits(rights).ok_or(Error::Invalid);
    let grant = |rights| process::region(lh)?.grant_others(rights);
    status(rights.and_then(grant).map(|()| 0))
}

/// # Safety
/// `nodes` points to `node_count` numbers, unless that is 0.
#[no_mangle]
unsafe extern "C" fn LT_move(
    lh: i64,
    nodes: *const u32,
    node_count: u32,
    timeout_ms: u32,
) -> c_int {
    // SAFETY: the caller vouches for it.
    let nodes = unsafe { numbers(nodes, node_count) };
    let moved = nodes.and_then(|nodes| patient(process::region(lh)?, timeout_ms).move_to(&nodes));
    status(moved.map(|()| 0))
}

#[no_mangle]
extern "C" fn LT_memset(lh: i64, offset: u64, byte: c_int, size: u64) -> c_int {
    // As of memset.
    let byte = byte as u8;
    let set = process::region(lh).and_then(|region| region.fill(byte, offset, size));
    status(set.map(|()| 0))
}

#[no_mangle]
extern "C" fn LT_memmove(to: i64, to_offset: u64, from: i64, from_offset: u64, size: u64) -> c_int {
    let copy = || {
        let (from, to) = (process::region(from)?, process::region(to)?);
        from.copy_to(from_offset, &to, to_offset, size)
    };
    status(copy().map(|()| 0))
}

#[no_mangle]
extern "C" fn LT_memcpy(to: i64, to_offset: u64, from: i64, from_offset: u64, size: u64) -> c_int {
    LT_memmove(to, to_offset, from, from_offset, size)
}

/// # Safety
/// `value` is NULL, or points to a number that may be written.
#[no_mangle]
unsafe extern "C" fn LT_fetch_add(lh: i64, offset: u64, operand: u64, value: *mut u64) -> c_int {
    let word = process::region(lh).and_then(|region| region.fetch_add(offset, operand));
    // SAFETY: the caller vouches for it.
    unsafe { give(word, value) }
}

/// # Safety
/// As of [`LT_fetch_add`].
#[no_mangle]
unsafe extern "C" fn LT_compare_swap(
    lh: i64,
    offset: u64,
    expected: u64,
    new: u64,
    value: *mut u64,
) -> c_int {
    let word = process::region(lh).and_then(|region| region.compare_swap(offset, expected, new));
    // SAFETY: the caller vouches for it.
    unsafe { give(word, value) }
}

/// # Safety
/// As of [`LT_fetch_add`].
#[no_mangle]
unsafe extern "C" fn LT_swap(lh: i64, offset: u64, new: u64, value: *mut u64) -> c_int {
    let word = process::region(lh).and_then(|region| region.swap(offset, new));
    // SAFETY: the caller vouches for it.
    unsafe { give(word, value) }
}

#[no_mangle]
extern "C" fn LT_test_set(lh: i64, offset: u64) -> c_int {
    let set = process::region(lh).and_then(|region| region.test_set(offset));
    status(set.map(c_int::from))
}

/// `struct LT_call`.
#[repr(C)]
struct LtCall {
    id: u64,
    function: u32,
    node: u32,
    uid: u32,
}

#[no_mangle]
extern "C" fn LT_regRPC(lh: i64, ring_size: u32, data_max: u32) -> c_int {
    let options = ServeOptions::new().ring_size(ring_size).data_max(data_max);
    status(process::serve(lh, &options).map(|()| 0))
}

/// # Safety
/// `data` points to `size` bytes that may be read, and `reply` to `room` bytes that may be written, and
/// nobody else accesses them meanwhile but to read `data`.
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
        // SAFETY: the caller vouches for both.
        let (data, reply) = unsafe { (bytes(data, size)?, bytes_mut(reply, room)?) };
        region.call(function, data, reply)
    };
    count(process::region(lh).and_then(call))
}

/// `struct LT_reply`.
#[repr(C)]
struct LtReply {
    data: *mut c_void,
    room: u64,
    result: i64,
}

/// # Safety
/// `lhs` points to `count` handles, `data` to `size` bytes that may be read, and `replies` to `count` replies
/// that may be written, whose data point to as much room as they say; nobody else accesses any of them
/// meanwhile, but to read the former two.
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
        // SAFETY: they are not NULL, and the caller vouches for the rest.
        let (lhs, replies, data) = unsafe {
            (
                slice::from_raw_parts(lhs, count),
                slice::from_raw_parts_mut(replies, count),
                bytes(data, size)?,
            )
        };
        let regions: Result<Vec<Region>> = lhs.iter().map(|&lh| process::region(lh)).collect();
        let room = replies.iter().map(|reply| reply.room).max().unwrap_or(0);
        let room = usize::try_from(room.min(DATA_MAX as u64)).map_err(|_| Error::Invalid)?;
        let all = process::session()?.multicast(&regions?, function, data, room)?;
        for (reply, came) in replies.iter_mut().zip(all) {
            // SAFETY: the caller vouches for it.
            reply.result = self::count(came.and_then(|came| unsafe { take(reply, &came) }));
        }
        Ok(0)
    };
    status(call())
}

/// Copies what came to where the caller wants it.
///
/// # Safety
/// The reply's data point to as much room as it says.
unsafe fn take(reply: &LtReply, came: &[u8]) -> Result<usize> {
    // SAFETY: the caller vouches for it.
    let room = unsafe { bytes_mut(reply.data, reply.room) }?;
    let to = room.get_mut(..came.len()).ok_or(Error::TooLong)?;
    to.copy_from_slice(came);
    Ok(came.len())
}

/// # Safety
/// `data` points to `size` bytes that may be read, and that nobody writes meanwhile.
#[no_mangle]
unsafe extern "C" fn LT_send(lh: i64, function: u32, data: *const c_void, size: u64) -> c_int {
    let send = |region: Region| {
        // SAFETY: the caller vouches for it.
        let data = unsafe { bytes(data, size) }?;
        region.send(function, data).map(|()| 0)
    };
    status(process::region(lh).and_then(send))
}

/// # Safety
/// `call` may be written; `buffer` points to `room` bytes that may be written, and that nobody else accesses
/// meanwhile.
#[no_mangle]
unsafe extern "C" fn LT_recvRPC(lh: i64, call: *mut LtCall, buffer: *mut c_void, room: u64) -> i64 {
    let receive = || {
        // SAFETY: the caller vouches for it.
        let buffer = unsafe { bytes_mut(buffer, room) }?;
        let service = process::service(lh)?;
        // SAFETY: the caller vouches for it.
        unsafe { give_call(service.receive(buffer)?, call) }
    };
    count(receive())
}

/// # Safety
/// `data` points to `size` bytes that may be read, and that nobody writes meanwhile.
#[no_mangle]
unsafe extern "C" fn LT_replyRPC(id: u64, data: *const c_void, size: u64) -> c_int {
    let reply = |call: kite_rs::Call| {
        // SAFETY: the caller vouches for it.
        let data = unsafe { bytes(data, size) }?;
        call.reply(data).map(|()| 0)
    };
    status(process::take_call(id).and_then(reply))
}

/// # Safety
/// As of [`LT_replyRPC`] and [`LT_recvRPC`]; and `call` may be read.
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
        return count(Err(Error::Invalid));
    }
    // SAFETY: it is not NULL, and the caller vouches for the rest.
    let id = unsafe { (*call).id };
    if id == 0 {
        // SAFETY: the caller vouches for it.
        return unsafe { LT_recvRPC(lh, call, buffer, room) };
    }
    let reply_receive = |answered: kite_rs::Call| {
        // SAFETY: the caller vouches for both.
        let (data, buffer) = unsafe { (bytes(data, size)?, bytes_mut(buffer, room)?) };
        let service = process::service(lh)?;
        // SAFETY: the caller vouches for it.
        unsafe { give_call(service.reply_receive(answered, data, buffer)?, call) }
    };
    count(process::take_call(id).and_then(reply_receive))
}

/// `LT_SHARED` and `LT_TRY`.
const SHARED: u32 = 1;
const TRY: u32 = 2;
const SHARED_TRY: u32 = SHARED | TRY;

/// # Safety
/// `id` is NULL, which is refused, or points to a number that may be written.
#[no_mangle]
unsafe extern "C" fn LT_lock(
    lh: i64,
    number: u64,
    flags: u32,
    timeout_ms: u32,
    id: *mut u64,
) -> c_int {
    let lock = |region: Region| {
        let region = patient(region, timeout_ms);
        match flags {
            _ if id.is_null() => Err(Error::Invalid),
            0 => region.lock(number),
            SHARED => region.lock_shared(number),
            TRY => region.try_lock(number),
            SHARED_TRY => region.try_lock_shared(number),
            _ => Err(Error::Invalid),
        }
    };
    status(process::region(lh).and_then(lock).map(|lock| {
        let died = lock.holder_died();
        // SAFETY: it is not NULL, and the caller vouches for the rest.
        unsafe { id.write_unaligned(process::keep_lock(lh, lock)) };
        c_int::from(died)
    }))
}

#[no_mangle]
extern "C" fn LT_unlock(id: u64) -> c_int {
    status(process::take_lock(id).and_then(Lock::unlock).map(|()| 0))
}

#[no_mangle]
extern "C" fn LT_barrier(lh: i64, number: u64, count: u32, timeout_ms: u32) -> i64 {
    let pass = |region: Region| patient(region, timeout_ms).barrier(number, count);
    let passed = process::region(lh).and_then(pass);
    let passed = passed.map(|generation| i64::try_from(generation).unwrap_or(i64::MAX));
    passed.unwrap_or_else(|error| -i64::from(error.errno()))
}

/// A region with that deadline; 0 is the module's.
fn patient(region: Region, timeout_ms: u32) -> Region {
    match timeout_ms {
        0 => region,
        ms => region.with_timeout(Duration::from_millis(ms.into())),
    }
}

/// Writes what was received to where the caller wants it. Returns the bytes of its data.
///
/// # Safety
/// `to` is NULL, which is refused, or may be written.
unsafe fn give_call(incoming: Incoming<'_>, to: *mut LtCall) -> Result<usize> {
    if to.is_null() {
        return Err(Error::Invalid);
    }
    let call = LtCall {
        id: incoming.call.map_or(0, process::keep_call),
        function: incoming.function,
        node: incoming.node,
        uid: incoming.uid,
    };
    // SAFETY: it is not NULL, and the caller vouches for the rest.
    unsafe { to.write(call) };
    Ok(incoming.data.len())
}

/// Memory of C that is read.
///
/// # Safety
/// `at` points to `size` bytes that nobody writes for `'a`, unless it is NULL or the size impossible.
unsafe fn bytes<'a>(at: *const c_void, size: u64) -> Result<&'a [u8]> {
    Ok(match length(at, size)? {
        0 => &[],
        // SAFETY: it is not NULL, the length fits, and the caller vouches for the rest.
        size => unsafe { slice::from_raw_parts(at.cast(), size) },
    })
}

/// Memory of C that is written.
///
/// # Safety
/// `at` points to `size` bytes that nobody else accesses for `'a`, unless it is NULL or the size impossible.
unsafe fn bytes_mut<'a>(at: *mut c_void, size: u64) -> Result<&'a mut [u8]> {
    Ok(match length(at, size)? {
        0 => &mut [],
        // SAFETY: it is not NULL, the length fits, and the caller vouches for the rest. The kernel writes
        // it before anybody reads it.
        size => unsafe { slice::from_raw_parts_mut(at.cast(), size) },
    })
}

/// Writes a result to where the caller wants it, if anywhere.
///
/// # Safety
/// `to` is NULL, or points to a number that may be written.
unsafe fn give(result: Result<u64>, to: *mut u64) -> c_int {
    if let (Ok(value), false) = (&result, to.is_null()) {
        // SAFETY: it is not NULL, and the caller vouches for the rest.
        unsafe { to.write_unaligned(*value) };
    }
    status(result.map(|_| 0))
}

/// A C string; NULL is the empty one.
///
/// # Safety
/// `text` is NULL or a C string that lives for `'a`.
unsafe fn text<'a>(text: *const c_char) -> Result<&'a str> {
    if text.is_null() {
        return Ok("");
    }
    // SAFETY: it is not NULL, and the caller vouches for the rest.
    unsafe { CStr::from_ptr(text) }
        .to_str()
        .map_err(|_| Error::Invalid)
}

/// # Safety
/// `numbers` points to `count` numbers, unless that is 0.
unsafe fn numbers(numbers: *const u32, count: u32) -> Result<Vec<u32>> {
    match usize::try_from(count) {
        Ok(0) => Ok(Vec::new()),
        Ok(count) if count <= STRIPE_MAX && !numbers.is_null() && numbers.is_aligned() => {
            // SAFETY: it is aligned and not NULL, and the caller vouches for the rest.
            Ok(unsafe { slice::from_raw_parts(numbers, count) }.to_vec())
        }
        _ => Err(Error::Invalid),
    }
}

/// The size of a buffer, if memory can have it.
pub(crate) fn length(buffer: *const c_void, size: u64) -> Result<usize> {
    let fits = isize::try_from(size).is_ok() && (size == 0 || !buffer.is_null());
    usize::try_from(size)
        .ok()
        .filter(|_| fits)
        .ok_or(Error::Invalid)
}

pub(crate) fn status(result: Result<c_int>) -> c_int {
    result.unwrap_or_else(|error| -error.errno())
}

fn count(result: Result<usize>) -> i64 {
    let count = result.map(|count| i64::try_from(count).unwrap_or(i64::MAX));
    count.unwrap_or_else(|error| -i64::from(error.errno()))
}

fn handle(result: Result<Region>) -> i64 {
    result.map_or_else(|error| -i64::from(error.errno()), process::keep)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr::{null, null_mut};

    #[test]
    fn without_joining_there_is_nothing() {
        // SAFETY: all pointers are C strings, or NULL where that is allowed.
        unsafe {
            assert_eq!(
                LT_malloc(null(), 0, 1, null(), 0),
                -i64::from(libc::ENOTCONN)
            );
            assert_eq!(LT_map(c"name".as_ptr(), 1), -i64::from(libc::ENOTCONN));
            assert_eq!(LT_read(1, 0, null_mut(), 0), -libc::EBADF);
            assert_eq!(LT_write(0, 0, null(), 0), -libc::EBADF);
            assert_eq!(
                LT_register(null_mut(), 1, null(), 0),
                -i64::from(libc::EFAULT)
            );
            assert_eq!(LT_readv(1, null(), 0), -libc::EBADF);
            assert_eq!(LT_writev(1, null(), 1), -libc::EBADF);
            assert_eq!(LT_fetch_add(1, 0, 1, null_mut()), -libc::EBADF);
            assert_eq!(LT_send(1, 0, null(), 0), -libc::EBADF);
            assert_eq!(LT_replyRPC(1, null(), 0), -libc::EBADF);
            let bad = -i64::from(libc::EBADF);
            assert_eq!(LT_RPC(1, 0, null(), 0, null_mut(), 0), bad);
            assert_eq!(LT_recvRPC(1, null_mut(), null_mut(), 0), bad);
            let none = LT_multicast_RPC(null(), 0, 0, null(), 0, null_mut());
            assert_eq!(none, 0);
            let nowhere = LT_multicast_RPC(&1, 1, 0, null(), 0, null_mut());
            assert_eq!(nowhere, -libc::EINVAL);
        }
        assert_eq!(LT_set_priority(1), -libc::ENOTCONN);
        assert_eq!(LT_set_priority(2), -libc::EINVAL);
        assert_eq!(LT_memset(1, 0, 0, 1), -libc::EBADF);
        assert_eq!(LT_grant(1, 7, 8), -libc::EINVAL);
        assert_eq!(LT_grant_others(1, 7), -libc::EBADF);
        assert_eq!(LT_memcpy(1, 0, 2, 0, 1), -libc::EBADF);
        // SAFETY: there is no node.
        let moved = unsafe { LT_move(1, null(), 0, 0) };
        assert_eq!(moved, -libc::EBADF);
        assert_eq!((LT_free(1), LT_unmap(-1)), (-libc::EBADF, -libc::EBADF));
        assert_eq!(
            (LT_regRPC(1, 0, 0), LT_unlock(1)),
            (-libc::EBADF, -libc::EBADF)
        );
        assert_eq!(LT_barrier(1, 0, 1, 0), -i64::from(libc::EBADF));
    }

    #[test]
    fn wrong_arguments_are_refused() {
        // SAFETY: all pointers are C strings, or NULL where that is allowed or refused.
        unsafe {
            assert_eq!(LT_malloc(null(), 1, 1, null(), 0), -i64::from(libc::EINVAL));
            assert_eq!(LT_malloc(null(), 0, 1, null(), 8), -i64::from(libc::EINVAL));
            assert_eq!(LT_map(c"\xff".as_ptr(), 1), -i64::from(libc::EINVAL));
        }
        assert_eq!(length(null(), 1), Err(Error::Invalid));
        assert_eq!(length(null(), 0), Ok(0));
        assert_eq!(
            length([0u8; 4].as_ptr().cast(), u64::MAX),
            Err(Error::Invalid)
        );
    }
}
