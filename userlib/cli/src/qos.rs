// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `kite qos` and `kite limit`: who goes first, and how fast.

use anyhow::{Context, Result};
use kite::{Cluster, QosPolicy, Used, Whom};
use serde::Serialize;

use crate::args::Limit;
use crate::users::{self, Named};
use crate::{say, say_json};

/// Shows how requests of low priority give way; before, sets it.
pub(crate) fn policy(cluster: &Cluster, policy: Option<QosPolicy>, json: bool) -> Result<()> {
    if let Some(policy) = policy {
        let set = cluster.set_qos_policy(policy);
        set.with_context(|| format!("setting the policy {policy}"))?;
    }
    let qos = cluster.qos()?;
    if json {
        return say_json(&qos);
    }
    let rate = qos.rate.map_or("any".into(), |rate| format!("{rate} B/s"));
    say(format_args!("policy:           {}", qos.policy))?;
    say(format_args!("low priority:     {} sessions", qos.sessions))?;
    say(format_args!("they may have:    {rate}"))
}

/// A limit, as JSON has it.
#[derive(Serialize)]
struct Entry {
    whom: Whom,
    limit: kite::Limit,
    used: Used,
}

/// Sets a limit, or shows all.
pub(crate) fn limit(cluster: &Cluster, wanted: &Limit) -> Result<()> {
    let Some(whom) = whom(wanted)? else {
        return list(cluster, wanted.numeric, wanted.json);
    };
    let limit = kite::Limit {
        bytes: wanted.bytes,
        requests: wanted.requests,
    };
    let set = cluster.set_limit(whom, limit);
    set.with_context(|| format!("limiting {whom}"))
}

fn whom(wanted: &Limit) -> Result<Option<Whom>> {
    let Some(directory) = &wanted.cgroup else {
        return Ok(wanted.user.map(Whom::User));
    };
    let whom = Whom::cgroup(directory);
    let whom = whom.with_context(|| format!("looking at {}", directory.display()))?;
    Ok(Some(whom))
}

/// Returns the number of the user that a limit is for, if it is for one.
fn user(whom: Whom) -> Option<u32> {
    match whom {
        Whom::User(uid) => Some(uid),
        _ => None,
    }
}

fn list(cluster: &Cluster, numeric: bool, json: bool) -> Result<()> {
    let limits = cluster.limits()?;
    if json {
        let entry = |(whom, limit, used)| Named::new(Entry { whom, limit, used }, user(whom));
        let entries: Vec<_> = limits.into_iter().map(entry).collect();
        return say_json(&entries);
    }
    say(format_args!(
        "{:24}{:>16}{:>14}{:>20}{:>14}{:>12}",
        "WHOM", "BYTES/S", "REQUESTS/S", "BYTES", "REQUESTS", "WAITS"
    ))?;
    let rate = |rate: Option<u64>| rate.map_or("any".into(), |rate| rate.to_string());
    for (whom, limit, used) in limits {
        let whom = match user(whom) {
            Some(uid) => format!("user {}", users::shown(uid, numeric)),
            None => whom.to_string(),
        };
        say(format_args!(
            "{:24}{:>16}{:>14}{:>20}{:>14}{:>12}",
            whom,
            rate(limit.bytes),
            rate(limit.requests),
            used.bytes,
            used.requests,
            used.waits
        ))?;
    }
    Ok(())
}
