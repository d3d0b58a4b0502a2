// SPDX-License-Identifier: GPL-2.0

//! The requests about priorities and limits.

use super::{abi::UserArray, caller::check_admin, request::zero, Session};
use crate::{
    bindings,
    fabric::qos::{
        limits::{Limit, Rates, Whom},
        Policy, Qos,
    },
    sys::deadline::now,
};
use kernel::{prelude::*, sync::Arc};

impl Session {
    fn qos(&self) -> Result<Arc<Qos>> {
        Ok(self.rpc()?.lmr.cluster.fabric.qos.clone())
    }
}

/// Whether a number of the ABI is that of low priority.
///
/// # Errors
///
/// `EINVAL` if it is none.
pub(super) fn is_low(priority: u32) -> Result<bool> {
    match priority {
        bindings::KITE_PRIORITY_HIGH => Ok(false),
        bindings::KITE_PRIORITY_LOW => Ok(true),
        _ => Err(EINVAL),
    }
}

pub(super) fn priority(session: &Session, wanted: &bindings::kite_priority) -> Result {
    session.rnic()?;
    zero(wanted.reserved)?;
    session.set_low(is_low(wanted.priority)?)
}

pub(super) fn policy(session: &Session, mut out: bindings::kite_qos) -> Result<bindings::kite_qos> {
    let qos = session.qos()?;
    zero(out.reserved)?;
    match out.flags {
        0 => {}
        bindings::KITE_QOS_SET => {
            let policy = Policy::new(out.policy).ok_or(EINVAL)?;
            check_admin()?;
            qos.set_policy(policy);
        }
        _ => return Err(EINVAL),
    }
    out.policy = qos.policy() as u32;
    out.rate = qos.low_rate();
    out.sessions = qos.low_tenants();
    Ok(out)
}

pub(super) fn limit(session: &Session, wanted: &bindings::kite_limit) -> Result {
    let qos = session.qos()?;
    zero(wanted.reserved)?;
    if wanted.bytes_used | wanted.requests_used | wanted.waits != 0 {
        return Err(EINVAL);
    }
    let whom = match wanted.whom {
        bindings::KITE_LIMIT_USER => Whom::User(u32::try_from(wanted.id).map_err(|_| EINVAL)?),
        bindings::KITE_LIMIT_CGROUP => Whom::Cgroup(wanted.id),
        _ => return Err(EINVAL),
    };
    let rates = Rates {
        bytes: wanted.bytes,
        requests: wanted.requests,
    };
    check_admin()?;
    qos.limits().set(now(), whom, rates)
}

pub(super) fn limits(
    session: &Session,
    mut out: bindings::kite_limits,
) -> Result<bindings::kite_limits> {
    let qos = session.qos()?;
    zero(out.reserved)?;
    let user = UserArray::new(out.limits);
    let (room, mut count) = (out.count, 0);
    while let Some(limit) = qos.limits().nth(count as usize) {
        if count < room {
            user.write(count as usize, describe(&limit))?;
        }
        count += 1;
    }
    out.count = count;
    Ok(out)
}

fn describe(limit: &Limit) -> bindings::kite_limit {
    let (rates, used) = limit.describe();
    let (whom, id) = match limit.whom {
        Whom::User(user) => (bindings::KITE_LIMIT_USER, user.into()),
        Whom::Cgroup(id) => (bindings::KITE_LIMIT_CGROUP, id),
    };
    bindings::kite_limit {
        whom,
        reserved: 0,
        id,
        bytes: rates.bytes,
        requests: rates.requests,
        bytes_used: used.bytes,
        requests_used: used.requests,
        waits: used.waits,
    }
}
