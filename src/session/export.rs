// SPDX-License-Identifier: GPL-2.0

//! Sessions of other kernel modules: the functions of `include/kite.h`.
//!
//! `c-shim/exports.c` exports them. A kernel user acts as root.

use super::{abi, call::Outgoing, caller::ROOT, qos, segments::Segments, Session};
use crate::{
    bindings, errno,
    fabric::flight::Direction,
    lmr::{
        alloc::Order,
        atomic::Update,
        copy::Fill,
        grant::Grant,
        io::{Access, Span},
    },
    rnic,
    sys::{
        deadline::Deadline,
        memory::Memory,
        pin::{Pinned, Release},
    },
};
use core::ptr;
use kernel::{error::from_result, page::PAGE_SIZE, prelude::*, sync::Arc};
use kite_core::{name::Name, rights::Rights};

/// Checks at compile time that each function is what the header declares.
macro_rules! check {
    ($($name:ident)*) => {
        $(const _: () = {
            if true { bindings::$name } else { $name };
        };)*
    };
}

pub(super) use check;

check! {
    kite_open kite_close kite_alloc kite_map kite_unmap kite_free kite_read kite_write kite_atomic
    kite_serve kite_receive kite_reply kite_abandon kite_call kite_send kite_lock kite_unlock kite_barrier
    kite_set kite_copy kite_grant kite_move kite_readv kite_writev kite_register kite_set_priority
}

/// # Safety
///
/// `session` must be open.
unsafe fn borrow<'a>(session: *mut bindings::kite_session) -> &'a Session {
    // SAFETY: By the safety requirements; `kite_open` made the pointer from an `Arc<Session>`.
    unsafe { &*session.cast::<Session>() }
}

/// # Safety
///
/// `name` must be null or a string.
unsafe fn optional_name(name: *const c_char) -> Result<Option<Name>> {
    if name.is_null() {
        return Ok(None);
    }
    // SAFETY: By the safety requirements.
    match unsafe { CStr::from_char_ptr(name) }.to_bytes() {
        b"" => Ok(None),
        bytes => Name::new(bytes).map(Some).ok_or_else(errno::nametoolong),
    }
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `rnic` must be null or a string.
#[no_mangle]
unsafe extern "C" fn kite_open(rnic: *const c_char) -> *mut bindings::kite_session {
    let open = || -> Result<Arc<Session>> {
        let name = if rnic.is_null() {
            c""
        } else {
            // SAFETY: By the safety requirements.
            unsafe { CStr::from_char_ptr(rnic) }
        };
        let session = Session::new()?;
        session.bind(rnic::find(name.to_bytes())?, None)?;
        Ok(session)
    };
    match open() {
        Ok(session) => Arc::into_raw(session).cast_mut().cast(),
        Err(error) => error.to_ptr(),
    }
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open, and is not any more.
#[no_mangle]
unsafe extern "C" fn kite_close(session: *mut bindings::kite_session) {
    // SAFETY: By the safety requirements; this takes back what `kite_open` gave.
    let session = unsafe { Arc::from_raw(session.cast::<Session>()) };
    session.close();
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open.
#[no_mangle]
unsafe extern "C" fn kite_set_priority(
    session: *mut bindings::kite_session,
    priority: u32,
) -> c_int {
    from_result(|| {
        // SAFETY: By the safety requirements.
        let session = unsafe { borrow(session) };
        session.set_low(qos::is_low(priority)?).map(|()| 0)
    })
}

/// The numbers of nodes, of which there may be none.
///
/// # Safety
///
/// `nodes` must be null or point to `count` numbers that nobody changes while the result is used.
unsafe fn numbers<'a>(nodes: *const u32, count: u32) -> Result<&'a [u32]> {
    match (nodes.is_null(), count) {
        (_, 0) => Ok(&[]),
        (false, 1..=bindings::KITE_STRIPE_MAX) => {
            // SAFETY: By the safety requirements.
            Ok(unsafe { core::slice::from_raw_parts(nodes, count as usize) })
        }
        _ => Err(EINVAL),
    }
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open, `name` null or a string, `nodes` null or `node_count` numbers, and `handle`
/// writable.
#[no_mangle]
unsafe extern "C" fn kite_alloc(
    session: *mut bindings::kite_session,
    name: *const c_char,
    len: u64,
    nodes: *const u32,
    node_count: u32,
    others: u32,
    handle: *mut u64,
) -> c_int {
    from_result(|| {
        if len == 0 {
            return Err(EINVAL);
        }
        let order = Order {
            len,
            // SAFETY: By the safety requirements.
            nodes: unsafe { numbers(nodes, node_count)? },
            // SAFETY: As above.
            name: unsafe { optional_name(name)? },
            owner: ROOT,
            others: Rights::from_bits(others).ok_or(EINVAL)?,
        };
        // SAFETY: By the safety requirements.
        unsafe { ptr::write(handle, borrow(session).alloc(&order)?) };
        Ok(0)
    })
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open, `buf` valid for `len` bytes until `release` is called, which may be done on any thread
/// that may sleep, `name` null or a string, and `handle` writable.
#[no_mangle]
unsafe extern "C" fn kite_register(
    session: *mut bindings::kite_session,
    buf: *mut c_void,
    len: usize,
    name: *const c_char,
    others: u32,
    release: Option<unsafe extern "C" fn(context: *mut c_void)>,
    context: *mut c_void,
    handle: *mut u64,
) -> c_int {
    from_result(|| {
        // SAFETY: By the safety requirements.
        let release = release.map(|release| unsafe { Release::new(release, context) });
        if len == 0 || buf as usize % PAGE_SIZE != 0 || release.is_none() {
            return Err(EINVAL);
        }
        let order = Order {
            len: len as u64,
            nodes: &[],
            // SAFETY: By the safety requirements.
            name: unsafe { optional_name(name)? },
            owner: ROOT,
            others: Rights::from_bits(others).ok_or(EINVAL)?,
        };
        // SAFETY: By the safety requirements: the memory stays until it is released.
        let pinned = unsafe { Pinned::kernel(buf.cast(), len, release)? };
        // SAFETY: By the safety requirements.
        unsafe { ptr::write(handle, borrow(session).register(pinned, &order)?) };
        Ok(0)
    })
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open, `name` a string, `handle` writable, and `len` null or writable.
#[no_mangle]
unsafe extern "C" fn kite_map(
    session: *mut bindings::kite_session,
    name: *const c_char,
    rights: u32,
    handle: *mut u64,
    len: *mut u64,
) -> c_int {
    from_result(|| {
        let rights = Rights::from_bits(rights)
            .filter(|rights| !rights.is_empty())
            .ok_or(EINVAL)?;
        // SAFETY: By the safety requirements.
        let name = unsafe { optional_name(name)? }.ok_or(EINVAL)?;
        // SAFETY: By the safety requirements.
        let (number, bytes) = unsafe { borrow(session) }.map(name, ROOT, rights)?;
        // SAFETY: By the safety requirements.
        unsafe {
            ptr::write(handle, number);
            if !len.is_null() {
                ptr::write(len, bytes);
            }
        }
        Ok(0)
    })
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open.
#[no_mangle]
unsafe extern "C" fn kite_unmap(session: *mut bindings::kite_session, handle: u64) -> c_int {
    // SAFETY: By the safety requirements.
    from_result(|| unsafe { borrow(session) }.unmap(handle).map(|()| 0))
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open.
#[no_mangle]
unsafe extern "C" fn kite_free(session: *mut bindings::kite_session, handle: u64) -> c_int {
    // SAFETY: By the safety requirements.
    from_result(|| unsafe { borrow(session) }.free(handle).map(|()| 0))
}

fn deadline() -> Deadline {
    deadline_in(0)
}

/// So many milliseconds from now, or as the module's parameter says if it is 0.
fn deadline_in(timeout_ms: u32) -> Deadline {
    Deadline::after_ms(match timeout_ms {
        0 => *crate::module_parameters::timeout_ms.value(),
        ms => ms,
    })
}

/// # Safety
///
/// `session` must be open, and `buf` valid for `len` bytes, to be written if `direction` is to read.
unsafe fn access(
    session: *mut bindings::kite_session,
    handle: u64,
    direction: Direction,
    offset: u64,
    buf: *mut c_void,
    len: usize,
) -> c_int {
    from_result(|| {
        let access = Access {
            direction,
            offset,
            len: len as u64,
            deadline: deadline(),
        };
        // SAFETY: By the safety requirements.
        let (session, memory) = unsafe { (borrow(session), Memory::kernel(buf.cast(), len)) };
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
    // SAFETY: By the safety requirements.
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
    // SAFETY: By the safety requirements; a write does not change the buffer.
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
/// `session` must be open, `vectors` null or `count` vectors, whose buffers must be valid for their lengths, to
/// be written if `direction` is to read.
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
        let mut segments = Segments::with_capacity(count as usize)?;
        for i in 0..count as usize {
            // SAFETY: By the safety requirements.
            let vector = unsafe { ptr::read(vectors.wrapping_add(i)) };
            let span = Span {
                offset: vector.offset,
                len: vector.len as u64,
            };
            // SAFETY: By the safety requirements.
            let memory = unsafe { Memory::kernel(vector.buf.cast(), vector.len) };
            segments.push(span, memory)?;
        }
        // SAFETY: By the safety requirements.
        let session = unsafe { borrow(session) };
        session
            .access_segments(handle, direction, &segments, deadline())
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
    // SAFETY: By the safety requirements.
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
    // SAFETY: By the safety requirements.
    unsafe { access_vectors(session, handle, Direction::Write, vectors, count) }
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open.
#[no_mangle]
unsafe extern "C" fn kite_set(
    session: *mut bindings::kite_session,
    handle: u64,
    offset: u64,
    byte: u8,
    len: u64,
) -> c_int {
    from_result(|| {
        let fill = Fill {
            offset,
            len,
            byte,
            deadline: deadline(),
        };
        // SAFETY: By the safety requirements.
        unsafe { borrow(session) }.set(handle, &fill).map(|()| 0)
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
        // SAFETY: By the safety requirements.
        let session = unsafe { borrow(session) };
        let copied = session.copy((from, from_offset), (to, to_offset), len, deadline());
        copied.map(|()| 0)
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
        let update = Update {
            offset,
            atomic: abi::atomic(operation, operand, expected)?,
            deadline: deadline(),
        };
        // SAFETY: By the safety requirements.
        let word = unsafe { borrow(session) }.update(handle, &update)?;
        if !value.is_null() {
            // SAFETY: By the safety requirements.
            unsafe { ptr::write(value, word) };
        }
        Ok(0)
    })
}

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
        // SAFETY: By the safety requirements.
        let session = unsafe { borrow(session) };
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
        let deadline = deadline_in(timeout_ms);
        // SAFETY: By the safety requirements.
        let (session, memory) = unsafe { (borrow(session), Memory::kernel(buf.cast(), len)) };
        let incoming = session.receive(handle, &memory, len as u64, Some(deadline))?;
        let given = bindings::kite_receive {
            handle,
            len: incoming.len,
            call: incoming.call,
            function: incoming.function,
            node: incoming.node,
            uid: incoming.uid,
            ..Default::default()
        };
        // SAFETY: By the safety requirements.
        unsafe { ptr::write(got, given) };
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
        // SAFETY: By the safety requirements; a reply does not change the buffer.
        let memory = unsafe { Memory::kernel(data.cast_mut().cast(), len) };
        // SAFETY: By the safety requirements.
        let session = unsafe { borrow(session) };
        session
            .reply(call, &memory, len as u64, deadline())
            .map(|()| 0)
    })
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open.
#[no_mangle]
unsafe extern "C" fn kite_abandon(session: *mut bindings::kite_session, call: u64) -> c_int {
    from_result(|| {
        // SAFETY: By the safety requirements.
        let session = unsafe { borrow(session) };
        session.abandon_call(call).map(|()| 0)
    })
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open, `data` readable for `len` bytes, `reply_len` writable, and `reply` writable for as
/// many bytes as it says.
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
        // SAFETY: By the safety requirements.
        let room = unsafe { ptr::read(reply_len) };
        let outgoing = Outgoing {
            function,
            uid: ROOT,
            // SAFETY: By the safety requirements; a call does not change its data.
            data: unsafe { Memory::kernel(data.cast_mut().cast(), len) },
            len: len as u64,
            // SAFETY: By the safety requirements.
            reply: unsafe { Memory::kernel(reply.cast(), room) },
            room: room as u64,
            wants_reply: true,
            deadline: deadline(),
        };
        // SAFETY: By the safety requirements.
        let replied = unsafe { borrow(session) }.call(handle, &outgoing)?;
        // SAFETY: By the safety requirements.
        unsafe { ptr::write(reply_len, replied as usize) };
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
        let outgoing = Outgoing {
            function,
            uid: ROOT,
            // SAFETY: By the safety requirements; a message does not change its data.
            data: unsafe { Memory::kernel(data.cast_mut().cast(), len) },
            len: len as u64,
            // SAFETY: Nothing is valid for no bytes.
            reply: unsafe { Memory::kernel(ptr::null_mut(), 0) },
            room: 0,
            wants_reply: false,
            deadline: deadline(),
        };
        // SAFETY: By the safety requirements.
        unsafe { borrow(session) }
            .call(handle, &outgoing)
            .map(|_| 0)
    })
}

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
        let wanted = super::lock::wanted(number, flags, deadline_in(timeout_ms))?;
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
        let how = super::lock::end(flags)?;
        // SAFETY: By the safety requirements.
        let session = unsafe { borrow(session) };
        session.unlock(lock, how, deadline()).map(|()| 0)
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
        let deadline = deadline_in(timeout_ms);
        // SAFETY: By the safety requirements.
        let passed = unsafe { borrow(session) }.barrier(handle, number, count, deadline)?;
        if !generation.is_null() {
            // SAFETY: By the safety requirements.
            unsafe { ptr::write(generation, passed) };
        }
        Ok(0)
    })
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open.
#[no_mangle]
unsafe extern "C" fn kite_grant(
    session: *mut bindings::kite_session,
    handle: u64,
    uid: u32,
    rights: u32,
    flags: u32,
) -> c_int {
    from_result(|| {
        let grant = Grant {
            whom: abi::whom(uid, flags)?,
            rights: Rights::from_bits(rights).ok_or(EINVAL)?,
            deadline: deadline(),
        };
        // SAFETY: By the safety requirements.
        unsafe { borrow(session) }.grant(handle, &grant).map(|()| 0)
    })
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open, and `nodes` null or `node_count` numbers.
#[no_mangle]
unsafe extern "C" fn kite_move(
    session: *mut bindings::kite_session,
    handle: u64,
    nodes: *const u32,
    node_count: u32,
    timeout_ms: u32,
) -> c_int {
    from_result(|| {
        // SAFETY: By the safety requirements.
        let nodes = unsafe { numbers(nodes, node_count)? };
        let deadline = deadline_in(timeout_ms);
        // SAFETY: As above.
        let moved = unsafe { borrow(session) }.move_region(handle, nodes, deadline);
        moved.map(|()| 0)
    })
}
