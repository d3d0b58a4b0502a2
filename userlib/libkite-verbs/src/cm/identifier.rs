// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The functions that make identifiers, destroy them, and have their events come elsewhere.

use std::cell::OnceCell;
use std::ffi::{c_int, c_void};
use std::net::SocketAddr;
use std::sync::Arc;

use super::event::{ack_stored_event, new_event_channel, rdma_destroy_event_channel, CmEventQueue};
use super::id::CmId;
use super::place::{bind_to_device, set_destination, set_source};
use super::CmManager;
use crate::errno::{zero_or_minus_one, Errno, Result};
use crate::header::*;
use crate::object::{self, CStruct, SendPtr};
use crate::unsupported::UNSUPPORTED;

/// What is behind an identifier.
pub(crate) struct CmIdInner {
    pub(super) id: Arc<CmId>,
    /// What queue pairs of those who connect here are made of.
    pub(super) accept_qp_attr: OnceCell<ibv_qp_init_attr>,
}

impl CStruct for rdma_cm_id {
    type Inner = CmIdInner;
}

fn into_raw(id: Arc<CmId>, raw: rdma_cm_id) -> *mut rdma_cm_id {
    let (manager, number) = (id.manager.clone(), id.id);
    let events = id.with_locked(|state| state.events.clone());
    let inner = CmIdInner {
        id: id.clone(),
        accept_qp_attr: OnceCell::new(),
    };
    let raw = object::into_raw(raw, inner);
    events.add_owner(number, SendPtr(raw));
    manager.add_id(&id);
    raw
}

fn default_cm_id() -> rdma_cm_id {
    rdma_cm_id {
        ps: RDMA_PS_TCP,
        qp_type: IBV_QPT_RC,
        ..Default::default()
    }
}

/// The passive end of a connection, whose active end is at the first of two addresses.
pub(super) fn into_raw_passive(id: Arc<CmId>, addrs: [SocketAddr; 2]) -> *mut rdma_cm_id {
    let mut raw = default_cm_id();
    bind_to_device(&mut raw, &id.manager);
    set_destination(&mut raw, addrs[0]);
    set_source(&mut raw, addrs[1]);
    into_raw(id, raw)
}

/// Makes an identifier. One without a channel gets one of its own, and its functions wait for what they begin.
///
/// # Safety
/// The channel is live or NULL.
pub(super) unsafe fn create_id(
    event_channel: *mut rdma_event_channel,
    context: *mut c_void,
) -> Result<*mut rdma_cm_id> {
    let manager = CmManager::get()?;
    let channel_ptr = match event_channel.is_null() {
        true => new_event_channel()?,
        false => event_channel,
    };
    // SAFETY: the caller vouches for it, or it is new.
    let events = unsafe { object::inner(channel_ptr) }.clone();
    let raw = rdma_cm_id {
        channel: channel_ptr,
        context,
        ..default_cm_id()
    };
    Ok(into_raw(
        CmId::new(&manager, events, event_channel.is_null()),
        raw,
    ))
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
        return zero_or_minus_one(Err(UNSUPPORTED));
    }
    // SAFETY: the caller vouches for it.
    zero_or_minus_one(unsafe { create_id(channel, context).map(|id| to.write(id)) })
}

/// Destroys an identifier, when all that the program has taken of its events is acknowledged.
///
/// # Safety
/// Nobody uses it any more.
pub(super) unsafe fn destroy_id(raw: *mut rdma_cm_id) {
    // SAFETY: the caller vouches for it.
    let id = unsafe {
        ack_stored_event(raw);
        object::inner(raw).id.clone()
    };
    id.close();
    id.manager.remove_id(&id);
    let (events, sync) = id.with_locked(|state| (state.events.clone(), state.is_sync));
    events.remove_owner(id.id);
    // SAFETY: likewise; a channel of its own nobody else has.
    unsafe {
        if sync {
            rdma_destroy_event_channel((*raw).channel);
        }
        drop(object::from_raw(raw));
    }
}

/// # Safety
/// Its argument came from a function of librdmacm, and has no queue pair.
#[no_mangle]
pub(super) unsafe extern "C" fn rdma_destroy_id(raw: *mut rdma_cm_id) -> c_int {
    // SAFETY: the caller vouches for it.
    unsafe { destroy_id(raw) };
    0
}

/// Has events of an identifier come to another channel, or if that is NULL to one of its own.
///
/// # Errors
/// `EINVAL` if it has one of its own already; those of [`channel`].
///
/// # Safety
/// Both are live.
pub(super) unsafe fn migrate_id(raw: *mut rdma_cm_id, to: *mut rdma_event_channel) -> Result<()> {
    let sync = to.is_null();
    // SAFETY: the caller vouches for it.
    let id = unsafe { &object::inner(raw).id };
    let (old, was_sync) = id.with_locked(|state| (state.events.clone(), state.is_sync));
    if sync && was_sync {
        return Err(Errno(libc::EINVAL));
    }
    let to = if sync { new_event_channel()? } else { to };
    // SAFETY: likewise, or it is new.
    let new = unsafe { object::inner(to) };
    if Arc::ptr_eq(new, &old) {
        return Ok(());
    }
    redirect_events(id, SendPtr(raw), new, sync);
    // SAFETY: likewise; a channel of its own nobody else has.
    unsafe {
        ack_stored_event(raw);
        old.remove_owner(id.id);
        let channel = std::mem::replace(&mut (*raw).channel, to);
        if was_sync {
            rdma_destroy_event_channel(channel);
        }
    }
    Ok(())
}

/// Has events come to an inbox, those that nobody has taken yet as well.
fn redirect_events(id: &CmId, raw: SendPtr<rdma_cm_id>, to: &Arc<CmEventQueue>, sync: bool) {
    to.add_owner(id.id, raw);
    id.with_locked(|state| {
        for event in state.events.remove_events(id.id) {
            // It has just entered.
            let _ = to.push_event(id.id, event);
        }
        (state.events, state.is_sync) = (to.clone(), sync);
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
    zero_or_minus_one(unsafe { migrate_id(raw, channel) })
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
    zero_or_minus_one(match level as u32 {
        RDMA_OPTION_ID => Ok(()),
        _ => Err(UNSUPPORTED),
    })
}
