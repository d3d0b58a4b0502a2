// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `kite qos` and `kite limit`: QoS policy and rate limits.

use anyhow::{Context, Result};
use kite::{Cluster, LimitSubject, LimitUsage, QosPolicy};
use serde::Serialize;

use crate::args::LimitArgs;
use crate::output::{print_json, print_line};
use crate::users::{self, WithUserName};

/// Sets the QoS policy if one is given, and prints the policy.
pub(crate) fn show_or_set_policy(
    cluster: &Cluster,
    policy: Option<QosPolicy>,
    json: bool,
) -> Result<()> {
    if let Some(policy) = policy {
        let set = cluster.set_qos_policy(policy);
        set.with_context(|| format!("setting the policy {policy}"))?;
    }
    let qos = cluster.qos()?;
    if json {
        return print_json(&qos);
    }
    let rate = qos
        .rate
        .map_or("unlimited".into(), |rate| format!("{rate} B/s"));
    print_line(format_args!("policy:                {}", qos.policy))?;
    print_line(format_args!("low-priority sessions: {}", qos.sessions))?;
    print_line(format_args!("low-priority rate:     {rate}"))
}

/// Rate limit of one subject, for JSON.
#[derive(Serialize)]
struct LimitEntry {
    subject: LimitSubject,
    limit: kite::RateLimit,
    used: LimitUsage,
}

/// Sets a limit, or prints all limits.
pub(crate) fn show_or_set_limit(cluster: &Cluster, args: &LimitArgs) -> Result<()> {
    let Some(subject) = subject_from_args(args)? else {
        return print_limits(cluster, args.numeric, args.json);
    };
    let limit = kite::RateLimit {
        bytes: args.bytes,
        requests: args.requests,
    };
    let set = cluster.set_limit(subject, limit);
    set.with_context(|| format!("limiting {subject}"))
}

fn subject_from_args(args: &LimitArgs) -> Result<Option<LimitSubject>> {
    let Some(directory) = &args.cgroup else {
        return Ok(args.user.map(LimitSubject::User));
    };
    let subject = LimitSubject::from_cgroup_dir(directory);
    let subject = subject.with_context(|| format!("reading the cgroup {}", directory.display()))?;
    Ok(Some(subject))
}

/// Returns the number of the user that a limit applies to, if it applies to a user.
fn subject_uid(subject: LimitSubject) -> Option<u32> {
    match subject {
        LimitSubject::User(uid) => Some(uid),
        _ => None,
    }
}

fn print_limits(cluster: &Cluster, numeric: bool, json: bool) -> Result<()> {
    let limits = cluster.limits()?;
    if json {
        let entry = |(subject, limit, used)| {
            WithUserName::new(
                LimitEntry {
                    subject,
                    limit,
                    used,
                },
                subject_uid(subject),
            )
        };
        let entries: Vec<_> = limits.into_iter().map(entry).collect();
        return print_json(&entries);
    }
    print_line(format_args!(
        "{:24}{:>16}{:>14}{:>20}{:>14}{:>12}",
        "SUBJECT", "BYTES/S", "REQUESTS/S", "BYTES", "REQUESTS", "THROTTLED"
    ))?;
    let rate = |rate: Option<u64>| rate.map_or("unlimited".into(), |rate| rate.to_string());
    for (subject, limit, used) in limits {
        let label = match subject_uid(subject) {
            Some(uid) => format!("user {}", users::display_name(uid, numeric)),
            None => subject.to_string(),
        };
        print_line(format_args!(
            "{:24}{:>16}{:>14}{:>20}{:>14}{:>12}",
            label,
            rate(limit.bytes),
            rate(limit.requests),
            used.bytes,
            used.requests,
            used.throttled
        ))?;
    }
    Ok(())
}
