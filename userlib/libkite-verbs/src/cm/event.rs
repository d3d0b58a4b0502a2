// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Event channels, and what programs take from them.
//!
//! As in librdmacm, a queue pair goes to its states while the program takes the event that says so, in its own thread.

use std::ffi::c_int;
use std::mem::ManuallyDrop;
use std::net::SocketAddr;
use std::ptr;
use std::sync::Arc;

use super::id::CmId;
use super::identifier::{destroy_id, into_raw_passive, migrate_id};
use super::message::ConnParam;
use super::{connect, qp, CmManager};
use crate::errno::{ptr_or_null, zero_or_minus_one, Errno, Result};
use crate::header::*;
use crate::mailbox::EventQueue;
use crate::object::{self, CStruct, SendPtr};

/// Events of identifiers.
pub(super) type CmEventQueue = EventQueue<rdma_cm_id, CmEvent>;

/// Something of which a program is to be told.
pub(crate) struct CmEvent {
    pub(super) kind: rdma_cm_event_type,
    pub(super) status: c_int,
    /// By the other end.
    pub(super) param: ConnParam,
    /// Of a request to connect, the identifier that is for it.
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

/// An identifier that the program has not got yet. If it never does, it is destroyed, and the other end is told.
pub(super) struct UndeliveredId(SendPtr<rdma_cm_id>);

impl UndeliveredId {
    /// One whose other end is at the first of two addresses.
    pub(super) fn new(id: Arc<CmId>, addrs: [SocketAddr; 2]) -> Self {
        Self(SendPtr(into_raw_passive(id, addrs)))
    }

    /// Gives it to the program, with what it has of who listens; its events come to this channel, or to one of its own.
    ///
    /// # Errors
    /// Those of [`migrate`].
    ///
    /// # Safety
    /// The channel and who listens are live.
    unsafe fn deliver(
        self,
        channel: *mut rdma_event_channel,
        listen_id: *mut rdma_cm_id,
    ) -> Result<*mut rdma_cm_id> {
        let id = self.0 .0;
        // SAFETY: the caller vouches for it, and nobody else has the new one.
        unsafe {
            (*id).channel = channel;
            (*id).context = (*listen_id).context;
            let sync = object::inner(listen_id)
                .id
                .with_locked(|state| state.is_sync);
            migrate_id(id, if sync { ptr::null_mut() } else { channel })?;
        }
        std::mem::forget(self);
        Ok(id)
    }
}

impl Drop for UndeliveredId {
    fn drop(&mut self) {
        // SAFETY: nobody else has it.
        unsafe { destroy_id(self.0 .0) };
    }
}

impl CStruct for rdma_event_channel {
    type Inner = Arc<CmEventQueue>;
}

/// What is behind an event that a program has.
pub(crate) struct CmEventInner {
    events: Arc<CmEventQueue>,
    owner_id: u64,
    /// To which the event points.
    _param: ConnParam,
}

impl CStruct for rdma_cm_event {
    type Inner = CmEventInner;
}

/// A new event channel.
pub(super) fn new_event_channel() -> Result<*mut rdma_event_channel> {
    let events = CmEventQueue::new(0)?;
    let channel = rdma_event_channel { fd: events.fd() };
    Ok(object::into_raw(channel, Arc::new(events)))
}

#[no_mangle]
extern "C" fn rdma_create_event_channel() -> *mut rdma_event_channel {
    // There is none without a device.
    ptr_or_null(CmManager::get().and_then(|_| new_event_channel()))
}

/// # Safety
/// Its argument came from [`rdma_create_event_channel`], and no identifier has it any more.
#[no_mangle]
pub(super) unsafe extern "C" fn rdma_destroy_event_channel(channel: *mut rdma_event_channel) {
    // SAFETY: the caller vouches for it.
    drop(unsafe { object::from_raw(channel) });
}

/// # Safety
/// The channel is live, and there is room for the result.
#[no_mangle]
unsafe extern "C-unwind" fn rdma_get_cm_event(
    channel: *mut rdma_event_channel,
    to: *mut *mut rdma_cm_event,
) -> c_int {
    // SAFETY: the caller vouches for it.
    zero_or_minus_one(unsafe { next_event(channel) }.map(|event| unsafe { to.write(event) }))
}

/// # Safety
/// Its argument came from [`rdma_get_cm_event`].
#[no_mangle]
pub(super) unsafe extern "C" fn rdma_ack_cm_event(event: *mut rdma_cm_event) -> c_int {
    if event.is_null() {
        return zero_or_minus_one(Err(Errno(libc::EINVAL)));
    }
    // SAFETY: the caller vouches for it.
    let inner = unsafe { object::from_raw(event) };
    inner.events.acknowledge(inner.owner_id, 1);
    0
}

/// Takes the next event, and does what belongs to it.
///
/// # Errors
/// Those of [`Mailbox::next`]; if a new identifier cannot be given to the program, those of [`Child::hand_over`]: then
/// the other end is told.
///
/// # Safety
/// The channel is live until there is one, and so are the identifiers of which it tells.
pub(super) unsafe fn next_event(channel: *mut rdma_event_channel) -> Result<*mut rdma_cm_event> {
    // SAFETY: the caller vouches for it.
    let events = ManuallyDrop::new(unsafe { object::inner(channel) }.clone());
    let taken = events.next_event();
    let (events, taken) = (ManuallyDrop::into_inner(events), taken?);
    let (mut cm_event, owner) = (taken.event, taken.ptr.0);
    let (id, listen_id) = match cm_event.new_id.take() {
        Some(child) => {
            // SAFETY: likewise.
            let delivered = unsafe { child.deliver(channel, owner) };
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

/// Does what belongs to an event, which may then be another.
///
/// # Safety
/// The identifier is live.
unsafe fn apply_to_qp(event: &mut CmEvent, id: *mut rdma_cm_id) {
    // SAFETY: the caller vouches for it.
    let has_qp = unsafe { !(*id).qp.is_null() };
    let result = match event.kind {
        RDMA_CM_EVENT_CONNECT_RESPONSE if has_qp => {
            event.kind = RDMA_CM_EVENT_ESTABLISHED;
            // SAFETY: likewise.
            unsafe { qp::connect(id).and_then(|()| connect::establish(id)) }
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

/// Waits for what a function of an identifier has begun, if its functions do. The event is kept there.
///
/// # Safety
/// The identifier is live.
pub(super) unsafe fn complete_sync(raw: *mut rdma_cm_id) -> Result<()> {
    // SAFETY: the caller vouches for it, and events that identifiers keep are not acknowledged.
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

/// Acknowledges the event that an identifier keeps.
///
/// # Safety
/// As for [`complete`].
pub(super) unsafe fn ack_stored_event(raw: *mut rdma_cm_id) {
    // SAFETY: the caller vouches for it.
    unsafe {
        if !(*raw).event.is_null() {
            rdma_ack_cm_event(std::mem::replace(&mut (*raw).event, ptr::null_mut()));
        }
    }
}
