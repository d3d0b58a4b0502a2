// SPDX-License-Identifier: GPL-2.0

//! System calls for priorities and rate limits.

use super::{
    args::check_reserved,
    source::{check_net_admin, Requester},
    uapi::UserArray,
    Session,
};
use crate::{
    bindings,
    fabric::qos::{
        limits::{LimitSubject, MaxRates, TenantLimit},
        Qos, QosPolicy,
    },
    sys::deadline::monotonic_ns,
};
use kernel::{prelude::*, sync::Arc};

impl Session {
    fn qos(&self) -> Result<Arc<Qos>> {
        Ok(self.enter_rpc()?.fabric().qos.clone())
    }
}

/// Returns `true` if a priority of the ABI is the low priority.
///
/// # Errors
///
/// - `EINVAL`: unknown priority.
pub(super) fn parse_priority(priority: u32) -> Result<bool> {
    match priority {
        bindings::KITE_PRIORITY_HIGH => Ok(false),
        bindings::KITE_PRIORITY_LOW => Ok(true),
        _ => Err(EINVAL),
    }
}

pub(super) fn set_priority(session: &Session, args: &bindings::kite_priority) -> Result {
    session.rnic()?;
    check_reserved(args.reserved)?;
    session.set_low_priority(parse_priority(args.priority)?)
}

pub(super) fn query_or_set_policy(
    session: &Session,
    mut out: bindings::kite_qos,
) -> Result<bindings::kite_qos> {
    let qos = session.qos()?;
    check_reserved(out.reserved)?;
    match out.flags {
        0 => {}
        bindings::KITE_QOS_SET => {
            let policy = QosPolicy::new(out.policy).ok_or(EINVAL)?;
            check_net_admin()?;
            qos.set_policy(policy);
        }
        _ => return Err(EINVAL),
    }
    out.policy = qos.policy() as u32;
    out.rate = qos.low_rate();
    out.sessions = qos.low_tenants();
    Ok(out)
}

pub(super) fn set_limit(session: &Session, args: &bindings::kite_limit) -> Result {
    let qos = session.qos()?;
    check_reserved(args.reserved)?;
    if args.bytes_used | args.requests_used | args.waits != 0 {
        return Err(EINVAL);
    }
    let subject = match args.subject {
        bindings::KITE_LIMIT_USER => {
            let uid = u32::try_from(args.id).map_err(|_| EINVAL)?;
            LimitSubject::User(Requester::CurrentProcess.to_initial_uid(uid)?)
        }
        bindings::KITE_LIMIT_CGROUP => LimitSubject::Cgroup(args.id),
        _ => return Err(EINVAL),
    };
    let rates = MaxRates {
        bytes: args.bytes,
        requests: args.requests,
    };
    check_net_admin()?;
    qos.limits().set(monotonic_ns(), subject, rates)
}

pub(super) fn list_limits(
    session: &Session,
    mut out: bindings::kite_list_limits,
) -> Result<bindings::kite_list_limits> {
    let qos = session.qos()?;
    check_reserved(out.reserved)?;
    let user_array = UserArray::new(out.limits);
    let (capacity, mut count) = (out.count, 0);
    while let Some(limit) = qos.limits().nth(count as usize) {
        if count < capacity {
            user_array.write(count as usize, limit_to_abi(&limit))?;
        }
        count += 1;
    }
    out.count = count;
    Ok(out)
}

fn limit_to_abi(limit: &TenantLimit) -> bindings::kite_limit {
    let (rates, used) = limit.describe();
    let (subject, id) = match limit.subject {
        LimitSubject::User(uid) => {
            let uid = Requester::CurrentProcess.to_local_uid(uid);
            (bindings::KITE_LIMIT_USER, uid.into())
        }
        LimitSubject::Cgroup(id) => (bindings::KITE_LIMIT_CGROUP, id),
    };
    bindings::kite_limit {
        subject,
        reserved: 0,
        id,
        bytes: rates.bytes,
        requests: rates.requests,
        bytes_used: used.bytes,
        requests_used: used.requests,
        waits: used.throttled,
    }
}
