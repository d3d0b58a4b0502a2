// SPDX-License-Identifier: GPL-2.0 OR MIT
//! C functions that set up connections and end them.

use std::ffi::{c_int, c_void};
use std::slice;

use super::address::endpoint_addrs;
use super::cm_id::CmState;
use super::get_event::complete_sync;
use super::message::{CmMessage, ConnParam, MsgKind, UNSPECIFIED_ADDR};
use super::qp;
use crate::errno::{zero_or_minus_one, Errno, Result};
use crate::header::*;
use crate::limits::MAX_RD_ATOMIC;
use crate::object;

/// Copies the private data of a program.
///
/// # Safety
/// There are `len` bytes, or the pointer is NULL.
unsafe fn copy_private_data(ptr: *const c_void, len: u8) -> Vec<u8> {
    match ptr.is_null() {
        true => Vec::new(),
        // SAFETY: guaranteed by the caller.
        false => unsafe { slice::from_raw_parts(ptr.cast::<u8>(), len.into()) }.to_vec(),
    }
}

/// Returns the parameters of the local end.
///
/// # Safety
/// The identifier is live. The parameters are NULL, or they and their private data are readable.
unsafe fn local_param(raw: *mut rdma_cm_id, param: *const rdma_conn_param) -> ConnParam {
    let max = MAX_RD_ATOMIC as u8;
    // SAFETY: guaranteed by the caller.
    let Some(param) = (unsafe { param.as_ref() }) else {
        return ConnParam {
            responder_resources: max,
            initiator_depth: max,
            // SAFETY: likewise.
            qpn: unsafe { qp::qpn(raw) }.unwrap_or(0),
            ..ConnParam::default()
        };
    };
    ConnParam {
        responder_resources: param.responder_resources.min(max),
        initiator_depth: param.initiator_depth.min(max),
        flow_control: param.flow_control,
        retry_count: param.retry_count,
        rnr_retry_count: param.rnr_retry_count,
        srq: param.srq,
        // SAFETY: likewise.
        qpn: unsafe { qp::qpn(raw) }.unwrap_or(param.qp_num),
        // SAFETY: likewise.
        data: unsafe { copy_private_data(param.private_data, param.private_data_len) },
    }
}

/// # Safety
/// See [`local_param`].
#[no_mangle]
unsafe extern "C" fn rdma_connect(raw: *mut rdma_cm_id, param: *mut rdma_conn_param) -> c_int {
    // SAFETY: guaranteed by the caller.
    let (id, local, [from, to]) = unsafe {
        (
            &object::inner(raw).id,
            local_param(raw, param),
            endpoint_addrs(raw),
        )
    };
    let addrs = [from, to].map(|addr| addr.unwrap_or(UNSPECIFIED_ADDR));
    let request = CmMessage {
        addrs,
        ..CmMessage::new(MsgKind::Req, local)
    };
    let result = id.with_locked(|state| match state.cm_state {
        CmState::RouteResolved => {
            state.send_req(id, addrs[1].port(), &request);
            Ok(())
        }
        _ => Err(Errno(libc::EINVAL)),
    });
    // SAFETY: likewise.
    zero_or_minus_one(result.and_then(|()| unsafe { complete_sync(raw) }))
}

/// # Safety
/// The identifier is live.
#[no_mangle]
unsafe extern "C" fn rdma_establish(raw: *mut rdma_cm_id) -> c_int {
    // SAFETY: guaranteed by the caller.
    let established = match unsafe { (*raw).qp.is_null() } {
        // SAFETY: likewise.
        true => unsafe { object::inner(raw) }.id.establish(),
        // The event connects a QP of the identifier, so the program has nothing to do.
        false => Err(Errno(libc::EINVAL)),
    };
    zero_or_minus_one(established)
}

/// # Safety
/// See [`local_param`].
#[no_mangle]
unsafe extern "C" fn rdma_accept(raw: *mut rdma_cm_id, param: *mut rdma_conn_param) -> c_int {
    // SAFETY: guaranteed by the caller.
    zero_or_minus_one(unsafe { accept(raw, param) })
}

/// # Safety
/// See [`local_param`].
unsafe fn accept(raw: *mut rdma_cm_id, param: *const rdma_conn_param) -> Result<()> {
    // SAFETY: guaranteed by the caller.
    let (id, mut local) = unsafe { (&object::inner(raw).id, local_param(raw, param)) };
    id.with_locked(|state| {
        if param.is_null() {
            // As much as the remote end requested.
            let asked = state.remote_param.as_peer_sees();
            local.responder_resources = asked.responder_resources;
            local.initiator_depth = asked.initiator_depth;
        }
        match state.cm_state {
            CmState::ReqReceived => Ok(()),
            _ => Err(Errno(libc::EINVAL)),
        }
    })?;
    // SAFETY: likewise.
    if unsafe { qp::qpn(raw) }.is_some() {
        // SAFETY: likewise.
        unsafe { qp::connect(raw)? };
    }
    id.with_locked(|state| state.send_reply(local))?;
    // SAFETY: likewise.
    unsafe { complete_sync(raw) }
}

/// # Safety
/// The identifier is live. There are `len` bytes, or the pointer is NULL.
#[no_mangle]
unsafe extern "C" fn rdma_reject(raw: *mut rdma_cm_id, at: *const c_void, len: u8) -> c_int {
    // SAFETY: guaranteed by the caller.
    let (id, data) = unsafe { (&object::inner(raw).id, copy_private_data(at, len)) };
    zero_or_minus_one(id.with_locked(|state| match state.cm_state {
        CmState::ReqReceived | CmState::RepReceived => state.send_reject(data),
        _ => Err(Errno(libc::EINVAL)),
    }))
}

/// # Safety
/// The identifier is live.
#[no_mangle]
unsafe extern "C" fn rdma_disconnect(raw: *mut rdma_cm_id) -> c_int {
    // SAFETY: guaranteed by the caller.
    let id = unsafe { &object::inner(raw).id };
    let disconnect = || {
        let pending = id.with_locked(|state| state.disconnect());
        // The poller must apply the timeout of the state.
        id.manager.wake_poller();
        // SAFETY: likewise.
        unsafe {
            if qp::qpn(raw).is_some() {
                qp::fail(raw)?;
            }
        }
        match pending? {
            // SAFETY: likewise.
            true => unsafe { complete_sync(raw) },
            false => Ok(()),
        }
    };
    zero_or_minus_one(disconnect())
}

/// Ignored: the connection does not wait for the first message.
#[no_mangle]
extern "C" fn rdma_notify(_id: *mut rdma_cm_id, _event: ibv_event_type) -> c_int {
    0
}
