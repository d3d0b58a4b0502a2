// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The functions that give an identifier its place: an address and a port here, where it may listen, and those of the
//! other end.

use std::ffi::c_int;
use std::net::{IpAddr, SocketAddr};
use std::ptr;

use super::event::{complete, Event};
use super::id::{Id, Phase};
use super::{address, Manager};
use crate::errno::{minus_one, Errno, Result};
use crate::header::*;
use crate::object;
use crate::query::PORT;

/// Has an identifier lead to the device.
pub(super) fn bind_to_device(raw: &mut rdma_cm_id, manager: &Manager) {
    raw.verbs = manager.verbs.0;
    raw.port_num = PORT;
    if raw.pd.is_null() {
        raw.pd = manager.domain.0;
    }
}

pub(super) fn set_source(raw: &mut rdma_cm_id, source: SocketAddr) {
    // SAFETY: each field of the union is as long as any address.
    let to = unsafe { &mut raw.route.addr.__bindgen_anon_1.src_storage };
    address::write(to, source);
}

pub(super) fn set_destination(raw: &mut rdma_cm_id, destination: SocketAddr) {
    // SAFETY: likewise.
    let to = unsafe { &mut raw.route.addr.__bindgen_anon_2.dst_storage };
    address::write(to, destination);
}

/// Where an identifier is, and where its other end is.
///
/// # Safety
/// It is live.
pub(super) unsafe fn ends(raw: *mut rdma_cm_id) -> [Option<SocketAddr>; 2] {
    // SAFETY: the caller vouches for it, and there is room for any address.
    unsafe {
        let addr = &(*raw).route.addr;
        let source = ptr::from_ref(&addr.__bindgen_anon_1).cast();
        let destination = ptr::from_ref(&addr.__bindgen_anon_2).cast();
        [source, destination].map(|end| address::read(end).ok().flatten())
    }
}

/// An address, if it is this node's.
fn own(address: SocketAddr) -> Result<SocketAddr> {
    match address::is_own(address.ip()) {
        true => Ok(address),
        false => Err(Errno(libc::EADDRNOTAVAIL)),
    }
}

/// Gives an identifier an address of this node, and its port.
fn bind(raw: &mut rdma_cm_id, id: &Id, mut to: SocketAddr) -> Result<()> {
    let port = id.with(|state| match (state.phase, &state.port) {
        (Phase::Idle, None) => state.take_port(&id.manager, to.port()),
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
        let to = address::read(addr)?.ok_or(Errno(libc::EINVAL))?;
        bind(&mut *raw, &object::own(raw).id, own(to)?)
    };
    minus_one(bind())
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
        let from = address::read(from)?;
        let to = address::read(to)?.ok_or(Errno(libc::EINVAL))?;
        resolve(raw, from, to)?;
        complete(raw)
    };
    minus_one(resolve())
}

/// # Safety
/// The identifier is live.
unsafe fn resolve(raw: *mut rdma_cm_id, from: Option<SocketAddr>, to: SocketAddr) -> Result<()> {
    // SAFETY: the caller vouches for it.
    let (id, [bound, _]) = unsafe { (&object::own(raw).id, ends(raw)) };
    // SAFETY: likewise.
    let raw = unsafe { &mut *raw };
    let said = [from, bound].into_iter().flatten().find(is_known);
    let mut source = said.map_or_else(|| Ok(address::source(to)), own)?;
    source.set_port(bound.or(from).map_or(0, |place| place.port()));
    match bound {
        Some(_) => set_source(raw, source),
        None => bind(raw, id, source)?,
    }
    set_destination(raw, to);
    bind_to_device(raw, &id.manager);
    find(id, to.ip())
}

/// Tells which node has an address, or that none has.
fn find(id: &Id, ip: IpAddr) -> Result<()> {
    let found = address::node(&id.manager.cluster, ip);
    id.with(|state| {
        if state.phase != Phase::Idle {
            return Err(Errno(libc::EINVAL));
        }
        let event = match found {
            Ok(node) => {
                (state.phase, state.node) = (Phase::Resolved, node);
                Event::new(RDMA_CM_EVENT_ADDR_RESOLVED, 0)
            }
            Err(errno) => Event::new(RDMA_CM_EVENT_ADDR_ERROR, -errno.0),
        };
        state.tell(id, event);
        Ok(())
    })
}

/// Whether an address is not any.
fn is_known(address: &SocketAddr) -> bool {
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
    let id = unsafe { &object::own(raw).id };
    let resolved = id.with(|state| {
        if state.phase != Phase::Resolved {
            return Err(Errno(libc::EINVAL));
        }
        state.phase = Phase::Routed;
        state.tell(id, Event::new(RDMA_CM_EVENT_ROUTE_RESOLVED, 0));
        Ok(())
    });
    // SAFETY: likewise.
    minus_one(resolved.and_then(|()| unsafe { complete(raw) }))
}

/// Whoever has asked and is not accepted yet counts among the connections of a process, and nothing else limits them.
///
/// # Safety
/// The identifier is live.
#[no_mangle]
unsafe extern "C" fn rdma_listen(raw: *mut rdma_cm_id, _backlog: c_int) -> c_int {
    // SAFETY: the caller vouches for it.
    let id = unsafe { &object::own(raw).id };
    let any = SocketAddr::from(([0, 0, 0, 0], 0));
    let is_bound = id.with(|state| state.port.is_some());
    let bound = match is_bound {
        true => Ok(()),
        // SAFETY: likewise.
        false => bind(unsafe { &mut *raw }, id, any),
    };
    minus_one(bound.and_then(|()| {
        id.with(|state| match state.phase {
            Phase::Idle | Phase::Listening => {
                state.phase = Phase::Listening;
                Ok(())
            }
            _ => Err(Errno(libc::EINVAL)),
        })
    }))
}
