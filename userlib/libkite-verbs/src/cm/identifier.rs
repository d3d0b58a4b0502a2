// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The functions that make identifiers, and give them an address here and one there.

use std::cell::OnceCell;
use std::ffi::{c_int, c_void};
use std::net::{IpAddr, SocketAddr};
use std::ptr;
use std::sync::Arc;

use super::event::{acknowledge_kept, channel, complete, rdma_destroy_event_channel, Event};
use super::id::{Id, Phase};
use super::{address, Manager};
use crate::errno::{minus_one, Errno, Result};
use crate::header::*;
use crate::object::{self, Handle, Raw};
use crate::query::PORT;
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

/// Has an identifier lead to the device.
fn bind_to_device(raw: &mut rdma_cm_id, manager: &Manager) {
    raw.verbs = manager.verbs.0;
    raw.port_num = PORT;
    if raw.pd.is_null() {
        raw.pd = manager.domain.0;
    }
}

fn set_source(raw: &mut rdma_cm_id, to: SocketAddr) {
    // SAFETY: each field of the union is as long as any address.
    address::write(
        unsafe { &mut raw.route.addr.__bindgen_anon_1.src_storage },
        to,
    );
}

fn set_destination(raw: &mut rdma_cm_id, to: SocketAddr) {
    // SAFETY: likewise.
    address::write(
        unsafe { &mut raw.route.addr.__bindgen_anon_2.dst_storage },
        to,
    );
}

/// Where an identifier is, and where its other end is.
///
/// # Safety
/// It is live.
pub(super) unsafe fn ends(raw: *mut rdma_cm_id) -> [Option<SocketAddr>; 2] {
    // SAFETY: the caller vouches for it, and there is room for any address.
    unsafe {
        let addr = &(*raw).route.addr;
        let source = ptr::from_ref(&addr.__bindgen_anon_1).cast();
        let destination = ptr::from_ref(&addr.__bindgen_anon_2).cast();
        [source, destination].map(|end| address::read(end).ok().flatten())
    }
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
    drop(inbox.leave(id.number));
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
/// # Safety
/// Both are live.
pub(super) unsafe fn migrate(raw: *mut rdma_cm_id, to: *mut rdma_event_channel) -> Result<()> {
    let sync = to.is_null();
    let to = if sync { channel()? } else { to };
    // SAFETY: the caller vouches for it.
    let (id, new) = unsafe { (&object::own(raw).id, object::own(to).clone()) };
    new.enter(id.number, Handle(raw));
    let (old, was_sync) = id.with(|state| {
        for event in state.inbox.withdraw(id.number) {
            let _ = new.tell(id.number, event);
        }
        let old = std::mem::replace(&mut state.inbox, new);
        (old, std::mem::replace(&mut state.sync, sync))
    });
    // SAFETY: likewise; a channel of its own nobody else has.
    unsafe {
        acknowledge_kept(raw);
        drop(old.leave(id.number));
        let channel = std::mem::replace(&mut (*raw).channel, to);
        if was_sync {
            rdma_destroy_event_channel(channel);
        }
    }
    Ok(())
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

/// Gives an identifier an address of this node, and a port.
fn bind(raw: &mut rdma_cm_id, id: &Id, to: SocketAddr) -> Result<()> {
    if !address::is_own(to.ip()) {
        return Err(Errno(libc::EADDRNOTAVAIL));
    }
    let port = id.with(|state| match (state.phase, &state.port) {
        (Phase::Idle, None) => state.take_port(&id.manager, to.port()),
        _ => Err(Errno(libc::EINVAL)),
    })?;
    set_source(raw, SocketAddr::new(to.ip(), port));
    if !to.ip().is_unspecified() {
        bind_to_device(raw, &id.manager);
    }
    Ok(())
}

/// # Safety
/// The identifier is live, and the address is as long as its family says.
#[no_mangle]
pub(super) unsafe extern "C" fn rdma_bind_addr(raw: *mut rdma_cm_id, addr: *mut sockaddr) -> c_int {
    // SAFETY: the caller vouches for it.
    let bind = || unsafe {
        let to = address::read(addr)?.ok_or(Errno(libc::EINVAL))?;
        bind(&mut *raw, &object::own(raw).id, to)
    };
    minus_one(bind())
}

/// The address is looked up at once, so it does not matter how long that may take.
///
/// # Safety
/// The identifier is live, and the addresses are as long as their families say; the first may be NULL.
#[no_mangle]
pub(super) unsafe extern "C" fn rdma_resolve_addr(
    raw: *mut rdma_cm_id,
    from: *mut sockaddr,
    to: *mut sockaddr,
    _timeout_ms: c_int,
) -> c_int {
    // SAFETY: the caller vouches for it.
    let resolve = || unsafe {
        let from = address::read(from)?;
        let to = address::read(to)?.ok_or(Errno(libc::EINVAL))?;
        resolve(raw, from, to)?;
        complete(raw)
    };
    minus_one(resolve())
}

/// # Safety
/// The identifier is live.
unsafe fn resolve(raw: *mut rdma_cm_id, from: Option<SocketAddr>, to: SocketAddr) -> Result<()> {
    // SAFETY: the caller vouches for it.
    let (id, [bound, _]) = unsafe { (&object::own(raw).id, ends(raw)) };
    let source = known(from.map(|from| from.ip())).or(known(bound.map(|bound| bound.ip())));
    let source = source.unwrap_or_else(|| address::source(to));
    // SAFETY: likewise.
    let raw = unsafe { &mut *raw };
    match bound {
        Some(bound) => set_source(raw, SocketAddr::new(source, bound.port())),
        None => bind(
            raw,
            id,
            SocketAddr::new(source, from.map_or(0, |from| from.port())),
        )?,
    }
    set_destination(raw, to);
    bind_to_device(raw, &id.manager);
    let found = address::node(&id.manager.cluster, to.ip());
    id.with(|state| {
        if state.phase != Phase::Idle {
            return Err(Errno(libc::EINVAL));
        }
        let event = match found {
            Ok(node) => {
                (state.phase, state.node) = (Phase::Resolved, node);
                Event::new(RDMA_CM_EVENT_ADDR_RESOLVED, 0)
            }
            Err(errno) => Event::new(RDMA_CM_EVENT_ADDR_ERROR, -errno.0),
        };
        state.tell(id, event);
        Ok(())
    })
}

/// An address that is not any.
fn known(ip: Option<IpAddr>) -> Option<IpAddr> {
    ip.filter(|ip| !ip.is_unspecified())
}

/// # Safety
/// The identifier is live.
#[no_mangle]
pub(super) unsafe extern "C" fn rdma_resolve_route(
    raw: *mut rdma_cm_id,
    _timeout_ms: c_int,
) -> c_int {
    // SAFETY: the caller vouches for it.
    let id = unsafe { &object::own(raw).id };
    let resolved = id.with(|state| {
        if state.phase != Phase::Resolved {
            return Err(Errno(libc::EINVAL));
        }
        state.phase = Phase::Routed;
        state.tell(id, Event::new(RDMA_CM_EVENT_ROUTE_RESOLVED, 0));
        Ok(())
    });
    // SAFETY: likewise.
    minus_one(resolved.and_then(|()| unsafe { complete(raw) }))
}

/// Whoever has asked and is not accepted yet counts among the connections of a process, and nothing else limits them.
///
/// # Safety
/// The identifier is live.
#[no_mangle]
unsafe extern "C" fn rdma_listen(raw: *mut rdma_cm_id, _backlog: c_int) -> c_int {
    // SAFETY: the caller vouches for it.
    let id = unsafe { &object::own(raw).id };
    let any = SocketAddr::from(([0, 0, 0, 0], 0));
    let is_bound = id.with(|state| state.port.is_some());
    let bound = match is_bound {
        true => Ok(()),
        // SAFETY: likewise.
        false => bind(unsafe { &mut *raw }, id, any),
    };
    minus_one(bound.and_then(|()| {
        id.with(|state| match state.phase {
            Phase::Idle | Phase::Listening => {
                state.phase = Phase::Listening;
                Ok(())
            }
            _ => Err(Errno(libc::EINVAL)),
        })
    }))
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
