// SPDX-License-Identifier: GPL-2.0

//! System calls for virtual queue pairs (VQPs) and registered memory regions (MRs).

use crate::{
    bindings,
    session::{
        args::{
            check_pop_count, check_push_count, check_reserved, deadline, parse_pop_message,
            parse_rights, wait_until,
        },
        source::{self, Requester},
        uapi::{self, UserArray},
        Session,
    },
    sys::deadline::Deadline,
};
use kernel::prelude::*;

pub(super) fn register_mr(
    session: &Session,
    mut memory: bindings::kite_reg_mr,
) -> Result<bindings::kite_reg_mr> {
    let other_rights = parse_rights(memory.other_rights)?;
    memory.key = session.register_user_mr(memory.addr, memory.len, other_rights)?;
    Ok(memory)
}

pub(super) fn connect(
    session: &Session,
    mut connect: bindings::kite_connect,
) -> Result<bindings::kite_connect> {
    check_reserved(connect.reserved)?;
    let deadline = deadline(connect.timeout_ms).interruptible();
    let owners = (source::current_uid(), parse_required_owner(&connect)?);
    connect.vqp = session.connect((connect.node, connect.port), owners, deadline)?;
    Ok(connect)
}

/// Returns the UID, in the initial user namespace, of the required user of the listener.
fn parse_required_owner(connect: &bindings::kite_connect) -> Result<Option<u32>> {
    match (connect.flags, connect.owner, connect.port) {
        (0, 0, _) => Ok(None),
        (0, ..) | (_, _, 0) => Err(EINVAL),
        (bindings::KITE_CONNECT_OWNER, owner, _) => {
            Requester::CurrentProcess.to_initial_uid(owner).map(Some)
        }
        _ => Err(EINVAL),
    }
}

pub(super) fn listen(
    session: &Session,
    mut listen: bindings::kite_listen,
) -> Result<bindings::kite_listen> {
    check_reserved(listen.reserved)?;
    listen.listener = session.listen(listen.port, source::current_uid())?;
    Ok(listen)
}

pub(super) fn accept_vqp(
    session: &Session,
    mut accept: bindings::kite_accept,
) -> Result<bindings::kite_accept> {
    session.rnic()?;
    let wait_until = wait_until(accept.flags, accept.timeout_ms)?.map(Deadline::interruptible);
    (accept.vqp, accept.node, accept.uid) = session.accept(accept.listener, wait_until)?;
    accept.uid = Requester::CurrentProcess.to_local_uid(accept.uid);
    Ok(accept)
}

pub(super) fn pop_message(
    session: &Session,
    mut pop: bindings::kite_pop_message,
) -> Result<bindings::kite_pop_message> {
    session.rnic()?;
    let wait_until = parse_pop_message(&pop)?.map(Deadline::interruptible);
    session.pop_message_into(&mut pop, wait_until)?;
    Ok(pop)
}

pub(super) fn push(session: &Session, push: &bindings::kite_push) -> Result {
    session.rnic()?;
    let count = check_push_count(push.count)?;
    let wrs = UserArray::new(push.wrs);
    let deadline = deadline(push.timeout_ms).interruptible();
    session.push(
        push.vqp,
        count,
        |i| wrs.read(i),
        source::current_uid(),
        deadline,
    )
}

pub(super) fn pop(session: &Session, mut pop: bindings::kite_pop) -> Result<bindings::kite_pop> {
    check_reserved(pop.reserved)?;
    session.rnic()?;
    let count = check_pop_count(pop.count)?;
    let wait_until = wait_until(pop.flags, pop.timeout_ms)?.map(Deadline::interruptible);
    let popped = session.pop(pop.vqp, count, wait_until)?;
    let user_array = UserArray::new(pop.completions);
    for (i, (tag, result)) in popped.iter().enumerate() {
        user_array.write(i, uapi::cqe(*tag, result.map(|()| 0)))?;
    }
    pop.count = popped.len() as u32;
    Ok(pop)
}

pub(super) fn list_vqps(
    session: &Session,
    mut out: bindings::kite_list_vqps,
) -> Result<bindings::kite_list_vqps> {
    check_reserved(out.reserved)?;
    session.rnic()?;
    let vqp_infos = session.list_vqps()?;
    let user_array = UserArray::new(out.vqps);
    for (i, vqp_info) in vqp_infos.iter().take(out.count as usize).enumerate() {
        let uid = Requester::CurrentProcess.to_local_uid(vqp_info.uid);
        user_array.write(i, bindings::kite_vqp_info { uid, ..*vqp_info })?;
    }
    out.count = vqp_infos.len() as u32;
    Ok(out)
}
