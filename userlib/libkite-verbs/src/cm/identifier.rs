// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The functions that make identifiers, destroy them, and have their events come elsewhere.

use std::cell::OnceCell;
use std::ffi::{c_int, c_void};
use std::net::SocketAddr;
use std::sync::Arc;

use super::event::{acknowledge_kept, channel, rdma_destroy_event_channel, Inbox};
use super::id::Id;
use super::place::{bind_to_device, set_destination, set_source};
use super::Manager;
use crate::errno::{minus_one, Errno, Result};
use crate::header::*;
use crate::object::{self, Handle, Raw};
use crate::unsupported::REFUSED;

/// What is behind an identifier.
pub(crate) struct Owned {
    pub(super) id: Arc<Id>,
    /// What queue pairs of those who connect here are made of.
    pub(super) accepts_by: OnceCell<ibv_qp_init_attr>,
}

impl Raw for rdma_cm_id {
    type Own = Owned;
}

fn new(id: Arc<Id>, raw: rdma_cm_id) -> *mut rdma_cm_id {
    let (manager, number) = (id.manager.clone(), id.number);
    let inbox = id.with(|state| state.inbox.clone());
    let owned = Owned {
        id: id.clone(),
        accepts_by: OnceCell::new(),
    };
    let raw = object::give(raw, owned);
    inbox.enter(number, Handle(raw));
    manager.enter(&id);
    raw
}

fn blank() -> rdma_cm_id {
    rdma_cm_id {
        ps: RDMA_PS_TCP,
        qp_type: IBV_QPT_RC,
        ..Default::default()
    }
}

/// The passive end of a connection, whose active end is at the first of two addresses.
pub(super) fn give(id: Arc<Id>, ends: [SocketAddr; 2]) -> *mut rdma_cm_id {
    let mut raw = blank();
    bind_to_device(&mut raw, &id.manager);
    set_destination(&mut raw, ends[0]);
    set_source(&mut raw, ends[1]);
    new(id, raw)
}

/// Makes an identifier. One without a channel gets one of its own, and its functions wait for what they begin.
///
/// # Safety
/// The channel is live or NULL.
pub(super) unsafe fn create(
    of: *mut rdma_event_channel,
    context: *mut c_void,
) -> Result<*mut rdma_cm_id> {
    let manager = Manager::get()?;
    let own = match of.is_null() {
        true => channel()?,
        false => of,
    };
    // SAFETY: the caller vouches for it, or it is new.
    let inbox = unsafe { object::own(own) }.clone();
    let raw = rdma_cm_id {
        channel: own,
        context,
        ..blank()
    };
    Ok(new(Id::new(&manager, inbox, of.is_null()), raw))
}

/// # Safety
/// The channel is live or NULL, and there is room for the result.
#[no_mangle]
unsafe extern "C" fn rdma_create_id(
    channel: *mut rdma_event_channel,
    to: *mut *mut rdma_cm_id,
    context: *mut c_void,
    space: rdma_port_space,
) -> c_int {
    if space != RDMA_PS_TCP {
        return minus_one(Err(REFUSED));
    }
    // SAFETY: the caller vouches for it.
    minus_one(unsafe { create(channel, context).map(|id| to.write(id)) })
}

/// Destroys an identifier, when all that the program has taken of its events is acknowledged.
///
/// # Safety
/// Nobody uses it any more.
pub(super) unsafe fn destroy(raw: *mut rdma_cm_id) {
    // SAFETY: the caller vouches for it.
    let id = unsafe {
        acknowledge_kept(raw);
        object::own(raw).id.clone()
    };
    id.close();
    id.manager.forget(&id);
    let (inbox, sync) = id.with(|state| (state.inbox.clone(), state.sync));
    inbox.leave(id.number);
    // SAFETY: likewise; a channel of its own nobody else has.
    unsafe {
        if sync {
            rdma_destroy_event_channel((*raw).channel);
        }
        drop(object::take(raw));
    }
}

/// # Safety
/// Its argument came from a function of librdmacm, and has no queue pair.
#[no_mangle]
pub(super) unsafe extern "C" fn rdma_destroy_id(raw: *mut rdma_cm_id) -> c_int {
    // SAFETY: the caller vouches for it.
    unsafe { destroy(raw) };
    0
}

/// Has events of an identifier come to another channel, or if that is NULL to one of its own.
///
/// # Errors
/// `EINVAL` if it has one of its own already; those of [`channel`].
///
/// # Safety
/// Both are live.
pub(super) unsafe fn migrate(raw: *mut rdma_cm_id, to: *mut rdma_event_channel) -> Result<()> {
    let sync = to.is_null();
    // SAFETY: the caller vouches for it.
    let id = unsafe { &object::own(raw).id };
    let (old, was_sync) = id.with(|state| (state.inbox.clone(), state.sync));
    if sync && was_sync {
        return Err(Errno(libc::EINVAL));
    }
    let to = if sync { channel()? } else { to };
    // SAFETY: likewise, or it is new.
    let new = unsafe { object::own(to) };
    if Arc::ptr_eq(new, &old) {
        return Ok(());
    }
    redirect(id, Handle(raw), new, sync);
    // SAFETY: likewise; a channel of its own nobody else has.
    unsafe {
        acknowledge_kept(raw);
        old.leave(id.number);
        let channel = std::mem::replace(&mut (*raw).channel, to);
        if was_sync {
            rdma_destroy_event_channel(channel);
        }
    }
    Ok(())
}

/// Has events come to an inbox, those that nobody has taken yet as well.
fn redirect(id: &Id, raw: Handle<rdma_cm_id>, to: &Arc<Inbox>, sync: bool) {
    to.enter(id.number, raw);
    id.with(|state| {
        for event in state.inbox.withdraw(id.number) {
            // It has just entered.
            let _ = to.tell(id.number, event);
        }
        (state.inbox, state.sync) = (to.clone(), sync);
    });
}

/// # Safety
/// The identifier is live, and the channel is so or NULL.
#[no_mangle]
unsafe extern "C" fn rdma_migrate_id(
    raw: *mut rdma_cm_id,
    channel: *mut rdma_event_channel,
) -> c_int {
    // SAFETY: the caller vouches for it.
    minus_one(unsafe { migrate(raw, channel) })
}

/// Options of identifiers mean nothing here, and those of InfiniBand are not there.
#[no_mangle]
extern "C" fn rdma_set_option(
    _id: *mut rdma_cm_id,
    level: c_int,
    _name: c_int,
    _value: *mut c_void,
    _len: usize,
) -> c_int {
    minus_one(match level as u32 {
        RDMA_OPTION_ID => Ok(()),
        _ => Err(REFUSED),
    })
}
