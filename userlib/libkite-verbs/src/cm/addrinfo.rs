// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Resolution of host and service names by libc, for endpoints.

use std::ffi::{c_char, c_int};
use std::{mem, ptr};

use super::address;
use crate::header::*;
use crate::object::{self, CStruct};

/// Addresses to which a structure points.
pub(crate) struct AddrInfoInner {
    _addrs: [Option<Box<sockaddr_storage>>; 2],
}

impl CStruct for rdma_addrinfo {
    type Inner = AddrInfoInner;
}

/// Returns a copy of an address, and its length.
///
/// # Safety
/// The address is NULL, or as long as its family requires.
unsafe fn copy_sockaddr(raw: *const sockaddr) -> Option<(Box<sockaddr_storage>, socklen_t)> {
    // SAFETY: guaranteed by the caller.
    let found = unsafe { address::read_sockaddr(raw) }.ok().flatten()?;
    // SAFETY: all bits may be zero, which is an address of no family.
    let mut storage = Box::new(unsafe { mem::zeroed() });
    address::write_sockaddr(&mut storage, found);
    let len = match found.is_ipv4() {
        true => size_of::<sockaddr_in>(),
        false => size_of::<sockaddr_in6>(),
    };
    Some((storage, len as socklen_t))
}

/// Returns the hints for libc.
fn libc_hints(hints: &rdma_addrinfo) -> libc::addrinfo {
    let flag = |flag: u32, is: c_int| match hints.ai_flags as u32 & flag {
        0 => 0,
        _ => is,
    };
    // SAFETY: numbers and pointers may be zero.
    let mut request: libc::addrinfo = unsafe { mem::zeroed() };
    request.ai_flags =
        flag(RAI_PASSIVE, libc::AI_PASSIVE) | flag(RAI_NUMERICHOST, libc::AI_NUMERICHOST);
    request.ai_family = hints.ai_family;
    request.ai_socktype = libc::SOCK_STREAM;
    request
}

/// Returns the structure for an address. The other members are those of the hints.
///
/// # Safety
/// Both addresses are NULL, or as long as their families require.
unsafe fn build_addrinfo(hints: &rdma_addrinfo, found: *const sockaddr) -> *mut rdma_addrinfo {
    let is_passive = hints.ai_flags as u32 & RAI_PASSIVE != 0;
    // SAFETY: guaranteed by the caller.
    let (found, other) = unsafe { (copy_sockaddr(found), copy_sockaddr(hints.ai_src_addr)) };
    let (mut source, mut destination) = match is_passive {
        true => (found, None),
        false => (other, found),
    };
    let at = |addr: &mut Option<(Box<sockaddr_storage>, socklen_t)>| match addr {
        Some((kept, len)) => (ptr::from_mut(kept.as_mut()).cast(), *len),
        None => (ptr::null_mut(), 0),
    };
    let (ai_src_addr, ai_src_len) = at(&mut source);
    let (ai_dst_addr, ai_dst_len) = at(&mut destination);
    let or_default = |hint: c_int, default: u32| if hint == 0 { default as c_int } else { hint };
    let info = rdma_addrinfo {
        ai_flags: hints.ai_flags,
        ai_family: source
            .iter()
            .chain(&destination)
            .last()
            .map_or(0, |(kept, _)| kept.ss_family.into()),
        ai_qp_type: or_default(hints.ai_qp_type, IBV_QPT_RC),
        ai_port_space: or_default(hints.ai_port_space, RDMA_PS_TCP),
        ai_src_len,
        ai_dst_len,
        ai_src_addr,
        ai_dst_addr,
        ..Default::default()
    };
    let inner = AddrInfoInner {
        _addrs: [source, destination].map(|addr| addr.map(|(kept, _)| kept)),
    };
    object::into_raw(info, inner)
}

/// # Safety
/// The names are strings or NULL, the hints are readable or NULL, and the result may be written.
#[no_mangle]
unsafe extern "C" fn rdma_getaddrinfo(
    node: *const c_char,
    service: *const c_char,
    hints: *const rdma_addrinfo,
    to: *mut *mut rdma_addrinfo,
) -> c_int {
    let none = rdma_addrinfo::default();
    // SAFETY: guaranteed by the caller.
    let hints = unsafe { hints.as_ref() }.unwrap_or(&none);
    let mut found = ptr::null_mut();
    // SAFETY: likewise.
    let failed = unsafe { libc::getaddrinfo(node, service, &libc_hints(hints), &mut found) };
    if failed != 0 {
        return failed;
    }
    // SAFETY: likewise; on success libc returns at least one address.
    unsafe {
        to.write(build_addrinfo(hints, (*found).ai_addr.cast()));
        libc::freeaddrinfo(found);
    }
    0
}

/// # Safety
/// The argument comes from [`rdma_getaddrinfo`], or is NULL.
#[no_mangle]
unsafe extern "C" fn rdma_freeaddrinfo(info: *mut rdma_addrinfo) {
    if !info.is_null() {
        // SAFETY: guaranteed by the caller.
        drop(unsafe { object::from_raw(info) });
    }
}
