// SPDX-License-Identifier: GPL-2.0

//! Functions of `include/kite.h`: sessions of other kernel modules.
//!
//! # Operation
//!
//! `c-shim/exports.c` exports the functions. Kernel users act as root. The functions for I/O queues are in
//! [`super::queue`]. The session pointer of a C caller is an `Arc<Session>`, which `kite_close` drops.
//!
//! # Recovery
//!
//! Functions return a negative errno, and `ENODEV` after the RNIC was removed. The `release` function of a
//! memory registration is called once, also if the registration fails.

mod access;
mod rpc;
mod sync;
mod vqp;

use super::{
    args::{
        check_node_count, check_region_len, check_region_memory, deadline, parse_grant,
        parse_map_rights, parse_rights,
    },
    qos,
    source::{Requester, ROOT_UID},
    Session,
};
use crate::{
    bindings, errno,
    region::{
        alloc::AllocRequest,
        map::open::{MapRequest, RegionSelector},
    },
    rnic::{self, Caller},
    sys::pin::{PinnedPages, ReleaseCallback},
};
use core::ptr;
use kernel::{error::from_result, prelude::*, sync::Arc};
use kite_core::name::Name;

/// Checks at compile time that each function has the type declared by the header.
macro_rules! check {
    ($($name:ident)*) => {
        $(const _: () = {
            if true { bindings::$name } else { $name };
        };)*
    };
}

pub(super) use check;

check! {
    kite_open kite_close kite_set_priority kite_alloc kite_register kite_map kite_unmap kite_free kite_grant kite_migrate
}

/// # Safety
///
/// `session` must be open.
unsafe fn borrow_session<'a>(session: *mut bindings::kite_session) -> &'a Session {
    // SAFETY: By the safety requirements the session is open. `kite_open` made the pointer from an
    // `Arc<Session>`.
    unsafe { &*session.cast::<Session>() }
}

/// Returns the result of a request of `session` to a C caller: a negative errno or the value.
fn status(session: &Session, request: impl FnOnce() -> Result<c_int>) -> c_int {
    from_result(|| request().map_err(|error| session.refine_unreachable(error)))
}

/// # Safety
///
/// `name` must be null or a C string.
unsafe fn optional_name(name: *const c_char) -> Result<Option<Name>> {
    if name.is_null() {
        return Ok(None);
    }
    // SAFETY: By the safety requirements, and because `name` is not null, `name` is a C string.
    match unsafe { CStr::from_char_ptr(name) }.to_bytes() {
        b"" => Ok(None),
        bytes => Name::new(bytes).map(Some).ok_or_else(errno::nametoolong),
    }
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `rnic` must be null or a C string.
#[no_mangle]
unsafe extern "C" fn kite_open(rnic: *const c_char) -> *mut bindings::kite_session {
    let open = || -> Result<Arc<Session>> {
        let name = if rnic.is_null() {
            c""
        } else {
            // SAFETY: By the safety requirements, and because `rnic` is not null, `rnic` is a C string.
            unsafe { CStr::from_char_ptr(rnic) }
        };
        let session = Session::new()?;
        session.bind(rnic::find(name.to_bytes(), Caller::Module)?, None)?;
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
/// `session` must be open, and must not be used after this call.
#[no_mangle]
unsafe extern "C" fn kite_close(session: *mut bindings::kite_session) {
    // SAFETY: By the safety requirements the session is open, and this call is its last use. The pointer
    // comes from `Arc::into_raw` in `kite_open`.
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
    // SAFETY: By the safety requirements the session is open.
    let session = unsafe { borrow_session(session) };
    status(session, || {
        session
            .set_low_priority(qos::parse_priority(priority)?)
            .map(|()| 0)
    })
}

/// Returns an array of node numbers, which may be empty.
///
/// # Safety
///
/// `nodes` must be null or point to `count` numbers. The numbers must not change while the result is in use.
unsafe fn node_list<'a>(nodes: *const u32, count: u32) -> Result<&'a [u32]> {
    match (nodes.is_null(), check_node_count(count)?) {
        (_, 0) => Ok(&[]),
        // SAFETY: By the safety requirements, and because `nodes` is not null, `nodes` points to `count`
        // constant numbers.
        (false, count) => Ok(unsafe { core::slice::from_raw_parts(nodes, count) }),
        (true, _) => Err(EINVAL),
    }
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open, `name` null or a C string, `nodes` null or `node_count` numbers, and `handle`
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
    // SAFETY: By the safety requirements the session is open.
    let session = unsafe { borrow_session(session) };
    status(session, || {
        let request = AllocRequest {
            len: check_region_len(len)?,
            // SAFETY: By the safety requirements `nodes` is null or points to `node_count` numbers.
            nodes: unsafe { node_list(nodes, node_count)? },
            // SAFETY: By the safety requirements `name` is null or a C string.
            name: unsafe { optional_name(name)? },
            owner: ROOT_UID,
            other_rights: parse_rights(others)?,
        };
        // SAFETY: By the safety requirements `handle` is writable.
        unsafe { ptr::write(handle, session.alloc(&request)?) };
        Ok(0)
    })
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open, `name` null or a C string, and `handle` writable. `buf` must be valid for `len`
/// bytes until `release` is called. Any thread that may sleep may call `release`.
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
    // SAFETY: By the safety requirements the session is open.
    let session = unsafe { borrow_session(session) };
    status(session, || {
        // SAFETY: By the safety requirements any thread that may sleep may call `release` with `context`.
        let release = release.map(|release| unsafe { ReleaseCallback::new(release, context) });
        check_region_memory(buf as usize, len)?;
        if release.is_none() {
            return Err(EINVAL);
        }
        let request = AllocRequest {
            len: len as u64,
            nodes: &[],
            // SAFETY: By the safety requirements `name` is null or a C string.
            name: unsafe { optional_name(name)? },
            owner: ROOT_UID,
            other_rights: parse_rights(others)?,
        };
        // SAFETY: By the safety requirements the memory stays valid until `release` is called, when `pinned`
        // is dropped.
        let pinned = unsafe { PinnedPages::from_kernel(buf.cast(), len, release)? };
        // SAFETY: By the safety requirements `handle` is writable.
        unsafe { ptr::write(handle, session.register(pinned, &request)?) };
        Ok(0)
    })
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open, `name` a C string, `handle` writable, and `len` null or writable.
#[no_mangle]
unsafe extern "C" fn kite_map(
    session: *mut bindings::kite_session,
    name: *const c_char,
    rights: u32,
    handle: *mut u64,
    len: *mut u64,
) -> c_int {
    // SAFETY: By the safety requirements the session is open.
    let session = unsafe { borrow_session(session) };
    status(session, || {
        // SAFETY: By the safety requirements `name` is a C string.
        let name = unsafe { optional_name(name)? }.ok_or(EINVAL)?;
        let mapped = session.map(&MapRequest {
            selector: RegionSelector::Name(name),
            uid: ROOT_UID,
            rights: parse_map_rights(rights)?,
            required_owner: None,
        })?;
        // SAFETY: By the safety requirements `handle` is writable, and `len` is null or writable.
        unsafe {
            ptr::write(handle, mapped.id);
            if !len.is_null() {
                ptr::write(len, mapped.len);
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
    // SAFETY: By the safety requirements the session is open.
    let session = unsafe { borrow_session(session) };
    status(session, || session.unmap(handle).map(|()| 0))
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open.
#[no_mangle]
unsafe extern "C" fn kite_free(session: *mut bindings::kite_session, handle: u64) -> c_int {
    // SAFETY: By the safety requirements the session is open.
    let session = unsafe { borrow_session(session) };
    status(session, || session.free(handle).map(|()| 0))
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
    // SAFETY: By the safety requirements the session is open.
    let session = unsafe { borrow_session(session) };
    status(session, || {
        let grant = bindings::kite_grant {
            uid,
            rights,
            flags,
            ..Default::default()
        };
        let request = parse_grant(Requester::KernelModule, &grant)?;
        session.grant(handle, &request).map(|()| 0)
    })
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open, and `nodes` null or `node_count` numbers.
#[no_mangle]
unsafe extern "C" fn kite_migrate(
    session: *mut bindings::kite_session,
    handle: u64,
    nodes: *const u32,
    node_count: u32,
    timeout_ms: u32,
) -> c_int {
    // SAFETY: By the safety requirements the session is open.
    let session = unsafe { borrow_session(session) };
    status(session, || {
        // SAFETY: By the safety requirements `nodes` is null or points to `node_count` numbers.
        let nodes = unsafe { node_list(nodes, node_count)? };
        let deadline = deadline(timeout_ms);
        let result = session.move_region(handle, nodes, deadline);
        result.map(|()| 0)
    })
}
