// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Tests of the seed alone; `simulation` tests whole clusters.

use std::time::Duration;

use kite::MEMBERS_MAX;

use super::*;
use crate::membership::ProbeResult;
use crate::protocol::example::{kernel, member};
use crate::protocol::{Instance, PriorMembership};

const TIMING: Timing = Timing {
    heartbeat_interval: Duration::from_millis(500),
    dead_after: Duration::from_millis(3000),
};
const SECRET: Secret = [1; 16];

/// Seed with a clock, and connected members.
struct Test {
    seed: Coordinator,
    start: Instant,
    now: Instant,
    actions: Vec<Action>,
}

impl Test {
    fn new(seed: Coordinator) -> Self {
        let now = Instant::now();
        let (start, actions) = (now, Vec::new());
        let mut test = Self {
            seed,
            start,
            now,
            actions,
        };
        test.step(Input::Start);
        test
    }

    fn step(&mut self, input: Input) {
        self.seed.step(self.now, input, &mut self.actions);
    }

    /// Advances the clock to a time in ms after the start.
    fn at(&mut self, ms: u64) -> &mut Self {
        self.now = self.start + Duration::from_millis(ms);
        self.step(Input::Tick);
        self
    }

    fn hello(&mut self, link: LinkId, member: Member, prior: Option<PriorMembership>) {
        let kernel = KernelInfo {
            address: member.address,
            ..kernel(member.node)
        };
        self.hello_of(link, kernel, member.incarnation, prior);
    }

    fn hello_of(
        &mut self,
        link: LinkId,
        kernel: KernelInfo,
        incarnation: u64,
        prior: Option<PriorMembership>,
    ) {
        let hello = Message::Hello {
            incarnation,
            kernel,
            prior,
        };
        let host = Host {
            ip: [127, 0, 0, 1].into(),
            name: None,
        };
        self.step(Input::Opened(link, host));
        self.step(Input::Message(link, hello));
    }

    fn heartbeat(&mut self, link: LinkId) {
        let (epoch, probe) = (self.seed.epoch, false);
        self.step(Input::Applied(epoch));
        let heartbeat = Message::Heartbeat { epoch, probe };
        self.step(Input::Message(link, heartbeat));
    }

    /// Returns `true` if the seed has sent a message on a link that satisfies `is_match`. Forgets all messages.
    fn has_sent(&mut self, link: LinkId, is_match: impl Fn(&Message) -> bool) -> bool {
        let actions = std::mem::take(&mut self.actions);
        actions
            .iter()
            .any(|a| matches!(a, Action::Send(to, message) if *to == link && is_match(message)))
    }

    fn is_welcomed(&mut self, link: LinkId) -> bool {
        self.has_sent(link, |message| matches!(message, Message::Welcome { .. }))
    }

    fn unreachable(&self) -> Vec<u32> {
        let view = self.seed.view();
        let members = view.members.iter().filter(|m| !m.is_reachable());
        members.map(|m| m.node).collect()
    }
}

fn new_seed() -> Coordinator {
    Coordinator::new(TIMING, kernel(SEED_NODE), 1, SECRET)
}

/// Returns a cluster at 3 s after its start: nodes 2 … `count`, with links of the same numbers.
fn cluster(count: u32) -> Test {
    let mut test = Test::new(new_seed());
    test.at(3000);
    for node in 2..=count {
        test.hello(node.into(), member(node, 1), None);
        assert!(test.is_welcomed(node.into()));
    }
    (2..=count).for_each(|node| test.heartbeat(node.into()));
    test
}

/// Returns a cluster with the maximum number of members. Only member 2 is connected, by link 2.
fn full_cluster() -> Test {
    let mut test = Test::new(new_seed());
    let view = View {
        epoch: 5,
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
    test.at(3000);
    test.hello(2, member(2, 1), Some(prior));
    assert!(test.is_welcomed(2));
    assert_eq!(test.seed.view().members.len(), MEMBERS_MAX);
    test
}

#[test]
fn node_returning_to_a_full_cluster_is_rejected() {
    let mut test = full_cluster();
    test.step(Input::Message(2, Message::Goodbye));
    test.hello(3, member(5000, 1), None);
    assert!(test.is_welcomed(3), "one member has left");
    for (link, node) in [(4, 2), (5, 5001)] {
        test.hello(link, member(node, 2), None);
        assert!(test.has_sent(link, |m| matches!(m, Message::Rejected(_))));
    }
}

#[test]
fn member_of_a_full_cluster_with_new_incarnation_is_admitted() {
    let mut test = full_cluster();
    test.step(Input::Closed(2));
    test.hello(3, member(2, 2), None);
    assert!(test.is_welcomed(3));
}

#[test]
fn second_host_with_the_gid_of_a_connected_node_is_rejected() {
    let mut test = cluster(2);
    test.hello(9, member(2, 7), None);
    assert!(test.has_sent(2, |m| matches!(m, Message::Heartbeat { probe: true, .. })));
    test.at(4000).heartbeat(2);
    assert!(test.has_sent(9, |m| matches!(m, Message::Rejected(_))));
    assert!(test.seed.view().has_member(2, 1));
}

#[test]
fn rebooted_host_replaces_its_silent_connection_after_the_dead_timeout() {
    let mut test = cluster(2);
    test.hello(9, member(2, 7), None);
    test.at(5900);
    assert!(!test.is_welcomed(9));
    test.at(6100);
    assert!(test.is_welcomed(9));
    assert!(test.seed.view().has_member(2, 7));
    assert_eq!(test.seed.ended_incarnations[&2], 1);
}

#[test]
fn node_joins_a_seed_without_state_after_the_wait_for_survivors() {
    let mut test = Test::new(new_seed());
    test.hello(2, member(2, 1), None);
    test.at(1900);
    assert!(!test.is_welcomed(2));
    test.at(2100);
    assert!(test.is_welcomed(2));
}

#[test]
fn node_with_another_wire_version_is_rejected_and_changes_no_view() {
    let mut test = cluster(2);
    let view = test.seed.view();
    let prior = PriorMembership {
        node: 2,
        secret: SECRET,
        seed_incarnation: 1,
        view: view.clone(),
    };
    for (node, prior) in [(3, None), (2, Some(prior))] {
        let mut kernel = kernel(node);
        kernel.wire_version += 1;
        test.hello_of(9, kernel, 1, prior);
        let reason = format!("wire version {}", kernel.wire_version);
        let is_named = |m: &Message| matches!(m, Message::Rejected(r) if r.contains(&reason));
        assert!(test.has_sent(9, is_named), "node {node}");
        assert_eq!(test.seed.view(), view);
    }
}

#[test]
fn evicted_member_is_removed_and_its_incarnation_cannot_return() {
    let mut test = cluster(3);
    let view = test.seed.view();
    for incarnation in [2, 1] {
        let node = 2;
        test.step(Input::Evict(Instance { node, incarnation }));
    }
    assert!(test.has_sent(2, |m| *m == Message::Evicted));
    assert_eq!(test.seed.view().find_member(2), None);
    assert_eq!(test.seed.view().epoch, view.epoch + 4, "one view is new");
    let prior = PriorMembership {
        node: 2,
        secret: SECRET,
        seed_incarnation: 1,
        view,
    };
    test.hello(9, member(2, 1), Some(prior));
    assert!(test.has_sent(9, |m| *m == Message::Evicted));
}

#[test]
fn unreachable_member_is_evicted_after_the_expiry_only() {
    for (forget_after, is_evicted) in [(None, false), (Some(Duration::from_secs(60)), true)] {
        let mut test = cluster(3);
        test.seed = test.seed.with_expiry(forget_after);
        test.seed.mark_unreachable(2);
        test.at(3500);
        for ms in (4000..63_000).step_by(500) {
            test.at(ms).heartbeat(3);
        }
        assert_eq!(test.unreachable(), [2]);
        test.at(64_000).heartbeat(3);
        assert_eq!(test.seed.view().find_member(2).is_none(), is_evicted);
        assert!(test.seed.is_reachable(3));
    }
}

#[test]
fn ended_incarnation_is_evicted() {
    let mut test = cluster(2);
    let view = test.seed.view();
    let prior = PriorMembership {
        node: 2,
        secret: SECRET,
        seed_incarnation: 1,
        view,
    };
    test.step(Input::Message(2, Message::Goodbye));
    test.hello(9, member(2, 1), Some(prior));
    assert!(test.has_sent(9, |m| *m == Message::Evicted));
}

/// A state file of a backup does not contain the nodes that joined since.
#[test]
fn member_whose_number_was_given_to_another_node_keeps_its_incarnation() {
    let mut test = cluster(2);
    let mut view = test.seed.view();
    view.members[1] = Member {
        admitted_epoch: 5,
        ..member(2, 7)
    };
    view.members[1].address.gid = Ipv6Addr::from(99);
    let (returning, prior) = (
        view.members[1],
        PriorMembership {
            node: 2,
            secret: SECRET,
            seed_incarnation: 1,
            view,
        },
    );
    test.hello(9, returning, Some(prior));
    assert!(test.has_sent(9, |m| matches!(m, Message::Rejected(_))));
    assert!(test.seed.view().has_member(2, 1));
}

/// Evidence about node 2, which is silent: by the seed, and by node 3.
fn unreachable_after(seed: Option<bool>, other: Option<bool>, count: u32) -> Vec<u32> {
    let mut test = cluster(count);
    let instance = Instance {
        node: 2,
        incarnation: 1,
    };
    for ms in [4000, 5000, 6000, 6500] {
        test.at(ms);
        (3..=count).for_each(|node| test.heartbeat(node.into()));
    }
    assert!(test.actions.contains(&Action::Probe(instance)));
    if count > 2 {
        assert!(test.has_sent(3, |m| *m == Message::Probe(instance)));
    }
    test.seed.on_probed(test.now, SEED_NODE, instance, seed);
    if let Some(answered) = other {
        test.step(Input::Message(3, Message::Probed { instance, answered }));
    }
    for ms in [7000, 8000, 9000] {
        test.at(ms);
        (3..=count).for_each(|node| test.heartbeat(node.into()));
    }
    test.unreachable()
}

#[test]
fn silent_node_is_unreachable_only_by_evidence_of_rdma() {
    let cases = [
        (Some(false), Some(false), true),
        (Some(false), None, true),
        (None, Some(false), true),
        (Some(true), Some(false), false),
        (Some(false), Some(true), false),
        (None, None, false),
    ];
    for (seed, other, expected) in cases {
        let unreachable = unreachable_after(seed, other, 4);
        assert_eq!(unreachable == [2], expected, "{seed:?} {other:?}");
    }
    assert_eq!(unreachable_after(Some(false), None, 2), [2]);
    assert_eq!(unreachable_after(None, None, 2), [0; 0]);
}

/// Returns the unreachable nodes after node 2 reported node 3 at these times, in seconds. Both nodes send heartbeats.
/// Their kernels have applied the epoch that `epochs` computes from the seed's epoch. Node 2 replies to requests for
/// probes with `answered`.
fn unreachable_after_suspicions(
    times: impl Iterator<Item = u64>,
    epochs: fn(u64) -> u64,
    answered: bool,
) -> Vec<u32> {
    let mut test = cluster(3);
    for seconds in times {
        test.at(3000 + 1000 * seconds);
        let (epoch, probe) = (epochs(test.seed.epoch), false);
        for link in [2, 3] {
            test.step(Input::Message(link, Message::Heartbeat { epoch, probe }));
        }
        test.step(Input::Message(2, Message::Suspect(3)));
        let instance = |node| Instance {
            node,
            incarnation: 1,
        };
        // Both nodes reply to the kernel of the seed.
        for node in [2, 3].map(instance) {
            if test.actions.contains(&Action::Probe(node)) {
                test.step(Input::Probed(node, ProbeResult::Answered));
            }
        }
        if test.has_sent(2, |m| *m == Message::Probe(instance(3))) {
            let instance = instance(3);
            test.step(Input::Message(2, Message::Probed { instance, answered }));
        }
    }
    test.unreachable()
}

#[test]
fn continuous_suspicions_confirmed_by_a_probe_fence_one_of_two_nodes() {
    let after = |seconds| unreachable_after_suspicions(0..seconds, |newest| newest, false);
    assert_eq!(after(5), [0; 0]);
    assert_eq!(after(6), [3]);
}

#[test]
fn suspicions_that_a_probe_refutes_fence_no_node() {
    assert_eq!(
        unreachable_after_suspicions(0..100, |newest| newest, true),
        [0; 0]
    );
}

#[test]
fn rare_suspicions_fence_no_node() {
    let rare = (0..100).map(|i| 6 * i);
    assert_eq!(
        unreachable_after_suspicions(rare, |newest| newest, false),
        [0; 0]
    );
}

#[test]
fn suspicion_before_a_common_view_fences_no_node() {
    // After 15 s, the nodes are fenced because their kernels apply no view.
    assert_eq!(unreachable_after_suspicions(0..14, |_| 1, false), [0; 0]);
}

#[test]
fn kernel_that_applies_no_view_is_unreachable_until_it_does() {
    let mut test = cluster(3);
    let old = test.seed.epoch;
    test.hello(4, member(4, 1), None);
    let heartbeats = |test: &mut Test, slow: u64| {
        test.heartbeat(2);
        test.heartbeat(4);
        let heartbeat = |epoch| Message::Heartbeat {
            epoch,
            probe: false,
        };
        test.step(Input::Message(3, heartbeat(slow)));
    };
    for second in 3..18 {
        test.at(1000 * second);
        heartbeats(&mut test, old);
        assert_eq!(test.unreachable(), [0; 0], "{second}");
    }
    test.at(18_100);
    assert_eq!(test.unreachable(), [3]);
    heartbeats(&mut test, old);
    test.at(18_500);
    assert_eq!(test.unreachable(), [3], "heartbeats alone do not suffice");
    let newest = test.seed.epoch;
    heartbeats(&mut test, newest);
    test.at(19_000);
    assert_eq!(test.unreachable(), [0; 0]);
}

#[test]
fn restored_seed_continues_secret_epochs_and_numbers() {
    let state = cluster(3).seed.to_state();
    let epoch = state.epoch;
    let mut test = Test::new(Coordinator::restore(
        TIMING,
        kernel(SEED_NODE),
        8,
        state.clone(),
    ));
    assert_eq!(test.seed.secret, SECRET);
    assert!(test.seed.epoch > epoch);
    test.hello(9, member(9, 1), None);
    assert!(test.is_welcomed(9), "a new node does not wait");
    assert!(test.seed.view().has_member(4, 1), "new number");
    assert!(test.seed.view().has_member(3, 1), "the members are kept");
}
