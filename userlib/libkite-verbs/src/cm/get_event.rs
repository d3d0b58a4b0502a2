// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Delivery of events to the program.
//!
//! As in librdmacm, the thread of the program that takes an event changes the state of the QP.

use std::ffi::c_int;
use std::mem::ManuallyDrop;
use std::ptr;

use super::event::{ack_stored_event, CmEvent, CmEventInner, UndeliveredId};
use super::ffi_id::migrate_id;
use super::qp;
use crate::errno::{zero_or_minus_one, Errno, Result};
use crate::header::*;
use crate::object;

/// Delivers an identifier to the program, with the context of the listening one. Its events go to the channel, or
/// to a channel of its own if the listening identifier is synchronous.
///
/// # Errors
/// See [`migrate_id`].
///
/// # Safety
/// The channel and the listening identifier are live.
unsafe fn deliver(
    new_id: UndeliveredId,
    channel: *mut rdma_event_channel,
    listen_id: *mut rdma_cm_id,
) -> Result<*mut rdma_cm_id> {
    let id = new_id.as_ptr();
    // SAFETY: guaranteed by the caller; the new identifier has no other user.
    unsafe {
        (*id).channel = channel;
        (*id).context = (*listen_id).context;
        let sync = object::inner(listen_id)
            .id
            .with_locked(|state| state.is_sync);
        migrate_id(id, if sync { ptr::null_mut() } else { channel })?;
    }
    std::mem::forget(new_id);
    Ok(id)
}

/// # Safety
/// The channel is live, and the result may be written.
#[no_mangle]
unsafe extern "C-unwind" fn rdma_get_cm_event(
    channel: *mut rdma_event_channel,
    to: *mut *mut rdma_cm_event,
) -> c_int {
    // SAFETY: guaranteed by the caller.
    zero_or_minus_one(unsafe { next_event(channel) }.map(|event| unsafe { to.write(event) }))
}

/// Takes the next event, and changes the state of the QP accordingly.
///
/// # Errors
/// See `EventQueue::next_event`. If a new identifier cannot be delivered, see [`deliver`]; the connection is then
/// rejected.
///
/// # Safety
/// The channel is live until an event is taken, and so are the identifiers with events.
pub(super) unsafe fn next_event(channel: *mut rdma_event_channel) -> Result<*mut rdma_cm_event> {
    // SAFETY: guaranteed by the caller.
    let events = ManuallyDrop::new(unsafe { object::inner(channel) }.clone());
    let taken = events.next_event();
    let (events, taken) = (ManuallyDrop::into_inner(events), taken?);
    let (mut cm_event, owner) = (taken.event, taken.ptr.0);
    let (id, listen_id) = match cm_event.new_id.take() {
        Some(new_id) => {
            // SAFETY: likewise.
            let delivered = unsafe { deliver(new_id, channel, owner) };
            let id = delivered.inspect_err(|_| events.acknowledge(taken.owner_id, 1))?;
            (id, owner)
        }
        None => (owner, ptr::null_mut()),
    };
    // SAFETY: likewise.
    unsafe { apply_to_qp(&mut cm_event, id) };
    let event = rdma_cm_event {
        id,
        listen_id,
        event: cm_event.kind,
        status: cm_event.status,
        param: rdma_cm_event__bindgen_ty_1 {
            conn: cm_event.param.as_peer_sees(),
        },
    };
    let inner = CmEventInner {
        events,
        owner_id: taken.owner_id,
        _param: cm_event.param,
    };
    Ok(object::into_raw(event, inner))
}

/// Changes the state of the QP according to an event. A failure changes the event.
///
/// # Safety
/// The identifier is live.
unsafe fn apply_to_qp(event: &mut CmEvent, id: *mut rdma_cm_id) {
    // SAFETY: guaranteed by the caller.
    let has_qp = unsafe { !(*id).qp.is_null() };
    let result = match event.kind {
        RDMA_CM_EVENT_CONNECT_RESPONSE if has_qp => {
            event.kind = RDMA_CM_EVENT_ESTABLISHED;
            // SAFETY: likewise.
            unsafe { qp::connect(id).and_then(|()| object::inner(id).id.establish()) }
        }
        // SAFETY: likewise.
        RDMA_CM_EVENT_REJECTED if has_qp => unsafe { qp::fail(id) },
        _ => Ok(()),
    };
    if let Err(errno) = result {
        event.kind = RDMA_CM_EVENT_CONNECT_ERROR;
        event.status = -errno.0;
    }
}

/// If an identifier is synchronous, waits for the event of the operation that was started. The identifier keeps the
/// event.
///
/// # Safety
/// The identifier is live.
pub(super) unsafe fn complete_sync(raw: *mut rdma_cm_id) -> Result<()> {
    // SAFETY: guaranteed by the caller; the program does not acknowledge an event that the identifier keeps.
    let event = unsafe {
        if !object::inner(raw).id.with_locked(|state| state.is_sync) {
            return Ok(());
        }
        ack_stored_event(raw);
        let event = next_event((*raw).channel)?;
        (*raw).event = event;
        &*event
    };
    match (event.event, event.status) {
        (_, 0) => Ok(()),
        (RDMA_CM_EVENT_REJECTED, _) => Err(Errno(libc::ECONNREFUSED)),
        (_, status) => Err(Errno(status.abs())),
    }
}
