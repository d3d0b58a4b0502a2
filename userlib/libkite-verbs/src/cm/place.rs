// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The functions that give an identifier its place: an address and a port here, where it may listen, and those of the
//! other end.

use std::ffi::c_int;
use std::net::{IpAddr, SocketAddr};
use std::ptr;

use super::event::{complete_sync, CmEvent};
use super::id::{CmId, CmState};
use super::{address, CmManager};
use crate::errno::{zero_or_minus_one, Errno, Result};
use crate::header::*;
use crate::object;
use crate::query::PORT_NUM;

/// Has an identifier lead to the device.
pub(super) fn bind_to_device(raw: &mut rdma_cm_id, manager: &CmManager) {
    raw.verbs = manager.verbs.0;
    raw.port_num = PORT_NUM;
    if raw.pd.is_null() {
        raw.pd = manager.pd.0;
    }
}

pub(super) fn set_source(raw: &mut rdma_cm_id, source: SocketAddr) {
    // SAFETY: each field of the union is as long as any address.
    let to = unsafe { &mut raw.route.addr.__bindgen_anon_1.src_storage };
    address::write_sockaddr(to, source);
}

pub(super) fn set_destination(raw: &mut rdma_cm_id, destination: SocketAddr) {
    // SAFETY: likewise.
    let to = unsafe { &mut raw.route.addr.__bindgen_anon_2.dst_storage };
    address::write_sockaddr(to, destination);
}

/// Where an identifier is, and where its other end is.
///
/// # Safety
/// It is live.
pub(super) unsafe fn endpoint_addrs(raw: *mut rdma_cm_id) -> [Option<SocketAddr>; 2] {
    // SAFETY: the caller vouches for it, and there is room for any address.
    unsafe {
        let addr = &(*raw).route.addr;
        let source = ptr::from_ref(&addr.__bindgen_anon_1).cast();
        let destination = ptr::from_ref(&addr.__bindgen_anon_2).cast();
        [source, destination].map(|addr| address::read_sockaddr(addr).ok().flatten())
    }
}

/// An address, if it is this node's.
fn check_local(address: SocketAddr) -> Result<SocketAddr> {
    match address::is_local_addr(address.ip()) {
        true => Ok(address),
        false => Err(Errno(libc::EADDRNOTAVAIL)),
    }
}

/// Gives an identifier an address of this node, and its port.
fn bind_local(raw: &mut rdma_cm_id, id: &CmId, mut to: SocketAddr) -> Result<()> {
    let port = id.with_locked(|state| match (state.cm_state, &state.port) {
        (CmState::Idle, None) => state.bind_port(&id.manager, to.port()),
        _ => Err(Errno(libc::EINVAL)),
    })?;
    to.set_port(port);
    set_source(raw, to);
    if !to.ip().is_unspecified() {
        bind_to_device(raw, &id.manager);
    }
    Ok(())
}

/// # Safety
/// The identifier is live, and the address is as long as its family says.
#[no_mangle]
pub(super) unsafe extern "C" fn rdma_bind_addr(raw: *mut rdma_cm_id, addr: *mut sockaddr) -> c_int {
    // SAFETY: the caller vouches for it.
    let bind = || unsafe {
        let to = address::read_sockaddr(addr)?.ok_or(Errno(libc::EINVAL))?;
        bind_local(&mut *raw, &object::inner(raw).id, check_local(to)?)
    };
    zero_or_minus_one(bind())
}

/// The address is looked up at once, so it does not matter how long that may take.
///
/// # Safety
/// The identifier is live, and the addresses are as long as their families say; the first may be NULL.
#[no_mangle]
pub(super) unsafe extern "C" fn rdma_resolve_addr(
    raw: *mut rdma_cm_id,
    from: *mut sockaddr,
    to: *mut sockaddr,
    _timeout_ms: c_int,
) -> c_int {
    // SAFETY: the caller vouches for it.
    let resolve = || unsafe {
        let from = address::read_sockaddr(from)?;
        let to = address::read_sockaddr(to)?.ok_or(Errno(libc::EINVAL))?;
        resolve_addr(raw, from, to)?;
        complete_sync(raw)
    };
    zero_or_minus_one(resolve())
}

/// # Safety
/// The identifier is live.
unsafe fn resolve_addr(
    raw: *mut rdma_cm_id,
    from: Option<SocketAddr>,
    to: SocketAddr,
) -> Result<()> {
    // SAFETY: the caller vouches for it.
    let (id, [bound, _]) = unsafe { (&object::inner(raw).id, endpoint_addrs(raw)) };
    // SAFETY: likewise.
    let raw = unsafe { &mut *raw };
    let source_hint = [from, bound].into_iter().flatten().find(is_specified);
    let mut source = source_hint.map_or_else(|| Ok(address::source_addr(to)), check_local)?;
    source.set_port(bound.or(from).map_or(0, |addr| addr.port()));
    match bound {
        Some(_) => set_source(raw, source),
        None => bind_local(raw, id, source)?,
    }
    set_destination(raw, to);
    bind_to_device(raw, &id.manager);
    resolve_remote_node(id, to.ip())
}

/// Tells which node has an address, or that none has.
fn resolve_remote_node(id: &CmId, ip: IpAddr) -> Result<()> {
    let found = address::node_of_ip(&id.manager.cluster, ip);
    id.with_locked(|state| {
        if state.cm_state != CmState::Idle {
            return Err(Errno(libc::EINVAL));
        }
        let event = match found {
            Ok(node) => {
                (state.cm_state, state.remote_node) = (CmState::AddrResolved, node);
                CmEvent::new(RDMA_CM_EVENT_ADDR_RESOLVED, 0)
            }
            Err(errno) => CmEvent::new(RDMA_CM_EVENT_ADDR_ERROR, -errno.0),
        };
        state.push_event(id, event);
        Ok(())
    })
}

/// Whether an address is not any.
fn is_specified(address: &SocketAddr) -> bool {
    !address.ip().is_unspecified()
}

/// # Safety
/// The identifier is live.
#[no_mangle]
pub(super) unsafe extern "C" fn rdma_resolve_route(
    raw: *mut rdma_cm_id,
    _timeout_ms: c_int,
) -> c_int {
    // SAFETY: the caller vouches for it.
    let id = unsafe { &object::inner(raw).id };
    let resolved = id.with_locked(|state| {
        if state.cm_state != CmState::AddrResolved {
            return Err(Errno(libc::EINVAL));
        }
        state.cm_state = CmState::RouteResolved;
        state.push_event(id, CmEvent::new(RDMA_CM_EVENT_ROUTE_RESOLVED, 0));
        Ok(())
    });
    // SAFETY: likewise.
    zero_or_minus_one(resolved.and_then(|()| unsafe { complete_sync(raw) }))
}

/// Whoever has asked and is not accepted yet counts among the connections of a process, and nothing else limits them.
///
/// # Safety
/// The identifier is live.
#[no_mangle]
unsafe extern "C" fn rdma_listen(raw: *mut rdma_cm_id, _backlog: c_int) -> c_int {
    // SAFETY: the caller vouches for it.
    let id = unsafe { &object::inner(raw).id };
    let any = SocketAddr::from(([0, 0, 0, 0], 0));
    let is_bound = id.with_locked(|state| state.port.is_some());
    let bound = match is_bound {
        true => Ok(()),
        // SAFETY: likewise.
        false => bind_local(unsafe { &mut *raw }, id, any),
    };
    zero_or_minus_one(bound.and_then(|()| {
        id.with_locked(|state| match state.cm_state {
            CmState::Idle | CmState::Listening => {
                state.cm_state = CmState::Listening;
                Ok(())
            }
            _ => Err(Errno(libc::EINVAL)),
        })
    }))
}
