// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Event channels and events.

use std::ffi::c_int;
use std::ptr;
use std::sync::Arc;

use super::message::ConnParam;
use super::CmManager;
use crate::errno::{ptr_or_null, zero_or_minus_one, Errno, Result};
use crate::event_queue::EventQueue;
use crate::header::*;
use crate::object::{self, CStruct, SendPtr};

/// Queue of events of identifiers.
pub(super) type CmEventQueue = EventQueue<rdma_cm_id, CmEvent>;

/// Event for the program.
pub(crate) struct CmEvent {
    pub(super) kind: rdma_cm_event_type,
    pub(super) status: c_int,
    /// Parameters of the remote end.
    pub(super) param: ConnParam,
    /// Identifier for a connection request.
    pub(super) new_id: Option<UndeliveredId>,
}

impl CmEvent {
    pub(super) fn new(kind: rdma_cm_event_type, status: c_int) -> Self {
        Self {
            kind,
            status,
            param: ConnParam::default(),
            new_id: None,
        }
    }
}

/// Identifier that was not delivered to the program. Dropping it destroys the identifier, and rejects the connection.
pub(super) struct UndeliveredId {
    raw: SendPtr<rdma_cm_id>,
    destroy: unsafe fn(*mut rdma_cm_id),
}

impl UndeliveredId {
    /// Takes over an identifier.
    ///
    /// # Safety
    /// The identifier has no other user, and `destroy` may be called with it once.
    pub(super) unsafe fn new(raw: *mut rdma_cm_id, destroy: unsafe fn(*mut rdma_cm_id)) -> Self {
        let raw = SendPtr(raw);
        Self { raw, destroy }
    }

    /// Returns the identifier, which is still to be delivered.
    pub(super) fn as_ptr(&self) -> *mut rdma_cm_id {
        self.raw.0
    }
}

impl Drop for UndeliveredId {
    fn drop(&mut self) {
        // SAFETY: guaranteed by the caller of `new`.
        unsafe { (self.destroy)(self.raw.0) };
    }
}

impl CStruct for rdma_event_channel {
    type Inner = Arc<CmEventQueue>;
}

/// Private data of an event that the program has taken.
pub(crate) struct CmEventInner {
    pub(super) events: Arc<CmEventQueue>,
    pub(super) owner_id: u64,
    /// Private data to which the event points.
    pub(super) _param: ConnParam,
}

impl CStruct for rdma_cm_event {
    type Inner = CmEventInner;
}

/// Creates an event channel.
pub(super) fn new_event_channel() -> Result<*mut rdma_event_channel> {
    let events = CmEventQueue::new(0)?;
    let channel = rdma_event_channel { fd: events.fd() };
    Ok(object::into_raw(channel, Arc::new(events)))
}

#[no_mangle]
extern "C" fn rdma_create_event_channel() -> *mut rdma_event_channel {
    // Fails early without a device.
    ptr_or_null(CmManager::get().and_then(|_| new_event_channel()))
}

/// # Safety
/// The channel comes from [`rdma_create_event_channel`], and no identifier uses it.
#[no_mangle]
pub(super) unsafe extern "C" fn rdma_destroy_event_channel(channel: *mut rdma_event_channel) {
    // SAFETY: guaranteed by the caller.
    drop(unsafe { object::from_raw(channel) });
}

/// # Safety
/// The event comes from [`rdma_get_cm_event`].
#[no_mangle]
pub(super) unsafe extern "C" fn rdma_ack_cm_event(event: *mut rdma_cm_event) -> c_int {
    if event.is_null() {
        return zero_or_minus_one(Err(Errno(libc::EINVAL)));
    }
    // SAFETY: guaranteed by the caller.
    let inner = unsafe { object::from_raw(event) };
    inner.events.acknowledge(inner.owner_id, 1);
    0
}

/// Acknowledges the event that an identifier keeps.
///
/// # Safety
/// The identifier is live.
pub(super) unsafe fn ack_stored_event(raw: *mut rdma_cm_id) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        if !(*raw).event.is_null() {
            rdma_ack_cm_event(std::mem::replace(&mut (*raw).event, ptr::null_mut()));
        }
    }
}
