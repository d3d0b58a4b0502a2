// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Endpoints: identifiers that are made in one step, and whose functions wait for what they begin.

use std::ffi::c_int;
use std::ptr;

use super::event::{ack_stored_event, next_event, rdma_ack_cm_event};
use super::identifier::{create_id, rdma_destroy_id};
use super::place::{rdma_bind_addr, rdma_resolve_addr, rdma_resolve_route};
use super::qp::{rdma_create_qp, rdma_destroy_qp};
use crate::errno::{last_errno, zero_or_minus_one, Errno, Result};
use crate::header::*;
use crate::object;
use crate::unsupported::UNSUPPORTED;

/// How long an address is looked for, in ms.
const RESOLVE_TIMEOUT_MS: c_int = 2000;

/// Goes on if a function of librdmacm did not fail.
fn check(result: c_int) -> Result<()> {
    match result {
        0 => Ok(()),
        _ => Err(last_errno()),
    }
}

/// # Safety
/// The addresses are of [`rdma_getaddrinfo`](super::addrinfo), the domain is live or NULL, the attributes are there or
/// NULL, and there is room for the result.
#[no_mangle]
unsafe extern "C" fn rdma_create_ep(
    to: *mut *mut rdma_cm_id,
    info: *mut rdma_addrinfo,
    pd: *mut ibv_pd,
    attr: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: the caller vouches for it.
    zero_or_minus_one(unsafe { create_endpoint(&*info, pd, attr).map(|id| to.write(id)) })
}

/// # Safety
/// As for [`rdma_create_ep`].
unsafe fn create_endpoint(
    info: &rdma_addrinfo,
    pd: *mut ibv_pd,
    attr: *mut ibv_qp_init_attr,
) -> Result<*mut rdma_cm_id> {
    if info.ai_port_space as u32 != RDMA_PS_TCP || info.ai_qp_type as u32 != IBV_QPT_RC {
        return Err(UNSUPPORTED);
    }
    // SAFETY: the caller vouches for it.
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
/// As for [`rdma_create_ep`], and the identifier is live.
unsafe fn setup_active(
    id: *mut rdma_cm_id,
    info: &rdma_addrinfo,
    pd: *mut ibv_pd,
    attr: *mut ibv_qp_init_attr,
) -> Result<()> {
    // SAFETY: the caller vouches for it.
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
/// As for [`active`].
unsafe fn setup_passive(
    id: *mut rdma_cm_id,
    info: &rdma_addrinfo,
    pd: *mut ibv_pd,
    attr: *mut ibv_qp_init_attr,
) -> Result<()> {
    // SAFETY: the caller vouches for it.
    unsafe {
        check(rdma_bind_addr(id, info.ai_src_addr))?;
        if let Some(attr) = attr.as_ref() {
            (*id).pd = pd;
            // It is new.
            let _ = object::inner(id).accept_qp_attr.set(*attr);
        }
    }
    Ok(())
}

/// # Safety
/// Its argument came from [`rdma_create_ep`] or [`rdma_get_request`].
#[no_mangle]
unsafe extern "C" fn rdma_destroy_ep(id: *mut rdma_cm_id) {
    // SAFETY: the caller vouches for it.
    unsafe {
        rdma_destroy_qp(id);
        rdma_destroy_id(id);
    }
}

/// # Safety
/// Who listens is live, and there is room for the result.
#[no_mangle]
unsafe extern "C" fn rdma_get_request(listen: *mut rdma_cm_id, to: *mut *mut rdma_cm_id) -> c_int {
    // SAFETY: the caller vouches for it.
    zero_or_minus_one(unsafe { get_request(listen).map(|id| to.write(id)) })
}

/// Takes a request, as an identifier with a channel of its own.
///
/// # Errors
/// `EINVAL` if it does not wait for what it begins, or hears of something else; those of [`next`] and
/// [`rdma_create_qp`].
///
/// # Safety
/// As for [`rdma_get_request`].
unsafe fn get_request(listen: *mut rdma_cm_id) -> Result<*mut rdma_cm_id> {
    // SAFETY: the caller vouches for it.
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
