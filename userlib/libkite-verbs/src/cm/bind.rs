// SPDX-License-Identifier: GPL-2.0 OR MIT
//! C functions that bind identifiers to local addresses, and listen.

use std::ffi::c_int;
use std::net::SocketAddr;

use super::address::{self, set_source};
use super::cm_id::{CmId, CmState};
use super::ffi_id::bind_to_device;
use crate::errno::{zero_or_minus_one, Errno, Result};
use crate::header::*;
use crate::object;

/// Returns an address if it belongs to this node.
pub(super) fn check_local(address: SocketAddr) -> Result<SocketAddr> {
    match address::is_local_addr(address.ip()) {
        true => Ok(address),
        false => Err(Errno(libc::EADDRNOTAVAIL)),
    }
}

/// Binds an identifier to an address of this node and a port.
pub(super) fn bind_local(raw: &mut rdma_cm_id, id: &CmId, mut to: SocketAddr) -> Result<()> {
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
/// The identifier is live, and the address is as long as its family requires.
#[no_mangle]
pub(super) unsafe extern "C" fn rdma_bind_addr(raw: *mut rdma_cm_id, addr: *mut sockaddr) -> c_int {
    // SAFETY: guaranteed by the caller.
    let bind = || unsafe {
        let to = address::read_sockaddr(addr)?.ok_or(Errno(libc::EINVAL))?;
        bind_local(&mut *raw, &object::inner(raw).id, check_local(to)?)
    };
    zero_or_minus_one(bind())
}

/// Listens. The backlog is ignored: [`pending`](crate::pending) limits pending requests.
///
/// # Safety
/// The identifier is live.
#[no_mangle]
unsafe extern "C" fn rdma_listen(raw: *mut rdma_cm_id, _backlog: c_int) -> c_int {
    // SAFETY: guaranteed by the caller.
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
