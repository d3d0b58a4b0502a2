// SPDX-License-Identifier: GPL-2.0 OR MIT
//! C functions that resolve addresses and routes.

use std::ffi::c_int;
use std::net::{IpAddr, SocketAddr};

use super::address::{self, endpoint_addrs, set_destination, set_source};
use super::bind::{bind_local, check_local};
use super::cm_id::{CmId, CmState};
use super::event::CmEvent;
use super::ffi_id::bind_to_device;
use super::get_event::complete_sync;
use crate::errno::{zero_or_minus_one, Errno, Result};
use crate::header::*;
use crate::object;

/// Resolves an address. The result is known at once, so the timeout is ignored.
///
/// # Safety
/// The identifier is live, and the addresses are as long as their families require. The first one may be NULL.
#[no_mangle]
pub(super) unsafe extern "C" fn rdma_resolve_addr(
    raw: *mut rdma_cm_id,
    from: *mut sockaddr,
    to: *mut sockaddr,
    _timeout_ms: c_int,
) -> c_int {
    // SAFETY: guaranteed by the caller.
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
    // SAFETY: guaranteed by the caller.
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

/// Reports the node with an address, or that there is none.
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

/// Returns `true` if an address is not the unspecified one.
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
    // SAFETY: guaranteed by the caller.
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
