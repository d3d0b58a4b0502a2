// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Tests of the seed alone; `simulation` tests whole clusters.

use std::time::Duration;

use kite::MEMBERS_MAX;

use super::*;
use crate::protocol::PriorMembership;

const TIMING: Timing = Timing {
    heartbeat_interval: Duration::from_millis(500),
    dead_after: Duration::from_millis(3000),
};
const SECRET: Secret = [1; 16];

fn member(node: u32, incarnation: u64) -> Member {
    let address = FabricAddress {
        gid: Ipv6Addr::from(u128::from(node)),
        qpn: 1,
        lid: 0,
        link_layer: 2,
        mtu: 4096,
    };
    Member {
        node,
        incarnation,
        address,
        admitted_epoch: 0,
        unreachable_since: 0,
    }
}

/// Returns `true` if the seed admits the node that sends a hello on this new connection.
fn admits(seed: &mut Seed, link: LinkId, member: Member, prior: Option<PriorMembership>) -> bool {
    let (now, mut actions) = (Instant::now(), Vec::new());
    let hello = Message::Hello {
        incarnation: member.incarnation,
        address: member.address,
        prior,
    };
    let host = Host {
        ip: [127, 0, 0, 1].into(),
        name: None,
    };
    seed.step(now, Input::Opened(link, host), &mut actions);
    seed.step(now, Input::Message(link, hello), &mut actions);
    assert!(seed.view().members.len() <= MEMBERS_MAX);
    let welcome = |a: &Action| matches!(a, Action::Send(_, Message::Welcome { .. }));
    actions.iter().any(welcome)
}

/// Returns a cluster with the maximum number of members. Only member 2 is connected, by link 2.
fn full_cluster() -> Seed {
    let mut seed = Seed::new(TIMING, member(SEED_NODE, 1).address, 1, SECRET);
    let view = View {
        epoch: 2,
        members: (2..=MEMBERS_MAX as u32)
            .map(|node| member(node, 1))
            .collect(),
    };
    let prior = PriorMembership {
        node: 2,
        secret: SECRET,
        seed_incarnation: 2,
        view,
    };
    assert!(admits(&mut seed, 2, member(2, 1), Some(prior)));
    assert_eq!(seed.view().members.len(), MEMBERS_MAX);
    seed
}

#[test]
fn node_returning_to_a_full_cluster_is_rejected() {
    let mut seed = full_cluster();
    seed.step(
        Instant::now(),
        Input::Message(2, Message::Goodbye),
        &mut Vec::new(),
    );
    assert!(
        admits(&mut seed, 3, member(5000, 1), None),
        "one member has left"
    );
    assert!(!admits(&mut seed, 4, member(2, 2), None));
    assert!(!admits(&mut seed, 5, member(5001, 1), None));
}

/// Returns a full cluster in which a node with the GID of member 2 waits, on link 3.
fn challenged_cluster() -> Seed {
    let mut seed = full_cluster();
    let is_admitted = admits(&mut seed, 3, member(2, 2), None);
    assert!(!is_admitted, "member 2 is probed first");
    seed
}

#[test]
fn new_incarnation_of_a_silent_member_replaces_it_in_a_full_cluster() {
    let mut seed = challenged_cluster();
    let mut actions = Vec::new();
    seed.step(
        Instant::now() + TIMING.probe_grace(),
        Input::Tick,
        &mut actions,
    );
    let welcome = |a: &Action| matches!(a, Action::Send(3, Message::Welcome { node: 2, .. }));
    assert!(actions.iter().any(welcome));
    assert_eq!(seed.view().find_member(2).unwrap().incarnation, 2);
}

#[test]
fn node_with_the_gid_of_a_responding_member_is_rejected() {
    let mut seed = challenged_cluster();
    let mut actions = Vec::new();
    let (epoch, probe) = (0, false);
    let reply = Input::Message(2, Message::Heartbeat { epoch, probe });
    seed.step(Instant::now(), reply, &mut actions);
    let rejected = |a: &Action| matches!(a, Action::Send(3, Message::Rejected(_)));
    assert!(actions.iter().any(rejected), "{actions:?}");
    assert_eq!(seed.view().find_member(2).unwrap().incarnation, 1);
}

/// Returns the members after node 2 reported node 3 at these times, in seconds. Both nodes send heartbeats. Their
/// kernels have applied the epoch that `epochs` computes from the seed's epoch.
fn members_after_suspicions(times: impl Iterator<Item = u64>, epochs: fn(u64) -> u64) -> Vec<u32> {
    let mut seed = Seed::new(TIMING, member(SEED_NODE, 1).address, 1, SECRET);
    assert!(admits(&mut seed, 2, member(2, 1), None));
    assert!(admits(&mut seed, 3, member(3, 1), None));
    let start = Instant::now();
    for seconds in times {
        let now = start + Duration::from_secs(seconds);
        let (epoch, probe) = (epochs(seed.epoch), false);
        for link in [2, 3] {
            let heartbeat = Message::Heartbeat { epoch, probe };
            seed.step(now, Input::Message(link, heartbeat), &mut Vec::new());
        }
        let suspect = Message::Suspect(3);
        seed.step(now, Input::Message(2, suspect), &mut Vec::new());
    }
    let view = seed.view();
    let members = view.members.iter().filter(|m| m.is_reachable());
    members.map(|m| m.node).collect()
}

#[test]
fn continuous_suspicions_isolate_one_of_two_nodes() {
    assert_eq!(members_after_suspicions(0..5, |newest| newest), [1, 2, 3]);
    assert_eq!(members_after_suspicions(0..6, |newest| newest), [1, 2]);
}

#[test]
fn rare_suspicions_isolate_no_node() {
    let rare = (0..100).map(|i| 6 * i);
    assert_eq!(members_after_suspicions(rare, |newest| newest), [1, 2, 3]);
}

#[test]
fn suspicion_before_a_common_view_isolates_no_node() {
    assert_eq!(members_after_suspicions(0..100, |_| 1), [1, 2, 3]);
}
