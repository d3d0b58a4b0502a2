// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The functions that set connections up and end them.

use std::ffi::{c_int, c_void};
use std::slice;

use super::event::complete;
use super::id::Phase;
use super::message::{Kind, Message, Said, NOWHERE};
use super::place::ends;
use super::qp;
use crate::errno::{minus_one, Errno, Result};
use crate::header::*;
use crate::object;
use crate::query::READS;

/// Data of the program's.
///
/// # Safety
/// There are so many bytes, or none.
unsafe fn data(at: *const c_void, len: u8) -> Vec<u8> {
    match at.is_null() {
        true => Vec::new(),
        // SAFETY: the caller vouches for it.
        false => unsafe { slice::from_raw_parts(at.cast::<u8>(), len.into()) }.to_vec(),
    }
}

/// What a program says of its end.
///
/// # Safety
/// The identifier is live, and what the parameters point to is there; they may be NULL.
unsafe fn said(raw: *mut rdma_cm_id, param: *const rdma_conn_param) -> Said {
    let most = READS as u8;
    // SAFETY: the caller vouches for it.
    let Some(param) = (unsafe { param.as_ref() }) else {
        return Said {
            responder_resources: most,
            initiator_depth: most,
            // SAFETY: likewise.
            qp: unsafe { qp::number(raw) }.unwrap_or(0),
            ..Said::default()
        };
    };
    Said {
        responder_resources: param.responder_resources.min(most),
        initiator_depth: param.initiator_depth.min(most),
        flow_control: param.flow_control,
        retry_count: param.retry_count,
        rnr_retry_count: param.rnr_retry_count,
        srq: param.srq,
        // SAFETY: likewise.
        qp: unsafe { qp::number(raw) }.unwrap_or(param.qp_num),
        // SAFETY: likewise.
        data: unsafe { data(param.private_data, param.private_data_len) },
    }
}

/// # Safety
/// As for [`said`].
#[no_mangle]
unsafe extern "C" fn rdma_connect(raw: *mut rdma_cm_id, param: *mut rdma_conn_param) -> c_int {
    // SAFETY: the caller vouches for it.
    let (id, said, [from, to]) = unsafe { (&object::own(raw).id, said(raw, param), ends(raw)) };
    let ends = [from, to].map(|end| end.unwrap_or(NOWHERE));
    let request = Message {
        ends,
        ..Message::new(Kind::Request, said)
    };
    let asked = id.with(|state| match state.phase {
        Phase::Routed => {
            state.ask(id, ends[1].port(), &request);
            Ok(())
        }
        _ => Err(Errno(libc::EINVAL)),
    });
    // SAFETY: likewise.
    minus_one(asked.and_then(|()| unsafe { complete(raw) }))
}

/// Says that the connection is there.
///
/// # Safety
/// The identifier is live.
pub(super) unsafe fn establish(raw: *mut rdma_cm_id) -> Result<()> {
    // SAFETY: the caller vouches for it.
    let id = unsafe { &object::own(raw).id };
    id.with(|state| match state.phase {
        Phase::Replied => {
            state.phase = Phase::Established;
            // Whoever has gone since, was there.
            let _ = state.say(&Message::new(Kind::Ready, Said::default()));
            Ok(())
        }
        // It was. The program is told next that it is not any more.
        Phase::Left(_) | Phase::Over => Ok(()),
        _ => Err(Errno(libc::EINVAL)),
    })
}

/// # Safety
/// The identifier is live.
#[no_mangle]
unsafe extern "C" fn rdma_establish(raw: *mut rdma_cm_id) -> c_int {
    // SAFETY: the caller vouches for it.
    let established = match unsafe { (*raw).qp.is_null() } {
        // SAFETY: likewise.
        true => unsafe { establish(raw) },
        // That of the identifier itself is connected by the event.
        false => Err(Errno(libc::EINVAL)),
    };
    minus_one(established)
}

/// # Safety
/// As for [`said`].
#[no_mangle]
unsafe extern "C" fn rdma_accept(raw: *mut rdma_cm_id, param: *mut rdma_conn_param) -> c_int {
    // SAFETY: the caller vouches for it.
    minus_one(unsafe { accept(raw, param) })
}

/// # Safety
/// As for [`said`].
unsafe fn accept(raw: *mut rdma_cm_id, param: *const rdma_conn_param) -> Result<()> {
    // SAFETY: the caller vouches for it.
    let (id, mut said) = unsafe { (&object::own(raw).id, said(raw, param)) };
    id.with(|state| {
        if param.is_null() {
            // As much as was asked for.
            let asked = state.other.seen();
            said.responder_resources = asked.responder_resources;
            said.initiator_depth = asked.initiator_depth;
        }
        match state.phase {
            Phase::Requested => Ok(()),
            _ => Err(Errno(libc::EINVAL)),
        }
    })?;
    // SAFETY: likewise.
    if unsafe { qp::number(raw) }.is_some() {
        // SAFETY: likewise.
        unsafe { qp::connect(raw)? };
    }
    id.with(|state| {
        state.say(&Message::new(Kind::Reply, said))?;
        state.phase = Phase::Answered;
        Ok::<_, Errno>(())
    })?;
    // SAFETY: likewise.
    unsafe { complete(raw) }
}

/// # Safety
/// The identifier is live, and there are so many bytes, or none.
#[no_mangle]
unsafe extern "C" fn rdma_reject(raw: *mut rdma_cm_id, at: *const c_void, len: u8) -> c_int {
    // SAFETY: the caller vouches for it.
    let (id, data) = unsafe { (&object::own(raw).id, data(at, len)) };
    minus_one(id.with(|state| match state.phase {
        Phase::Requested | Phase::Replied => state.reject(data),
        _ => Err(Errno(libc::EINVAL)),
    }))
}

/// # Safety
/// The identifier is live.
#[no_mangle]
unsafe extern "C" fn rdma_disconnect(raw: *mut rdma_cm_id) -> c_int {
    // SAFETY: the caller vouches for it.
    let id = unsafe { &object::own(raw).id };
    let disconnect = || {
        let left = id.with(|state| state.leave());
        // That does not take for ever.
        id.manager.wake_watcher();
        // SAFETY: likewise.
        unsafe {
            if qp::number(raw).is_some() {
                qp::fail(raw)?;
            }
        }
        match left? {
            // SAFETY: likewise.
            true => unsafe { complete(raw) },
            false => Ok(()),
        }
    };
    minus_one(disconnect())
}

/// That the first message has come is not waited for.
#[no_mangle]
extern "C" fn rdma_notify(_id: *mut rdma_cm_id, _event: ibv_event_type) -> c_int {
    0
}
