// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `kite status --check`: health of this node in one line and an exit status, for monitoring.
//!
//! A suspected peer does not degrade the health. The device reports suspicion as an event to sessions that are open at
//! that time, and keeps no state. The peer stays in the view until the daemon removes it.

use std::process::ExitCode;

use anyhow::{Context, Result};
use kite::{Cluster, View};

use crate::output::print_line;

/// Health of kite on this node. The value is the exit status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Health {
    /// In a cluster, with an active port.
    Ok = 0,
    /// In a cluster, but the port is down, a member is unreachable, or the membership is frozen.
    Degraded = 1,
    /// Not usable.
    Down = 2,
}

/// Prints the health of this node in one line. Returns the exit status.
pub(crate) fn run(rnic: &str) -> ExitCode {
    let (health, text) =
        read_health(rnic).unwrap_or_else(|error| (Health::Down, format!("{error:#}")));
    let label = match health {
        Health::Ok => "ok",
        Health::Degraded => "degraded",
        Health::Down => "down",
    };
    // The exit status reports the health also if standard output is closed.
    let _ = print_line(format_args!("{label}: {text}"));
    ExitCode::from(health as u8)
}

fn read_health(rnic: &str) -> Result<(Health, String)> {
    let cluster = Cluster::open_rnic(rnic)?;
    let rnics = cluster.rnics()?;
    let used = rnics.iter().find(|rnic| rnic.name == cluster.rnic_name());
    let used = used.with_context(|| format!("{}: removed", cluster.rnic_name()))?;
    let health = assess(&used.name, used.active, &cluster.view()?);
    Ok(with_frozen(health, cluster.frozen_reason()))
}

/// Adds the reason for which the membership is frozen.
fn with_frozen((health, text): (Health, String), reason: Option<String>) -> (Health, String) {
    match (health, reason) {
        (Health::Ok | Health::Degraded, Some(reason)) => (
            Health::Degraded,
            format!("{text}, membership frozen: {reason}"),
        ),
        _ => (health, text),
    }
}

/// Derives the health from the name and port state of the RNIC, and the view of the cluster.
fn assess(name: &str, active: bool, view: &View) -> (Health, String) {
    let (own, epoch, count) = (view.local_node, view.epoch, view.members.len());
    if epoch == 0 {
        return (Health::Down, format!("{name}: {}", kite::Error::NotJoined));
    }
    let port = if active { "active" } else { "down" };
    let text = format!("{name}: port {port}, node {own} of {count}, epoch {epoch}");
    let unreachable = view.members.iter().filter(|m| !m.is_reachable());
    let unreachable: Vec<_> = unreachable.map(|m| m.node.to_string()).collect();
    match (active, unreachable.is_empty()) {
        (true, true) => (Health::Ok, text),
        (false, true) => (Health::Degraded, text),
        (_, false) => (
            Health::Degraded,
            format!("{text}, unreachable: {}", unreachable.join(" ")),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nodes::example_member;

    #[test]
    fn health_is_derived_from_port_state_and_view() {
        let not_joined = kite::Error::NotJoined.to_string();
        for (active, epoch, health, text) in [
            (true, 3, Health::Ok, "port active, node 1 of 0, epoch 3"),
            (
                false,
                3,
                Health::Degraded,
                "port down, node 1 of 0, epoch 3",
            ),
            (true, 0, Health::Down, &not_joined),
            (false, 0, Health::Down, &not_joined),
        ] {
            let view = View {
                epoch,
                local_node: 1,
                members: Vec::new(),
            };
            assert_eq!(assess("r", active, &view), (health, format!("r: {text}")));
        }
    }

    #[test]
    fn unreachable_members_degrade_the_health() {
        let view = View {
            epoch: 9,
            local_node: 1,
            members: [(1, 0), (2, 5), (3, 9)]
                .map(|(node, since)| example_member(node, since))
                .to_vec(),
        };
        for (active, port) in [(true, "active"), (false, "down")] {
            let text = format!("r: port {port}, node 1 of 3, epoch 9, unreachable: 2 3");
            assert_eq!(assess("r", active, &view), (Health::Degraded, text));
        }
    }

    #[test]
    fn frozen_membership_degrades_the_health_of_a_member() {
        for (health, expected, text) in [
            (
                Health::Ok,
                Health::Degraded,
                "r, membership frozen: no quorum",
            ),
            (
                Health::Degraded,
                Health::Degraded,
                "r, membership frozen: no quorum",
            ),
            (Health::Down, Health::Down, "r"),
        ] {
            let frozen = with_frozen((health, "r".into()), Some("no quorum".into()));
            assert_eq!(frozen, (expected, text.into()));
            assert_eq!(
                with_frozen((health, "r".into()), None),
                (health, "r".into())
            );
        }
    }
}
