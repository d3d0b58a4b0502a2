// SPDX-License-Identifier: GPL-2.0

//! System calls for the session itself, for RNICs, and for the membership of the cluster.

use crate::{
    bindings, errno,
    fabric::qos::limits::TenantCreds,
    rnic::{self, Caller},
    session::{
        args::check_reserved,
        source,
        uapi::{self, UserArray},
        Session,
    },
    sys::deadline::Deadline,
};
use kernel::prelude::*;
use kite_core::{view::NodeInstance, wire};

const _: () = assert!(wire::FEATURE_RENAME == bindings::KITE_FEATURE_RENAME as u64);

pub(super) fn bind(
    session: &Session,
    mut bind: bindings::kite_bind,
) -> Result<bindings::kite_bind> {
    check_reserved(bind.reserved)?;
    if bind.version != bindings::KITE_ABI_VERSION {
        return Err(errno::protonosupport());
    }
    let requested = bind.rnic;
    let len = requested
        .iter()
        .position(|&byte| byte == 0)
        .ok_or_else(errno::nametoolong)?;
    let rnic = rnic::find(&requested[..len], Caller::Process)?;
    session.bind(
        rnic.clone(),
        Some(TenantCreds::current(source::current_euid())?),
    )?;
    bind.rnic = rnic.name();
    Ok(bind)
}

pub(super) fn get_stats(
    session: &Session,
    mut args: bindings::kite_get_stats,
) -> Result<bindings::kite_get_stats> {
    check_reserved(args.reserved)?;
    let stats = session.rnic()?.stats.snapshot();
    uapi::write_extensible(args.stats, args.size, &stats)?;
    args.size = size_of::<bindings::kite_stats>() as u32;
    Ok(args)
}

pub(super) fn next_event(session: &Session) -> Result<bindings::kite_event> {
    let rnic = session.rnic()?;
    // After RNIC removal `EAGAIN` would make a daemon wait forever, or spin on `POLLHUP`.
    let none_error = if rnic.is_removed() { ENODEV } else { EAGAIN };
    let (kind, value) = session.next_event().ok_or(none_error)?;
    Ok(bindings::kite_event {
        kind,
        reserved: 0,
        value,
    })
}

pub(super) fn query_view(
    session: &Session,
    mut nodes: bindings::kite_get_view,
) -> Result<bindings::kite_get_view> {
    let (epoch, node, members) = session.enter_memory_service()?.cluster.view()?;
    let user_array = UserArray::new(nodes.members);
    for (i, member) in members.iter().take(nodes.count as usize).enumerate() {
        user_array.write(i, *member)?;
    }
    nodes.count = members.len() as u32;
    nodes.epoch = epoch;
    nodes.self_ = node;
    Ok(nodes)
}

pub(super) fn query_rnic(mut out: bindings::kite_query_rnic) -> Result<bindings::kite_query_rnic> {
    let rnic = rnic::nth(out.index as usize).ok_or(ENOENT)?;
    let (address, active) = rnic.address()?;
    out.active = active.into();
    out.name = rnic.name();
    out.address = address;
    out.has_dc = rnic
        .enter_rpc()?
        .memory_service
        .cluster
        .fabric
        .dc()
        .is_some()
        .into();
    out.wire_version = wire::VERSION.into();
    out.features = wire::FEATURES;
    Ok(out)
}

pub(super) fn join(session: &Session, join: &bindings::kite_join) -> Result {
    source::check_net_admin()?;
    let memory_service = session.enter_memory_service()?;
    memory_service.cluster.join(join)?;
    memory_service
        .cluster
        .fabric
        .suspect_listener
        .set_counter(Some(session.events.clone()));
    session.mark_as_daemon();
    Ok(())
}

pub(super) fn set_view(session: &Session, view: bindings::kite_set_view) -> Result {
    check_reserved(view.reserved)?;
    let services = session.enter_services()?;
    if !session.is_daemon() {
        return Err(EPERM);
    }
    if view.count == 0 || view.count > bindings::KITE_NODES_MAX {
        return Err(EINVAL);
    }
    let members: KVec<bindings::kite_member> =
        UserArray::new(view.members).read_all(view.count as usize)?;
    for member in &members {
        let address = &member.address;
        check_reserved(member.reserved | u32::from(address.reserved) | address.reserved2)?;
    }
    let result = session
        .enter_memory_service()?
        .set_view(view.epoch, &members);
    services.on_view_change();
    result
}

pub(super) fn probe(session: &Session, probe: &bindings::kite_probe) -> Result {
    source::check_net_admin()?;
    let memory_service = session.enter_memory_service()?;
    let timeout_ms = probe.timeout_ms;
    if timeout_ms == 0 || timeout_ms > bindings::KITE_PROBE_TIMEOUT_MS_MAX {
        return Err(EINVAL);
    }
    let instance = NodeInstance {
        node: probe.node,
        incarnation: probe.incarnation,
    };
    memory_service.probe(instance, Deadline::after_ms(timeout_ms))
}
