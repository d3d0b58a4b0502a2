// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Session, and regions: allocate, register, map, grant, migrate and free.

use std::ffi::{c_char, c_int, c_void};
use std::ptr::NonNull;

use kite_rs::{AllocOptions, Buffer, Error, Priority, Region, Rights};

use crate::arguments::{
    checked_len, node_ids_from_c, str_from_c, to_handle, to_status, with_timeout_ms,
};
use crate::process;

/// # Safety
/// `rnic` must be NULL or a C string.
#[no_mangle]
unsafe extern "C" fn LT_join(rnic: *const c_char) -> c_int {
    // SAFETY: `rnic` is valid by the safety requirements.
    let rnic = unsafe { str_from_c(rnic) };
    to_status(rnic.and_then(process::join))
}

#[no_mangle]
extern "C" fn LT_set_priority(priority: u32) -> c_int {
    let priority = match priority {
        0 => Ok(Priority::High),
        1 => Ok(Priority::Low),
        _ => Err(Error::Invalid),
    };
    let set = |priority| process::session()?.set_priority(priority);
    to_status(priority.and_then(set).map(|()| 0))
}

/// # Safety
/// `nodes` must be NULL or point to `node_count` numbers. `name` must be NULL or a C string.
#[no_mangle]
unsafe extern "C" fn LT_malloc(
    nodes: *const u32,
    node_count: u32,
    size: u64,
    name: *const c_char,
    others: u32,
) -> i64 {
    let options = || {
        // SAFETY: `name` is valid by the safety requirements.
        let name = unsafe { str_from_c(name) }?;
        // SAFETY: `nodes` is valid by the safety requirements.
        let nodes = unsafe { node_ids_from_c(nodes, node_count) }?;
        let others = Rights::from_bits(others).ok_or(Error::Invalid)?;
        Ok(AllocOptions::new(size)
            .nodes(nodes)
            .name(name)
            .other_rights(others))
    };
    to_handle(options().and_then(|options| process::session()?.alloc(&options)))
}

/// # Safety
/// `memory` must be readable and writable for `size` bytes while the region exists; other nodes change them at any
/// time. `name` must be NULL or a C string.
#[no_mangle]
unsafe extern "C" fn LT_register(
    memory: *mut c_void,
    size: u64,
    name: *const c_char,
    others: u32,
) -> i64 {
    let register = || {
        let start = NonNull::new(memory.cast()).ok_or(Error::Fault)?;
        // SAFETY: `memory` is valid for `size` bytes by the safety requirements, and C has no references to them.
        let memory = unsafe { Buffer::from_raw(start, checked_len(memory, size)?) };
        // SAFETY: `name` is valid by the safety requirements.
        let name = unsafe { str_from_c(name) }?;
        let others = Rights::from_bits(others).ok_or(Error::Invalid)?;
        process::session()?.register_region(&memory, name, others)
    };
    to_handle(register())
}

#[no_mangle]
extern "C" fn LT_free(lh: i64) -> c_int {
    to_status(process::close(lh, Region::free).map(|()| 0))
}

/// # Safety
/// `name` must be NULL or a C string.
#[no_mangle]
unsafe extern "C" fn LT_map(name: *const c_char, rights: u32) -> i64 {
    // SAFETY: `name` is valid by the safety requirements.
    let name = unsafe { str_from_c(name) };
    let map = |name| {
        let rights = Rights::from_bits(rights).ok_or(Error::Invalid)?;
        process::session()?.map(name, rights)
    };
    to_handle(name.and_then(map))
}

#[no_mangle]
extern "C" fn LT_unmap(lh: i64) -> c_int {
    let unmap = |region: Region| {
        drop(region);
        Ok(())
    };
    to_status(process::close(lh, unmap).map(|()| 0))
}

#[no_mangle]
extern "C" fn LT_grant(lh: i64, uid: u32, rights: u32) -> c_int {
    let rights = Rights::from_bits(rights).ok_or(Error::Invalid);
    let grant = |rights| process::region(lh)?.grant(uid, rights);
    to_status(rights.and_then(grant).map(|()| 0))
}

#[no_mangle]
extern "C" fn LT_grant_others(lh: i64, rights: u32) -> c_int {
    let rights = Rights::from_bits(rights).ok_or(Error::Invalid);
    let grant = |rights| process::region(lh)?.grant_others(rights);
    to_status(rights.and_then(grant).map(|()| 0))
}

/// # Safety
/// `name` must be NULL or a C string.
#[no_mangle]
unsafe extern "C" fn LT_rename(lh: i64, name: *const c_char) -> c_int {
    // SAFETY: `name` is valid by the safety requirements.
    let name = unsafe { str_from_c(name) };
    let rename = |name| process::region(lh)?.rename(name);
    to_status(name.and_then(rename).map(|()| 0))
}

/// # Safety
/// `nodes` must be NULL or point to `node_count` numbers.
#[no_mangle]
unsafe extern "C" fn LT_move(
    lh: i64,
    nodes: *const u32,
    node_count: u32,
    timeout_ms: u32,
) -> c_int {
    // SAFETY: `nodes` is valid by the safety requirements.
    let nodes = unsafe { node_ids_from_c(nodes, node_count) };
    let moved = nodes
        .and_then(|nodes| with_timeout_ms(process::region(lh)?, timeout_ms).migrate_to(&nodes));
    to_status(moved.map(|()| 0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr::{null, null_mut};

    #[test]
    fn region_calls_without_join_return_enotconn_or_ebadf() {
        let (unjoined, bad) = (-i64::from(libc::ENOTCONN), -libc::EBADF);
        // SAFETY: all pointers are C strings, or NULL where NULL is allowed.
        unsafe {
            assert_eq!(LT_malloc(null(), 0, 1, null(), 0), unjoined);
            assert_eq!(LT_map(c"name".as_ptr(), 1), unjoined);
            assert_eq!(
                LT_register(null_mut(), 1, null(), 0),
                -i64::from(libc::EFAULT)
            );
            assert_eq!(LT_move(1, null(), 0, 0), bad);
            assert_eq!(LT_rename(1, c"name".as_ptr()), bad);
        }
        assert_eq!(LT_set_priority(1), -libc::ENOTCONN);
        assert_eq!(LT_grant_others(1, 7), bad);
        assert_eq!((LT_free(1), LT_unmap(-1)), (bad, bad));
    }

    #[test]
    fn region_calls_with_invalid_arguments_return_einval() {
        let invalid = -i64::from(libc::EINVAL);
        // SAFETY: all pointers are C strings, or NULL where NULL is allowed or rejected.
        unsafe {
            assert_eq!(LT_malloc(null(), 1, 1, null(), 0), invalid);
            assert_eq!(LT_malloc(null(), 0, 1, null(), 8), invalid);
            assert_eq!(LT_map(c"\xff".as_ptr(), 1), invalid);
        }
        assert_eq!(LT_set_priority(2), -libc::EINVAL);
        assert_eq!(LT_grant(1, 7, 8), -libc::EINVAL);
    }
}
