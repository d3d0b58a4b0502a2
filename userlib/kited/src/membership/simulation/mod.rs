// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Simulation of a cluster of state machines, with faults in any order.
//!
//! After the last fault, all nodes must reach the same view of all nodes.

mod cluster;
mod fault;
mod node;

use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;

use cluster::SimCluster;
use fault::Fault;

const SECOND: Duration = Duration::from_secs(1);

fn whole_cluster(count: usize) -> SimCluster {
    let mut cluster = SimCluster::new(count);
    cluster.run(SECOND);
    cluster.assert_whole();
    cluster
}

#[test]
fn nodes_that_start_join_the_cluster() {
    assert_eq!(whole_cluster(4).members(0), [1, 2, 3, 4]);
}

#[test]
fn crashed_node_is_removed_and_returns_with_its_number() {
    let mut cluster = whole_cluster(3);
    let former = cluster.incarnation(1);
    cluster.crash(1);
    cluster.run(2 * SECOND);
    assert_eq!(cluster.members(0).len(), 3, "not before the dead timeout");
    cluster.run(2 * SECOND);
    let number = cluster.members(2);
    assert_eq!(number.len(), 2);
    cluster.start(1);
    cluster.run(SECOND);
    cluster.assert_whole();
    assert_ne!(cluster.incarnation(1), former);
}

#[test]
fn leaving_node_is_removed_at_once() {
    let mut cluster = whole_cluster(3);
    cluster.inject(&Fault::Leave(2));
    cluster.deliver_all();
    assert_eq!(cluster.members(1).len(), 2);
    assert_eq!(cluster.view(0), cluster.view(1));
}

#[test]
fn suspected_silent_node_is_removed_early() {
    let mut cluster = whole_cluster(3);
    cluster.inject(&Fault::Pause(2));
    let number = cluster.number(2);
    cluster.inject(&Fault::Suspect(1, number));
    cluster.run(3 * SECOND / 2);
    assert_eq!(cluster.members(1).len(), 2);
}

#[test]
fn suspected_responding_node_stays() {
    let mut cluster = whole_cluster(3);
    for node in 1..=3 {
        cluster.inject(&Fault::Suspect(1, node));
        cluster.inject(&Fault::Suspect(0, node));
    }
    cluster.run(5 * SECOND);
    cluster.assert_whole();
}

#[test]
fn survivors_of_the_seed_agree_and_keep_their_incarnations() {
    let mut cluster = whole_cluster(4);
    let before: Vec<u64> = (1..4).map(|node| cluster.incarnation(node)).collect();
    cluster.crash(0);
    cluster.run(4 * SECOND);
    for node in 1..4 {
        assert_eq!(cluster.members(node), [2, 3, 4]);
        assert_eq!(cluster.view(node), cluster.view(1));
    }
    cluster.start(0);
    cluster.run(SECOND);
    cluster.assert_whole();
    assert_eq!(
        before,
        (1..4)
            .map(|node| cluster.incarnation(node))
            .collect::<Vec<_>>()
    );
}

#[test]
fn survivors_without_the_last_view_differ_until_the_seed_returns() {
    let mut cluster = whole_cluster(4);
    let before = [1, 2].map(|node| cluster.incarnation(node));
    cluster.inject(&Fault::DropMessages(2));
    cluster.inject(&Fault::Leave(3));
    cluster.deliver_all();
    cluster.crash(0);
    cluster.run(4 * SECOND);
    let (latest, missed) = (cluster.view(1), cluster.view(2));
    assert_eq!((latest.members.len(), missed.members.len()), (2, 3));
    assert!(latest.epoch > missed.epoch, "{latest:?} {missed:?}");

    cluster.start(0);
    cluster.run(SECOND);
    assert_eq!(cluster.members(0).len(), 3);
    for node in [1, 2] {
        assert_eq!(cluster.view(node), cluster.view(0));
    }
    assert_eq!(before, [1, 2].map(|node| cluster.incarnation(node)));
}

#[test]
fn seed_that_restarts_at_once_inherits_the_members() {
    let mut cluster = whole_cluster(3);
    let before = cluster.incarnation(1);
    cluster.crash(0);
    cluster.start(0);
    cluster.run(SECOND);
    cluster.assert_whole();
    assert_eq!(cluster.incarnation(1), before);
}

#[test]
fn member_that_crashed_with_the_seed_is_removed_by_the_next_seed() {
    let mut cluster = whole_cluster(4);
    cluster.crash(0);
    cluster.crash(3);
    cluster.run(4 * SECOND);
    cluster.start(0);
    cluster.run(SECOND);
    assert_eq!(cluster.members(1).len(), 4, "trusted at first");
    cluster.run(4 * SECOND);
    assert_eq!(cluster.members(1).len(), 3);
}

#[test]
fn node_paused_beyond_the_dead_time_gets_a_new_incarnation() {
    let mut cluster = whole_cluster(3);
    let former = cluster.incarnation(1);
    cluster.inject(&Fault::Pause(1));
    cluster.run(4 * SECOND);
    assert_eq!(cluster.members(0).len(), 2);
    cluster.inject(&Fault::Resume(1));
    cluster.run(2 * SECOND);
    cluster.assert_whole();
    assert_ne!(cluster.incarnation(1), former);
}

#[test]
fn lost_connection_changes_no_view() {
    let mut cluster = whole_cluster(3);
    let epoch = cluster.view(0).epoch;
    cluster.inject(&Fault::Disconnect(1));
    cluster.run(5 * SECOND);
    cluster.assert_whole();
    assert_eq!(cluster.view(0).epoch, epoch);
}

/// Returns the incarnations of nodes.
fn incarnations(cluster: &SimCluster, nodes: &[usize]) -> Vec<u64> {
    nodes
        .iter()
        .map(|&node| cluster.incarnation(node))
        .collect()
}

#[test]
fn node_without_rdma_is_evicted_and_returns_after_repair() {
    let mut cluster = whole_cluster(4);
    let (evicted, others) = (cluster.number(2), incarnations(&cluster, &[0, 1, 3]));
    cluster.inject(&Fault::BreakRdma(2, 2));
    cluster.run(3 * SECOND);
    cluster.assert_whole();
    cluster.run(5 * SECOND);
    let left = cluster.members(0);
    assert_eq!(left.len(), 3);
    assert!(!left.contains(&evicted), "{left:?}");
    assert_eq!(incarnations(&cluster, &[0, 1, 3]), others);
    cluster.inject(&Fault::RepairRdma);
    cluster.run(8 * SECOND);
    cluster.assert_whole();
    assert_eq!(incarnations(&cluster, &[0, 1, 3]), others);
}

#[test]
fn node_without_rdma_is_readmitted_ever_more_rarely() {
    let mut cluster = whole_cluster(4);
    cluster.inject(&Fault::BreakRdma(2, 2));
    let mut whole_seconds = || {
        let second = |_: &u32| {
            cluster.run(SECOND);
            cluster.members(1).len() == 4
        };
        (0..1200).filter(second).count()
    };
    let (first, later) = (whole_seconds(), whole_seconds());
    assert!(first > later, "{first} s, then {later} s");
    assert!(later < 40, "{later} s");
    assert!(later > 0, "the node is readmitted");
}

#[test]
fn members_continue_without_a_seed_without_rdma() {
    let mut cluster = whole_cluster(4);
    let others = incarnations(&cluster, &[1, 2, 3]);
    cluster.inject(&Fault::BreakRdma(0, 0));
    cluster.run(8 * SECOND);
    assert_eq!(cluster.members(0), [1]);
    for node in 1..4 {
        assert_eq!(cluster.members(node), [2, 3, 4]);
        assert_eq!(cluster.view(node), cluster.view(1));
    }
    cluster.inject(&Fault::RepairRdma);
    cluster.run(8 * SECOND);
    cluster.assert_whole();
    assert_eq!(incarnations(&cluster, &[1, 2, 3]), others);
}

#[test]
fn of_two_nodes_without_rdma_the_same_is_evicted_each_time() {
    let mut cluster = whole_cluster(4);
    let one = (1..=2).min_by_key(|&node| cluster.number(node)).unwrap();
    let others = incarnations(&cluster, &[0, one, 3]);
    cluster.inject(&Fault::BreakRdma(1, 2));
    let mut evicted_seconds = 0;
    for _ in 0..200 {
        cluster.run(SECOND);
        evicted_seconds += u32::from(cluster.members(0).len() == 3);
        assert_eq!(incarnations(&cluster, &[0, one, 3]), others);
    }
    assert!(evicted_seconds > 100, "{evicted_seconds} s");
}

#[test]
fn short_loss_of_rdma_changes_no_incarnation() {
    let mut cluster = whole_cluster(3);
    let before = incarnations(&cluster, &[0, 1, 2]);
    for _ in 0..10 {
        cluster.inject(&Fault::BreakRdma(1, 1));
        cluster.run(2 * SECOND);
        cluster.inject(&Fault::RepairRdma);
        cluster.run(6 * SECOND);
    }
    cluster.assert_whole();
    assert_eq!(incarnations(&cluster, &[0, 1, 2]), before);
}

#[test]
fn daemon_restart_keeps_incarnation_and_view() {
    let mut cluster = whole_cluster(4);
    let (view, before) = (
        cluster.view(0).clone(),
        incarnations(&cluster, &[0, 1, 2, 3]),
    );
    for node in [1, 0, 3, 0, 2] {
        cluster.inject(&Fault::Restart(node));
        cluster.run(SECOND);
        assert_eq!((cluster.view(0), cluster.view(node)), (&view, &view));
    }
    for node in 0..4 {
        cluster.inject(&Fault::Restart(node));
    }
    cluster.run(5 * SECOND);
    cluster.assert_whole();
    assert_eq!(cluster.view(0), &view);
    assert_eq!(incarnations(&cluster, &[0, 1, 2, 3]), before);
}

#[test]
fn members_that_do_not_reconnect_to_a_restarted_seed_are_removed() {
    let mut cluster = whole_cluster(3);
    cluster.crash(2);
    cluster.inject(&Fault::Restart(0));
    cluster.run(2 * SECOND);
    assert_eq!(cluster.members(0).len(), 3, "not before the dead timeout");
    cluster.run(2 * SECOND);
    assert_eq!(cluster.members(0).len(), 2);
}

#[test]
fn follower_with_slow_restart_gets_a_new_incarnation() {
    let mut cluster = whole_cluster(3);
    let (former, others) = (cluster.incarnation(2), incarnations(&cluster, &[0, 1]));
    cluster.inject(&Fault::Pause(2));
    cluster.inject(&Fault::Disconnect(2));
    cluster.run(4 * SECOND);
    cluster.inject(&Fault::Resume(2));
    cluster.inject(&Fault::Restart(2));
    cluster.run(2 * SECOND);
    cluster.assert_whole();
    assert_ne!(cluster.incarnation(2), former);
    assert_eq!(incarnations(&cluster, &[0, 1]), others);
}

#[test]
fn slow_restart_of_the_seed_keeps_incarnations_of_others() {
    let mut cluster = whole_cluster(3);
    let (former, others) = (cluster.incarnation(0), incarnations(&cluster, &[1, 2]));
    cluster.inject(&Fault::Pause(0));
    (1..3).for_each(|node| cluster.inject(&Fault::Disconnect(node)));
    cluster.run(4 * SECOND);
    assert_eq!(cluster.members(1).len(), 2);
    cluster.nodes[0].paused = false;
    cluster.inject(&Fault::Restart(0));
    cluster.run(2 * SECOND);
    cluster.assert_whole();
    assert_ne!(cluster.incarnation(0), former);
    assert_eq!(incarnations(&cluster, &[1, 2]), others);
}

const COUNT: usize = 4;

fn fault() -> impl Strategy<Value = Fault> {
    let node = 0..COUNT;
    prop_oneof![
        8 => (1..16u8).prop_map(Fault::Tick),
        16 => (node.clone(), 1..8u8).prop_map(|(n, c)| Fault::Deliver(n, c)),
        2 => node.clone().prop_map(Fault::Crash),
        2 => node.clone().prop_map(Fault::Start),
        1 => node.clone().prop_map(Fault::Leave),
        2 => node.clone().prop_map(Fault::Restart),
        2 => (node.clone(), 0..6u8).prop_map(|(n, a)| Fault::Interrupt(n, a)),
        1 => node.clone().prop_map(Fault::Pause),
        2 => node.clone().prop_map(Fault::Resume),
        1 => (1..COUNT).prop_map(Fault::Disconnect),
        1 => (1..COUNT).prop_map(Fault::DropMessages),
        1 => (node, 0..6u32).prop_map(|(n, o)| Fault::Suspect(n, o)),
    ]
}

fn fault_including_rdma() -> impl Strategy<Value = Fault> {
    prop_oneof![
        36 => fault(),
        1 => (0..COUNT, 0..COUNT).prop_map(|(n, o)| Fault::BreakRdma(n, o)),
        1 => Just(Fault::RepairRdma),
    ]
}

/// Returns a cluster after these faults, in which all nodes run.
fn cluster_after(faults: &[Fault]) -> SimCluster {
    let mut cluster = SimCluster::new(COUNT);
    for fault in faults {
        cluster.inject(fault);
    }
    for node in 0..COUNT {
        cluster.nodes[node].paused = false;
        cluster.start(node);
    }
    cluster
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn restarts_in_time_change_no_view_and_no_incarnation(
        faults in vec((0..COUNT, prop::option::of(0..6u8)), 0..40)
    ) {
        let mut cluster = whole_cluster(COUNT);
        let view = cluster.view(0).clone();
        for (node, actions) in faults {
            cluster.inject(&match actions {
                Some(actions) => Fault::Interrupt(node, actions),
                None => Fault::Restart(node),
            });
            cluster.run(SECOND);
        }
        cluster.assert_whole();
        prop_assert_eq!(cluster.view(0), &view);
    }

    #[test]
    fn cluster_is_whole_after_any_faults(faults in vec(fault(), 0..120)) {
        let mut cluster = cluster_after(&faults);
        cluster.run(15 * SECOND);
        cluster.assert_whole();
    }

    #[test]
    fn cluster_is_whole_after_rdma_faults_and_quarantine(
        faults in vec(fault_including_rdma(), 0..120)
    ) {
        let mut cluster = cluster_after(&faults);
        cluster.inject(&Fault::RepairRdma);
        cluster.run_until_whole(400 * SECOND);
    }
}
