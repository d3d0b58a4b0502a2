// SPDX-License-Identifier: GPL-2.0 OR MIT
//! A whole cluster of machines, put through faults in any order.
//!
//! After the faults end, all nodes must come to the same view of all nodes.

mod world;

use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;

use world::{Fault, SimCluster};

const SECOND: Duration = Duration::from_secs(1);

fn whole_cluster(count: usize) -> SimCluster {
    let mut world = SimCluster::new(count);
    world.run(SECOND);
    world.assert_whole();
    world
}

#[test]
fn nodes_that_start_join_the_cluster() {
    assert_eq!(whole_cluster(4).members(0), [1, 2, 3, 4]);
}

#[test]
fn crashed_node_is_removed_and_returns_with_its_number() {
    let mut world = whole_cluster(3);
    let former = world.incarnation(1);
    world.crash(1);
    world.run(2 * SECOND);
    assert_eq!(world.members(0).len(), 3, "not before its time");
    world.run(2 * SECOND);
    let number = world.members(2);
    assert_eq!(number.len(), 2);
    world.start(1);
    world.run(SECOND);
    world.assert_whole();
    assert_ne!(world.incarnation(1), former);
}

#[test]
fn leaving_node_is_removed_at_once() {
    let mut world = whole_cluster(3);
    world.inject(&Fault::Leave(2));
    world.deliver_all();
    assert_eq!(world.members(1).len(), 2);
    assert_eq!(world.view(0), world.view(1));
}

#[test]
fn suspected_silent_node_is_removed_early() {
    let mut world = whole_cluster(3);
    world.inject(&Fault::Pause(2));
    let number = world.number(2);
    world.inject(&Fault::Suspect(1, number));
    world.run(3 * SECOND / 2);
    assert_eq!(world.members(1).len(), 2);
}

#[test]
fn suspected_responding_node_stays() {
    let mut world = whole_cluster(3);
    for node in 1..=3 {
        world.inject(&Fault::Suspect(1, node));
        world.inject(&Fault::Suspect(0, node));
    }
    world.run(5 * SECOND);
    world.assert_whole();
}

#[test]
fn survivors_of_the_seed_agree_and_keep_their_incarnations() {
    let mut world = whole_cluster(4);
    let before: Vec<u64> = (1..4).map(|node| world.incarnation(node)).collect();
    world.crash(0);
    world.run(4 * SECOND);
    for node in 1..4 {
        assert_eq!(world.members(node), [2, 3, 4]);
        assert_eq!(world.view(node), world.view(1));
    }
    world.start(0);
    world.run(SECOND);
    world.assert_whole();
    assert_eq!(
        before,
        (1..4)
            .map(|node| world.incarnation(node))
            .collect::<Vec<_>>()
    );
}

#[test]
fn survivors_without_the_last_view_differ_until_the_seed_returns() {
    let mut world = whole_cluster(4);
    let before = [1, 2].map(|node| world.incarnation(node));
    world.inject(&Fault::DropMessages(2));
    world.inject(&Fault::Leave(3));
    world.deliver_all();
    world.crash(0);
    world.run(4 * SECOND);
    let (latest, missed) = (world.view(1), world.view(2));
    assert_eq!((latest.members.len(), missed.members.len()), (2, 3));
    assert!(latest.epoch > missed.epoch, "{latest:?} {missed:?}");

    world.start(0);
    world.run(SECOND);
    assert_eq!(world.members(0).len(), 3);
    for node in [1, 2] {
        assert_eq!(world.view(node), world.view(0));
    }
    assert_eq!(before, [1, 2].map(|node| world.incarnation(node)));
}

#[test]
fn seed_that_restarts_at_once_inherits_the_members() {
    let mut world = whole_cluster(3);
    let before = world.incarnation(1);
    world.crash(0);
    world.start(0);
    world.run(SECOND);
    world.assert_whole();
    assert_eq!(world.incarnation(1), before);
}

#[test]
fn member_that_crashed_with_the_seed_is_removed_by_the_next_seed() {
    let mut world = whole_cluster(4);
    world.crash(0);
    world.crash(3);
    world.run(4 * SECOND);
    world.start(0);
    world.run(SECOND);
    assert_eq!(world.members(1).len(), 4, "taken on trust at first");
    world.run(4 * SECOND);
    assert_eq!(world.members(1).len(), 3);
}

#[test]
fn node_paused_beyond_the_dead_time_gets_a_new_incarnation() {
    let mut world = whole_cluster(3);
    let former = world.incarnation(1);
    world.inject(&Fault::Pause(1));
    world.run(4 * SECOND);
    assert_eq!(world.members(0).len(), 2);
    world.inject(&Fault::Resume(1));
    world.run(2 * SECOND);
    world.assert_whole();
    assert_ne!(world.incarnation(1), former);
}

#[test]
fn lost_connection_changes_no_view() {
    let mut world = whole_cluster(3);
    let epoch = world.view(0).epoch;
    world.inject(&Fault::Disconnect(1));
    world.run(5 * SECOND);
    world.assert_whole();
    assert_eq!(world.view(0).epoch, epoch);
}

/// The lives that nodes are in.
fn incarnations(world: &SimCluster, nodes: &[usize]) -> Vec<u64> {
    nodes.iter().map(|&node| world.incarnation(node)).collect()
}

#[test]
fn node_without_rdma_is_evicted_and_returns_after_repair() {
    let mut world = whole_cluster(4);
    let (evicted, others) = (world.number(2), incarnations(&world, &[0, 1, 3]));
    world.inject(&Fault::BreakRdma(2, 2));
    world.run(3 * SECOND);
    world.assert_whole();
    world.run(5 * SECOND);
    let left = world.members(0);
    assert_eq!(left.len(), 3);
    assert!(!left.contains(&evicted), "{left:?}");
    assert_eq!(incarnations(&world, &[0, 1, 3]), others);
    world.inject(&Fault::RepairRdma);
    world.run(8 * SECOND);
    world.assert_whole();
    assert_eq!(incarnations(&world, &[0, 1, 3]), others);
}

#[test]
fn node_without_rdma_is_readmitted_ever_more_rarely() {
    let mut world = whole_cluster(4);
    world.inject(&Fault::BreakRdma(2, 2));
    let mut whole_seconds = || {
        let second = |_: &u32| {
            world.run(SECOND);
            world.members(1).len() == 4
        };
        (0..1200).filter(second).count()
    };
    let (first, later) = (whole_seconds(), whole_seconds());
    assert!(first > later, "{first} s, then {later} s");
    assert!(later < 40, "{later} s");
    assert!(later > 0, "it is let in now and then");
}

#[test]
fn members_continue_without_a_seed_without_rdma() {
    let mut world = whole_cluster(4);
    let others = incarnations(&world, &[1, 2, 3]);
    world.inject(&Fault::BreakRdma(0, 0));
    world.run(8 * SECOND);
    assert_eq!(world.members(0), [1]);
    for node in 1..4 {
        assert_eq!(world.members(node), [2, 3, 4]);
        assert_eq!(world.view(node), world.view(1));
    }
    world.inject(&Fault::RepairRdma);
    world.run(8 * SECOND);
    world.assert_whole();
    assert_eq!(incarnations(&world, &[1, 2, 3]), others);
}

#[test]
fn of_two_nodes_without_rdma_the_same_is_evicted_each_time() {
    let mut world = whole_cluster(4);
    let one = (1..=2).min_by_key(|&node| world.number(node)).unwrap();
    let others = incarnations(&world, &[0, one, 3]);
    world.inject(&Fault::BreakRdma(1, 2));
    let mut evicted_seconds = 0;
    for _ in 0..200 {
        world.run(SECOND);
        evicted_seconds += u32::from(world.members(0).len() == 3);
        assert_eq!(incarnations(&world, &[0, one, 3]), others);
    }
    assert!(evicted_seconds > 100, "{evicted_seconds} s");
}

#[test]
fn short_loss_of_rdma_changes_no_incarnation() {
    let mut world = whole_cluster(3);
    let before = incarnations(&world, &[0, 1, 2]);
    for _ in 0..10 {
        world.inject(&Fault::BreakRdma(1, 1));
        world.run(2 * SECOND);
        world.inject(&Fault::RepairRdma);
        world.run(6 * SECOND);
    }
    world.assert_whole();
    assert_eq!(incarnations(&world, &[0, 1, 2]), before);
}

#[test]
fn daemon_restart_keeps_incarnation_and_view() {
    let mut world = whole_cluster(4);
    let (view, before) = (world.view(0).clone(), incarnations(&world, &[0, 1, 2, 3]));
    for node in [1, 0, 3, 0, 2] {
        world.inject(&Fault::Restart(node));
        world.run(SECOND);
        assert_eq!((world.view(0), world.view(node)), (&view, &view));
    }
    for node in 0..4 {
        world.inject(&Fault::Restart(node));
    }
    world.run(5 * SECOND);
    world.assert_whole();
    assert_eq!(world.view(0), &view);
    assert_eq!(incarnations(&world, &[0, 1, 2, 3]), before);
}

#[test]
fn members_that_do_not_reconnect_to_a_restarted_seed_are_removed() {
    let mut world = whole_cluster(3);
    world.crash(2);
    world.inject(&Fault::Restart(0));
    world.run(2 * SECOND);
    assert_eq!(world.members(0).len(), 3, "not before its time");
    world.run(2 * SECOND);
    assert_eq!(world.members(0).len(), 2);
}

#[test]
fn follower_with_slow_restart_gets_a_new_incarnation() {
    let mut world = whole_cluster(3);
    let (former, others) = (world.incarnation(2), incarnations(&world, &[0, 1]));
    world.inject(&Fault::Pause(2));
    world.inject(&Fault::Disconnect(2));
    world.run(4 * SECOND);
    world.inject(&Fault::Resume(2));
    world.inject(&Fault::Restart(2));
    world.run(2 * SECOND);
    world.assert_whole();
    assert_ne!(world.incarnation(2), former);
    assert_eq!(incarnations(&world, &[0, 1]), others);
}

#[test]
fn slow_restart_of_the_seed_keeps_incarnations_of_others() {
    let mut world = whole_cluster(3);
    let (former, others) = (world.incarnation(0), incarnations(&world, &[1, 2]));
    world.inject(&Fault::Pause(0));
    (1..3).for_each(|node| world.inject(&Fault::Disconnect(node)));
    world.run(4 * SECOND);
    assert_eq!(world.members(1).len(), 2);
    world.nodes[0].paused = false;
    world.inject(&Fault::Restart(0));
    world.run(2 * SECOND);
    world.assert_whole();
    assert_ne!(world.incarnation(0), former);
    assert_eq!(incarnations(&world, &[1, 2]), others);
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

/// A world in which all this happened, and then all nodes run.
fn world_after(faults: &[Fault]) -> SimCluster {
    let mut world = SimCluster::new(COUNT);
    for fault in faults {
        world.inject(fault);
    }
    for node in 0..COUNT {
        world.nodes[node].paused = false;
        world.start(node);
    }
    world
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn restarts_in_time_change_no_view_and_no_incarnation(
        faults in vec((0..COUNT, prop::option::of(0..6u8)), 0..40)
    ) {
        let mut world = whole_cluster(COUNT);
        let view = world.view(0).clone();
        for (node, actions) in faults {
            world.inject(&match actions {
                Some(actions) => Fault::Interrupt(node, actions),
                None => Fault::Restart(node),
            });
            world.run(SECOND);
        }
        world.assert_whole();
        prop_assert_eq!(world.view(0), &view);
    }

    #[test]
    fn cluster_is_whole_after_any_faults(faults in vec(fault(), 0..120)) {
        let mut world = world_after(&faults);
        world.run(15 * SECOND);
        world.assert_whole();
    }

    #[test]
    fn cluster_is_whole_after_rdma_faults_and_quarantine(
        faults in vec(fault_including_rdma(), 0..120)
    ) {
        let mut world = world_after(&faults);
        world.inject(&Fault::RepairRdma);
        world.run_until_whole(400 * SECOND);
    }
}
