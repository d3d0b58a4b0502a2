// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Names of nodes and services, as libc knows them, as addresses for endpoints.

use std::ffi::{c_char, c_int};
use std::{mem, ptr};

use super::address;
use crate::header::*;
use crate::object::{self, Raw};

/// To what a description points.
pub(crate) struct Ends {
    _both: [Option<Box<sockaddr_storage>>; 2],
}

impl Raw for rdma_addrinfo {
    type Own = Ends;
}

/// A copy of an address, and its length.
///
/// # Safety
/// It is NULL, or as long as its family says.
unsafe fn copy(raw: *const sockaddr) -> Option<(Box<sockaddr_storage>, socklen_t)> {
    // SAFETY: the caller vouches for it.
    let found = unsafe { address::read(raw) }.ok().flatten()?;
    // SAFETY: any bytes are an address of no family.
    let mut kept = Box::new(unsafe { mem::zeroed() });
    address::write(&mut kept, found);
    let len = match found.is_ipv4() {
        true => size_of::<sockaddr_in>(),
        false => size_of::<sockaddr_in6>(),
    };
    Some((kept, len as socklen_t))
}

/// What to ask libc.
fn question(hints: &rdma_addrinfo) -> libc::addrinfo {
    let flag = |flag: u32, is: c_int| match hints.ai_flags as u32 & flag {
        0 => 0,
        _ => is,
    };
    // SAFETY: numbers and pointers may be zero.
    let mut asked: libc::addrinfo = unsafe { mem::zeroed() };
    asked.ai_flags =
        flag(RAI_PASSIVE, libc::AI_PASSIVE) | flag(RAI_NUMERICHOST, libc::AI_NUMERICHOST);
    asked.ai_family = hints.ai_family;
    asked.ai_socktype = libc::SOCK_STREAM;
    asked
}

/// Describes what was found, the rest of it as the hints do.
///
/// # Safety
/// Both addresses are NULL, or as long as their families say.
unsafe fn describe(hints: &rdma_addrinfo, found: *const sockaddr) -> *mut rdma_addrinfo {
    let is_passive = hints.ai_flags as u32 & RAI_PASSIVE != 0;
    // SAFETY: the caller vouches for it.
    let (found, other) = unsafe { (copy(found), copy(hints.ai_src_addr)) };
    let (mut source, mut destination) = match is_passive {
        true => (found, None),
        false => (other, found),
    };
    let at = |end: &mut Option<(Box<sockaddr_storage>, socklen_t)>| match end {
        Some((kept, len)) => (ptr::from_mut(kept.as_mut()).cast(), *len),
        None => (ptr::null_mut(), 0),
    };
    let (ai_src_addr, ai_src_len) = at(&mut source);
    let (ai_dst_addr, ai_dst_len) = at(&mut destination);
    let or = |said: c_int, usual: u32| if said == 0 { usual as c_int } else { said };
    let info = rdma_addrinfo {
        ai_flags: hints.ai_flags,
        ai_family: source
            .iter()
            .chain(&destination)
            .last()
            .map_or(0, |(kept, _)| kept.ss_family.into()),
        ai_qp_type: or(hints.ai_qp_type, IBV_QPT_RC),
        ai_port_space: or(hints.ai_port_space, RDMA_PS_TCP),
        ai_src_len,
        ai_dst_len,
        ai_src_addr,
        ai_dst_addr,
        ..Default::default()
    };
    let ends = Ends {
        _both: [source, destination].map(|end| end.map(|(kept, _)| kept)),
    };
    object::give(info, ends)
}

/// # Safety
/// The names are strings or NULL, the hints are there or NULL, and there is room for the result.
#[no_mangle]
unsafe extern "C" fn rdma_getaddrinfo(
    node: *const c_char,
    service: *const c_char,
    hints: *const rdma_addrinfo,
    to: *mut *mut rdma_addrinfo,
) -> c_int {
    let none = rdma_addrinfo::default();
    // SAFETY: the caller vouches for it.
    let hints = unsafe { hints.as_ref() }.unwrap_or(&none);
    let mut found = ptr::null_mut();
    // SAFETY: likewise.
    let failed = unsafe { libc::getaddrinfo(node, service, &question(hints), &mut found) };
    if failed != 0 {
        return failed;
    }
    // SAFETY: likewise; libc has found at least one.
    unsafe {
        to.write(describe(hints, (*found).ai_addr.cast()));
        libc::freeaddrinfo(found);
    }
    0
}

/// # Safety
/// Its argument came from [`rdma_getaddrinfo`], or is NULL.
#[no_mangle]
unsafe extern "C" fn rdma_freeaddrinfo(info: *mut rdma_addrinfo) {
    if !info.is_null() {
        // SAFETY: the caller vouches for it.
        drop(unsafe { object::take(info) });
    }
}
