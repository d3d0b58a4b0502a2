// SPDX-License-Identifier: GPL-2.0 OR MIT
//! C functions that create, destroy and migrate communication identifiers.

use std::cell::OnceCell;
use std::ffi::{c_int, c_void};
use std::net::SocketAddr;
use std::sync::Arc;

use super::address::{set_destination, set_source};
use super::cm_id::CmId;
use super::event::{ack_stored_event, new_event_channel, rdma_destroy_event_channel, CmEventQueue};
use super::CmManager;
use crate::errno::{zero_or_minus_one, Errno, Result};
use crate::header::*;
use crate::limits::PORT_NUM;
use crate::object::{self, CStruct, SendPtr};
use crate::unsupported::UNSUPPORTED;

/// Private data of an identifier.
pub(crate) struct CmIdInner {
    pub(super) id: Arc<CmId>,
    /// Attributes for the QPs of accepted connections.
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

/// Sets device, port and domain of an identifier.
pub(super) fn bind_to_device(raw: &mut rdma_cm_id, manager: &CmManager) {
    raw.verbs = manager.verbs.0;
    raw.port_num = PORT_NUM;
    if raw.pd.is_null() {
        raw.pd = manager.pd.0;
    }
}

/// Creates the passive end of a connection. The active end is at the first address.
pub(super) fn into_raw_passive(id: Arc<CmId>, addrs: [SocketAddr; 2]) -> *mut rdma_cm_id {
    let mut raw = default_cm_id();
    bind_to_device(&mut raw, &id.manager);
    set_destination(&mut raw, addrs[0]);
    set_source(&mut raw, addrs[1]);
    into_raw(id, raw)
}

/// Creates an identifier. Without a channel it gets one of its own, and is synchronous.
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
    // SAFETY: guaranteed by the caller, or the channel is new.
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
/// The channel is live or NULL, and the result may be written.
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
    // SAFETY: guaranteed by the caller.
    zero_or_minus_one(unsafe { create_id(channel, context).map(|id| to.write(id)) })
}

/// Destroys an identifier, after the program has acknowledged all of its events.
///
/// # Safety
/// The identifier is not used afterwards.
pub(super) unsafe fn destroy_id(raw: *mut rdma_cm_id) {
    // SAFETY: guaranteed by the caller.
    let id = unsafe {
        ack_stored_event(raw);
        object::inner(raw).id.clone()
    };
    id.close();
    id.manager.remove_id(&id);
    let (events, sync) = id.with_locked(|state| (state.events.clone(), state.is_sync));
    events.remove_owner(id.id);
    // SAFETY: likewise; the channel of a synchronous identifier has no other user.
    unsafe {
        if sync {
            rdma_destroy_event_channel((*raw).channel);
        }
        drop(object::from_raw(raw));
    }
}

/// # Safety
/// The identifier comes from a function of librdmacm, and has no QP.
#[no_mangle]
pub(super) unsafe extern "C" fn rdma_destroy_id(raw: *mut rdma_cm_id) -> c_int {
    // SAFETY: guaranteed by the caller.
    unsafe { destroy_id(raw) };
    0
}

/// Moves the events of an identifier to another channel, or to one of its own if that is NULL.
///
/// # Errors
/// `EINVAL` if it has a channel of its own already, or see [`new_event_channel`].
///
/// # Safety
/// The identifier is live, and the channel is live or NULL.
pub(super) unsafe fn migrate_id(raw: *mut rdma_cm_id, to: *mut rdma_event_channel) -> Result<()> {
    let sync = to.is_null();
    // SAFETY: guaranteed by the caller.
    let id = unsafe { &object::inner(raw).id };
    let (old, was_sync) = id.with_locked(|state| (state.events.clone(), state.is_sync));
    if sync && was_sync {
        return Err(Errno(libc::EINVAL));
    }
    let to = if sync { new_event_channel()? } else { to };
    // SAFETY: likewise, or the channel is new.
    let new = unsafe { object::inner(to) };
    if Arc::ptr_eq(new, &old) {
        return Ok(());
    }
    redirect_events(id, SendPtr(raw), new, sync);
    // SAFETY: likewise; the channel of a synchronous identifier has no other user.
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

/// Redirects events to another queue, including those that were not taken yet.
fn redirect_events(id: &CmId, raw: SendPtr<rdma_cm_id>, to: &Arc<CmEventQueue>, sync: bool) {
    to.add_owner(id.id, raw);
    id.with_locked(|state| {
        for event in state.events.remove_events(id.id) {
            // Cannot fail, since the owner was added above.
            let _ = to.push_event(id.id, event);
        }
        (state.events, state.is_sync) = (to.clone(), sync);
    });
}

/// # Safety
/// The identifier is live, and the channel is live or NULL.
#[no_mangle]
unsafe extern "C" fn rdma_migrate_id(
    raw: *mut rdma_cm_id,
    channel: *mut rdma_event_channel,
) -> c_int {
    // SAFETY: guaranteed by the caller.
    zero_or_minus_one(unsafe { migrate_id(raw, channel) })
}

/// Ignores options of identifiers. Options of InfiniBand are not supported.
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
