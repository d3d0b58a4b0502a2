// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Endpoints: identifiers that are made in one step, and whose functions wait for what they begin.

use std::ffi::c_int;
use std::ptr;

use super::event::{acknowledge_kept, next, rdma_ack_cm_event};
use super::identifier::{create, rdma_destroy_id};
use super::place::{rdma_bind_addr, rdma_resolve_addr, rdma_resolve_route};
use super::qp::{rdma_create_qp, rdma_destroy_qp};
use crate::errno::{last, minus_one, Errno, Result};
use crate::header::*;
use crate::object;
use crate::unsupported::REFUSED;

/// How long an address is looked for, in ms.
const TIMEOUT: c_int = 2000;

/// Goes on if a function of librdmacm did not fail.
fn done(result: c_int) -> Result<()> {
    match result {
        0 => Ok(()),
        _ => Err(last()),
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
    minus_one(unsafe { make(&*info, pd, attr).map(|id| to.write(id)) })
}

/// # Safety
/// As for [`rdma_create_ep`].
unsafe fn make(
    info: &rdma_addrinfo,
    pd: *mut ibv_pd,
    attr: *mut ibv_qp_init_attr,
) -> Result<*mut rdma_cm_id> {
    if info.ai_port_space as u32 != RDMA_PS_TCP || info.ai_qp_type as u32 != IBV_QPT_RC {
        return Err(REFUSED);
    }
    // SAFETY: the caller vouches for it.
    unsafe {
        if let Some(attr) = attr.as_mut() {
            attr.qp_type = IBV_QPT_RC;
        }
        let id = create(ptr::null_mut(), ptr::null_mut())?;
        let made = match info.ai_flags as u32 & RAI_PASSIVE {
            0 => active(id, info, pd, attr),
            _ => passive(id, info, pd, attr),
        };
        made.map(|()| id).inspect_err(|_| {
            rdma_destroy_ep(id);
        })
    }
}

/// # Safety
/// As for [`rdma_create_ep`], and the identifier is live.
unsafe fn active(
    id: *mut rdma_cm_id,
    info: &rdma_addrinfo,
    pd: *mut ibv_pd,
    attr: *mut ibv_qp_init_attr,
) -> Result<()> {
    // SAFETY: the caller vouches for it.
    unsafe {
        done(rdma_resolve_addr(
            id,
            info.ai_src_addr,
            info.ai_dst_addr,
            TIMEOUT,
        ))?;
        done(rdma_resolve_route(id, TIMEOUT))?;
        match attr.is_null() {
            true => Ok(()),
            false => done(rdma_create_qp(id, pd, attr)),
        }
    }
}

/// # Safety
/// As for [`active`].
unsafe fn passive(
    id: *mut rdma_cm_id,
    info: &rdma_addrinfo,
    pd: *mut ibv_pd,
    attr: *mut ibv_qp_init_attr,
) -> Result<()> {
    // SAFETY: the caller vouches for it.
    unsafe {
        done(rdma_bind_addr(id, info.ai_src_addr))?;
        if let Some(attr) = attr.as_ref() {
            (*id).pd = pd;
            // It is new.
            let _ = object::own(id).accepts_by.set(*attr);
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
    minus_one(unsafe { request(listen).map(|id| to.write(id)) })
}

/// Takes a request, as an identifier with a channel of its own.
///
/// # Errors
/// `EINVAL` if it does not wait for what it begins, or hears of something else; those of [`next`] and
/// [`rdma_create_qp`].
///
/// # Safety
/// As for [`rdma_get_request`].
unsafe fn request(listen: *mut rdma_cm_id) -> Result<*mut rdma_cm_id> {
    // SAFETY: the caller vouches for it.
    unsafe {
        let own = object::own(listen);
        if !own.id.with(|state| state.sync) {
            return Err(Errno(libc::EINVAL));
        }
        acknowledge_kept(listen);
        let event = next((*listen).channel)?;
        if (*event).event != RDMA_CM_EVENT_CONNECT_REQUEST {
            rdma_ack_cm_event(event);
            return Err(Errno(libc::EINVAL));
        }
        let id = (*event).id;
        (*id).event = event;
        if let Some(attr) = own.accepts_by.get() {
            let made = done(rdma_create_qp(id, (*listen).pd, &mut attr.clone()));
            made.inspect_err(|_| {
                rdma_destroy_id(id);
            })?;
        }
        Ok(id)
    }
}
