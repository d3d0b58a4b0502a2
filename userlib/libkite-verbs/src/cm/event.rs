// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Event channels, and what programs take from them.
//!
//! As in librdmacm, a queue pair goes to its states while the program takes the event that says so, in its own thread.

use std::ffi::c_int;
use std::mem::ManuallyDrop;
use std::net::SocketAddr;
use std::ptr;
use std::sync::Arc;

use super::id::Id;
use super::identifier::{destroy, give, migrate};
use super::message::Said;
use super::{connect, qp, Manager};
use crate::errno::{minus_one, pointer, Errno, Result};
use crate::header::*;
use crate::mailbox::Mailbox;
use crate::object::{self, Handle, Raw};

/// Events of identifiers.
pub(super) type Inbox = Mailbox<rdma_cm_id, Event>;

/// Something of which a program is to be told.
pub(crate) struct Event {
    pub(super) kind: rdma_cm_event_type,
    pub(super) status: c_int,
    /// By the other end.
    pub(super) said: Said,
    /// Of a request to connect, the identifier that is for it.
    pub(super) child: Option<Child>,
}

impl Event {
    pub(super) fn new(kind: rdma_cm_event_type, status: c_int) -> Self {
        Self {
            kind,
            status,
            said: Said::default(),
            child: None,
        }
    }
}

/// An identifier that the program has not got yet. If it never does, it is destroyed, and the other end is told.
pub(super) struct Child(Handle<rdma_cm_id>);

impl Child {
    /// One whose other end is at the first of two addresses.
    pub(super) fn new(id: Arc<Id>, ends: [SocketAddr; 2]) -> Self {
        Self(Handle(give(id, ends)))
    }

    /// Gives it to the program, with what it has of who listens; its events come to this channel, or to one of its own.
    ///
    /// # Errors
    /// Those of [`migrate`].
    ///
    /// # Safety
    /// The channel and who listens are live.
    unsafe fn hand_over(
        self,
        channel: *mut rdma_event_channel,
        listen_id: *mut rdma_cm_id,
    ) -> Result<*mut rdma_cm_id> {
        let id = self.0 .0;
        // SAFETY: the caller vouches for it, and nobody else has the new one.
        unsafe {
            (*id).channel = channel;
            (*id).context = (*listen_id).context;
            let sync = object::own(listen_id).id.with(|state| state.sync);
            migrate(id, if sync { ptr::null_mut() } else { channel })?;
        }
        std::mem::forget(self);
        Ok(id)
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // SAFETY: nobody else has it.
        unsafe { destroy(self.0 .0) };
    }
}

impl Raw for rdma_event_channel {
    type Own = Arc<Inbox>;
}

/// What is behind an event that a program has.
pub(crate) struct Given {
    inbox: Arc<Inbox>,
    number: u64,
    /// To which the event points.
    _said: Said,
}

impl Raw for rdma_cm_event {
    type Own = Given;
}

/// A new event channel.
pub(super) fn channel() -> Result<*mut rdma_event_channel> {
    let inbox = Inbox::new(0)?;
    let channel = rdma_event_channel { fd: inbox.fd() };
    Ok(object::give(channel, Arc::new(inbox)))
}

#[no_mangle]
extern "C" fn rdma_create_event_channel() -> *mut rdma_event_channel {
    // There is none without a device.
    pointer(Manager::get().and_then(|_| channel()))
}

/// # Safety
/// Its argument came from [`rdma_create_event_channel`], and no identifier has it any more.
#[no_mangle]
pub(super) unsafe extern "C" fn rdma_destroy_event_channel(channel: *mut rdma_event_channel) {
    // SAFETY: the caller vouches for it.
    drop(unsafe { object::take(channel) });
}

/// # Safety
/// The channel is live, and there is room for the result.
#[no_mangle]
unsafe extern "C-unwind" fn rdma_get_cm_event(
    channel: *mut rdma_event_channel,
    to: *mut *mut rdma_cm_event,
) -> c_int {
    // SAFETY: the caller vouches for it.
    minus_one(unsafe { next(channel) }.map(|event| unsafe { to.write(event) }))
}

/// # Safety
/// Its argument came from [`rdma_get_cm_event`].
#[no_mangle]
pub(super) unsafe extern "C" fn rdma_ack_cm_event(event: *mut rdma_cm_event) -> c_int {
    if event.is_null() {
        return minus_one(Err(Errno(libc::EINVAL)));
    }
    // SAFETY: the caller vouches for it.
    let given = unsafe { object::take(event) };
    given.inbox.acknowledge(given.number, 1);
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
pub(super) unsafe fn next(channel: *mut rdma_event_channel) -> Result<*mut rdma_cm_event> {
    // SAFETY: the caller vouches for it.
    let inbox = ManuallyDrop::new(unsafe { object::own(channel) }.clone());
    let taken = inbox.next();
    let (inbox, taken) = (ManuallyDrop::into_inner(inbox), taken?);
    let (mut told, owner) = (taken.event, taken.handle.0);
    let (id, listen_id) = match told.child.take() {
        Some(child) => {
            // SAFETY: likewise.
            let given = unsafe { child.hand_over(channel, owner) };
            let id = given.inspect_err(|_| inbox.acknowledge(taken.number, 1))?;
            (id, owner)
        }
        None => (owner, ptr::null_mut()),
    };
    // SAFETY: likewise.
    unsafe { act(&mut told, id) };
    let event = rdma_cm_event {
        id,
        listen_id,
        event: told.kind,
        status: told.status,
        param: rdma_cm_event__bindgen_ty_1 {
            conn: told.said.seen(),
        },
    };
    let given = Given {
        inbox,
        number: taken.number,
        _said: told.said,
    };
    Ok(object::give(event, given))
}

/// Does what belongs to an event, which may then be another.
///
/// # Safety
/// The identifier is live.
unsafe fn act(told: &mut Event, id: *mut rdma_cm_id) {
    // SAFETY: the caller vouches for it.
    let has_qp = unsafe { !(*id).qp.is_null() };
    let done = match told.kind {
        RDMA_CM_EVENT_CONNECT_RESPONSE if has_qp => {
            told.kind = RDMA_CM_EVENT_ESTABLISHED;
            // SAFETY: likewise.
            unsafe { qp::connect(id).and_then(|()| connect::establish(id)) }
        }
        // SAFETY: likewise.
        RDMA_CM_EVENT_REJECTED if has_qp => unsafe { qp::fail(id) },
        _ => Ok(()),
    };
    if let Err(errno) = done {
        told.kind = RDMA_CM_EVENT_CONNECT_ERROR;
        told.status = -errno.0;
    }
}

/// Waits for what a function of an identifier has begun, if its functions do. The event is kept there.
///
/// # Safety
/// The identifier is live.
pub(super) unsafe fn complete(raw: *mut rdma_cm_id) -> Result<()> {
    // SAFETY: the caller vouches for it, and events that identifiers keep are not acknowledged.
    let event = unsafe {
        if !object::own(raw).id.with(|state| state.sync) {
            return Ok(());
        }
        acknowledge_kept(raw);
        let event = next((*raw).channel)?;
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
pub(super) unsafe fn acknowledge_kept(raw: *mut rdma_cm_id) {
    // SAFETY: the caller vouches for it.
    unsafe {
        if !(*raw).event.is_null() {
            rdma_ack_cm_event(std::mem::replace(&mut (*raw).event, ptr::null_mut()));
        }
    }
}
