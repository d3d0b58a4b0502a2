// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `rdma_create_ep`, `rdma_destroy_ep` and `rdma_get_request`: identifiers whose calls wait for their events.

use std::ffi::c_int;
use std::ptr;

use super::bind::rdma_bind_addr;
use super::event::{ack_stored_event, rdma_ack_cm_event};
use super::ffi_id::{create_id, rdma_destroy_id};
use super::get_event::next_event;
use super::qp::{rdma_create_qp, rdma_destroy_qp};
use super::resolve::{rdma_resolve_addr, rdma_resolve_route};
use crate::errno::{last_errno, zero_or_minus_one, Errno, Result};
use crate::header::*;
use crate::object;
use crate::unsupported::UNSUPPORTED;

/// Timeout for the resolution of an address, in ms.
const RESOLVE_TIMEOUT_MS: c_int = 2000;

/// Converts the result of a function of librdmacm.
fn check(result: c_int) -> Result<()> {
    match result {
        0 => Ok(()),
        _ => Err(last_errno()),
    }
}

/// # Safety
/// The addresses come from [`rdma_getaddrinfo`](super::addrinfo), the domain is live or NULL, the attributes are
/// readable or NULL, and the result may be written.
#[no_mangle]
unsafe extern "C" fn rdma_create_ep(
    to: *mut *mut rdma_cm_id,
    info: *mut rdma_addrinfo,
    pd: *mut ibv_pd,
    attr: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: guaranteed by the caller.
    zero_or_minus_one(unsafe { create_endpoint(&*info, pd, attr).map(|id| to.write(id)) })
}

/// # Safety
/// See [`rdma_create_ep`].
unsafe fn create_endpoint(
    info: &rdma_addrinfo,
    pd: *mut ibv_pd,
    attr: *mut ibv_qp_init_attr,
) -> Result<*mut rdma_cm_id> {
    if info.ai_port_space as u32 != RDMA_PS_TCP || info.ai_qp_type as u32 != IBV_QPT_RC {
        return Err(UNSUPPORTED);
    }
    // SAFETY: guaranteed by the caller.
    unsafe {
        if let Some(attr) = attr.as_mut() {
            attr.qp_type = IBV_QPT_RC;
        }
        let id = create_id(ptr::null_mut(), ptr::null_mut())?;
        let made = match info.ai_flags as u32 & RAI_PASSIVE {
            0 => setup_active(id, info, pd, attr),
            _ => setup_passive(id, info, pd, attr),
        };
        made.map(|()| id).inspect_err(|_| {
            rdma_destroy_ep(id);
        })
    }
}

/// # Safety
/// See [`rdma_create_ep`]. The identifier is live.
unsafe fn setup_active(
    id: *mut rdma_cm_id,
    info: &rdma_addrinfo,
    pd: *mut ibv_pd,
    attr: *mut ibv_qp_init_attr,
) -> Result<()> {
    // SAFETY: guaranteed by the caller.
    unsafe {
        check(rdma_resolve_addr(
            id,
            info.ai_src_addr,
            info.ai_dst_addr,
            RESOLVE_TIMEOUT_MS,
        ))?;
        check(rdma_resolve_route(id, RESOLVE_TIMEOUT_MS))?;
        match attr.is_null() {
            true => Ok(()),
            false => check(rdma_create_qp(id, pd, attr)),
        }
    }
}

/// # Safety
/// See [`setup_active`].
unsafe fn setup_passive(
    id: *mut rdma_cm_id,
    info: &rdma_addrinfo,
    pd: *mut ibv_pd,
    attr: *mut ibv_qp_init_attr,
) -> Result<()> {
    // SAFETY: guaranteed by the caller.
    unsafe {
        check(rdma_bind_addr(id, info.ai_src_addr))?;
        if let Some(attr) = attr.as_ref() {
            (*id).pd = pd;
            // The identifier is new, so the cell is empty.
            let _ = object::inner(id).accept_qp_attr.set(*attr);
        }
    }
    Ok(())
}

/// # Safety
/// The argument comes from [`rdma_create_ep`] or [`rdma_get_request`].
#[no_mangle]
unsafe extern "C" fn rdma_destroy_ep(id: *mut rdma_cm_id) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        rdma_destroy_qp(id);
        rdma_destroy_id(id);
    }
}

/// # Safety
/// The listening identifier is live, and the result may be written.
#[no_mangle]
unsafe extern "C" fn rdma_get_request(listen: *mut rdma_cm_id, to: *mut *mut rdma_cm_id) -> c_int {
    // SAFETY: guaranteed by the caller.
    zero_or_minus_one(unsafe { get_request(listen).map(|id| to.write(id)) })
}

/// Takes a connection request, as an identifier with a separate channel.
///
/// # Errors
/// - `EINVAL`: the identifier is not synchronous, or its next event is not a connection request.
/// - See also [`next_event`] and [`rdma_create_qp`].
///
/// # Safety
/// See [`rdma_get_request`].
unsafe fn get_request(listen: *mut rdma_cm_id) -> Result<*mut rdma_cm_id> {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let inner = object::inner(listen);
        if !inner.id.with_locked(|state| state.is_sync) {
            return Err(Errno(libc::EINVAL));
        }
        ack_stored_event(listen);
        let event = next_event((*listen).channel)?;
        if (*event).event != RDMA_CM_EVENT_CONNECT_REQUEST {
            rdma_ack_cm_event(event);
            return Err(Errno(libc::EINVAL));
        }
        let id = (*event).id;
        (*id).event = event;
        if let Some(attr) = inner.accept_qp_attr.get() {
            let made = check(rdma_create_qp(id, (*listen).pd, &mut attr.clone()));
            made.inspect_err(|_| {
                rdma_destroy_id(id);
            })?;
        }
        Ok(id)
    }
}
