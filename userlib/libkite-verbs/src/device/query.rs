// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Attributes of the device and its port, GIDs and P_Keys.

use std::ffi::c_int;
use std::mem::offset_of;
use std::ptr;

use super::context::session;
use crate::errno::{set_errno, Errno};
use crate::header::*;
use crate::limits::{MAX_CQE, MAX_QPS, MAX_RD_ATOMIC, MAX_SGE, PORT_NUM};
use crate::session::Session;

/// P_Key of the only entry of the table.
const DEFAULT_PKEY: u16 = 0xffff;

/// Reported for objects without a limit.
const UNLIMITED: c_int = 1 << 16;

/// Returns the GUID of this node: the lower half of its GID, in network byte order.
pub(crate) fn node_guid_be(session: &Session) -> u64 {
    let gid = session.address.gid.to_bits();
    (gid as u64).to_be()
}

fn device_attr(session: &Session) -> ibv_device_attr {
    ibv_device_attr {
        node_guid: node_guid_be(session),
        sys_image_guid: node_guid_be(session),
        max_mr_size: kite::MR_SIZE_MAX as u64,
        page_size_cap: 4096,
        max_qp: MAX_QPS as c_int,
        max_qp_wr: kite::VQP_DEPTH as c_int,
        max_sge: MAX_SGE as c_int,
        max_sge_rd: MAX_SGE as c_int,
        max_cq: UNLIMITED,
        max_cqe: MAX_CQE as c_int,
        max_mr: kite::MRS_MAX as c_int,
        max_pd: UNLIMITED,
        max_qp_rd_atom: MAX_RD_ATOMIC,
        max_qp_init_rd_atom: MAX_RD_ATOMIC,
        max_res_rd_atom: MAX_RD_ATOMIC * MAX_QPS as c_int,
        atomic_cap: IBV_ATOMIC_HCA,
        max_pkeys: 1,
        phys_port_cnt: PORT_NUM,
        ..Default::default()
    }
}

/// # Safety
/// The context is open, and there is room for the attributes.
#[no_mangle]
unsafe extern "C" fn ibv_query_device(
    context: *mut ibv_context,
    attr: *mut ibv_device_attr,
) -> c_int {
    // SAFETY: guaranteed by the caller.
    unsafe { attr.write(device_attr(session(context))) };
    0
}

/// Sets only the number of ports of the attributes that are newer than [`ibv_query_device`].
///
/// # Safety
/// The context is open, and there is room for `size` bytes of attributes.
pub(crate) unsafe extern "C" fn query_device_ex(
    context: *mut ibv_context,
    _input: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
    size: usize,
) -> c_int {
    if size < size_of::<ibv_device_attr>() {
        return libc::EINVAL;
    }
    let value = ibv_device_attr_ex {
        // SAFETY: the caller guarantees the context.
        orig_attr: device_attr(unsafe { session(context) }),
        phys_port_cnt_ex: PORT_NUM.into(),
        ..Default::default()
    };
    // SAFETY: the caller guarantees the room.
    unsafe { copy_truncated(&value, attr, size) };
    0
}

/// Copies the part of a value that fits, since the header of the program may be older. Clears the rest of the room,
/// since the header may be newer.
///
/// # Safety
/// There is room for `size` bytes.
unsafe fn copy_truncated<T>(value: &T, to: *mut T, size: usize) {
    let len = size.min(size_of::<T>());
    // SAFETY: the caller guarantees the room.
    unsafe {
        ptr::write_bytes(to.cast::<u8>(), 0, size);
        ptr::copy_nonoverlapping(ptr::from_ref(value).cast::<u8>(), to.cast(), len);
    }
}

/// Returns the `ibv_mtu` for a number of bytes.
pub(crate) fn mtu_to_ibv(bytes: u32) -> ibv_mtu {
    match bytes {
        4096.. => IBV_MTU_4096,
        2048.. => IBV_MTU_2048,
        1024.. => IBV_MTU_1024,
        512.. => IBV_MTU_512,
        _ => IBV_MTU_256,
    }
}

fn port_attr(session: &Session) -> ibv_port_attr {
    let address = &session.address;
    ibv_port_attr {
        state: IBV_PORT_ACTIVE,
        max_mtu: mtu_to_ibv(address.mtu),
        active_mtu: mtu_to_ibv(address.mtu),
        gid_tbl_len: 1,
        max_msg_sz: kite::MR_SIZE_MAX as u32,
        pkey_tbl_len: 1,
        lid: address.lid,
        // The rate of the link is unknown, so the lowest one is reported.
        active_width: 1,
        active_speed: 1,
        phys_state: 5, // the link is up
        link_layer: address.link_layer,
        ..Default::default()
    }
}

/// Called through the context. Older programs call [`ibv_query_port`].
///
/// # Safety
/// The context is open, and there is room for `size` bytes of attributes.
pub(crate) unsafe extern "C" fn query_port(
    context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
    size: usize,
) -> c_int {
    if port != PORT_NUM {
        return libc::EINVAL;
    }
    // SAFETY: the caller guarantees the context.
    let value = port_attr(unsafe { session(context) });
    // SAFETY: the caller guarantees the room.
    unsafe { copy_truncated(&value, attr, size) };
    0
}

/// # Safety
/// The context is open, and there is room for the attributes of the first version.
#[no_mangle]
unsafe extern "C" fn ibv_query_port(
    context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
) -> c_int {
    let size = offset_of!(ibv_port_attr, port_cap_flags2);
    // SAFETY: guaranteed by the caller.
    unsafe { query_port(context, port, attr, size) }
}

fn gid(session: &Session) -> ibv_gid {
    ibv_gid {
        raw: session.address.gid.octets(),
    }
}

/// # Safety
/// The context is open, and there is room for the GID.
#[no_mangle]
unsafe extern "C" fn ibv_query_gid(
    context: *mut ibv_context,
    port: u8,
    index: c_int,
    to: *mut ibv_gid,
) -> c_int {
    if (port, index) != (PORT_NUM, 0) {
        set_errno(Errno(libc::EINVAL));
        return -1;
    }
    // SAFETY: guaranteed by the caller.
    unsafe { to.write(gid(session(context))) };
    0
}

fn gid_type(session: &Session) -> ibv_gid_type {
    match u32::from(session.address.link_layer) {
        IBV_LINK_LAYER_ETHERNET => IBV_GID_TYPE_ROCE_V2,
        _ => IBV_GID_TYPE_IB,
    }
}

/// Called by `ibv_devinfo`, and not in the header. Writes 0 for InfiniBand and RoCE version 1, 1 for RoCE version 2.
///
/// # Safety
/// The context is open, and there is room for a number.
#[no_mangle]
unsafe extern "C" fn ibv_query_gid_type(
    context: *mut ibv_context,
    _port: u8,
    _index: u32,
    to: *mut u32,
) -> c_int {
    // SAFETY: guaranteed by the caller.
    unsafe { to.write((gid_type(session(context)) == IBV_GID_TYPE_ROCE_V2).into()) };
    0
}

/// # Safety
/// The context is open, and there is room for `size` bytes of the entry.
#[no_mangle]
unsafe extern "C" fn _ibv_query_gid_ex(
    context: *mut ibv_context,
    port: u32,
    index: u32,
    entry: *mut ibv_gid_entry,
    flags: u32,
    size: usize,
) -> c_int {
    let request = (port, index, flags, size);
    if request != (PORT_NUM.into(), 0, 0, size_of::<ibv_gid_entry>()) {
        return libc::EINVAL;
    }
    // SAFETY: guaranteed by the caller.
    let session = unsafe { session(context) };
    let found = ibv_gid_entry {
        gid: gid(session),
        port_num: port,
        gid_type: gid_type(session),
        ..Default::default()
    };
    // SAFETY: likewise.
    unsafe { entry.write(found) };
    0
}

/// # Safety
/// The context is open, and there is room for `max_entries` entries of `size` bytes.
#[no_mangle]
unsafe extern "C" fn _ibv_query_gid_table(
    context: *mut ibv_context,
    entries: *mut ibv_gid_entry,
    max_entries: usize,
    flags: u32,
    size: usize,
) -> isize {
    if max_entries == 0 {
        return -(libc::EINVAL as isize);
    }
    // SAFETY: guaranteed by the caller; there is room for one entry.
    match unsafe { _ibv_query_gid_ex(context, PORT_NUM.into(), 0, entries, flags, size) } {
        0 => 1,
        errno => -(errno as isize),
    }
}

/// # Safety
/// There is room for the key.
#[no_mangle]
unsafe extern "C" fn ibv_query_pkey(
    _context: *mut ibv_context,
    port: u8,
    index: c_int,
    to: *mut u16,
) -> c_int {
    if (port, index) != (PORT_NUM, 0) {
        set_errno(Errno(libc::EINVAL));
        return -1;
    }
    // SAFETY: guaranteed by the caller.
    unsafe { to.write(DEFAULT_PKEY) };
    0
}

#[no_mangle]
extern "C" fn ibv_get_pkey_index(_context: *mut ibv_context, port: u8, key: u16) -> c_int {
    match (port, key) {
        (PORT_NUM, DEFAULT_PKEY) => 0,
        _ => -1,
    }
}
