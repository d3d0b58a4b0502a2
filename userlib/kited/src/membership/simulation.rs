// SPDX-License-Identifier: GPL-2.0 OR MIT
//! A whole cluster of machines, put through faults in any order.
//!
//! After the faults end, all nodes must come to the same view of all nodes.

mod world;

use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;

use world::{Fault, World};

const SECOND: Duration = Duration::from_secs(1);

fn whole(count: usize) -> World {
    let mut world = World::new(count);
    world.run(SECOND);
    world.assert_whole();
    world
}

#[test]
fn nodes_join() {
    assert_eq!(whole(4).members(0), [1, 2, 3, 4]);
}

#[test]
fn a_dead_node_is_removed_and_returns_under_its_number() {
    let mut world = whole(3);
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
fn a_node_that_leaves_is_removed_at_once() {
    let mut world = whole(3);
    world.fault(&Fault::Leave(2));
    world.settle();
    assert_eq!(world.members(1).len(), 2);
    assert_eq!(world.view(0), world.view(1));
}

#[test]
fn a_suspect_has_less_time() {
    let mut world = whole(3);
    world.fault(&Fault::Pause(2));
    let number = world.number(2);
    world.fault(&Fault::Suspect(1, number));
    world.run(3 * SECOND / 2);
    assert_eq!(world.members(1).len(), 2);
}

#[test]
fn an_answering_suspect_stays() {
    let mut world = whole(3);
    for node in 1..=3 {
        world.fault(&Fault::Suspect(1, node));
        world.fault(&Fault::Suspect(0, node));
    }
    world.run(5 * SECOND);
    world.assert_whole();
}

#[test]
fn survivors_of_the_seed_agree_and_keep_their_lives_when_it_returns() {
    let mut world = whole(4);
    let lives: Vec<u64> = (1..4).map(|node| world.incarnation(node)).collect();
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
        lives,
        (1..4)
            .map(|node| world.incarnation(node))
            .collect::<Vec<_>>()
    );
}

#[test]
fn survivors_who_missed_the_last_view_have_another_until_the_seed_returns() {
    let mut world = whole(4);
    let lives = [1, 2].map(|node| world.incarnation(node));
    world.fault(&Fault::Mute(2));
    world.fault(&Fault::Leave(3));
    world.settle();
    world.crash(0);
    world.run(4 * SECOND);
    let (told, missed) = (world.view(1), world.view(2));
    assert_eq!((told.members.len(), missed.members.len()), (2, 3));
    assert!(told.epoch > missed.epoch, "{told:?} {missed:?}");

    world.start(0);
    world.run(SECOND);
    assert_eq!(world.members(0).len(), 3);
    for node in [1, 2] {
        assert_eq!(world.view(node), world.view(0));
    }
    assert_eq!(lives, [1, 2].map(|node| world.incarnation(node)));
}

#[test]
fn a_seed_that_returns_at_once_is_taken_over_too() {
    let mut world = whole(3);
    let life = world.incarnation(1);
    world.crash(0);
    world.start(0);
    world.run(SECOND);
    world.assert_whole();
    assert_eq!(world.incarnation(1), life);
}

#[test]
fn a_member_that_died_with_the_seed_is_removed_by_the_next() {
    let mut world = whole(4);
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
fn a_paused_node_begins_a_new_life() {
    let mut world = whole(3);
    let former = world.incarnation(1);
    world.fault(&Fault::Pause(1));
    world.run(4 * SECOND);
    assert_eq!(world.members(0).len(), 2);
    world.fault(&Fault::Resume(1));
    world.run(2 * SECOND);
    world.assert_whole();
    assert_ne!(world.incarnation(1), former);
}

#[test]
fn a_cut_connection_is_no_fault() {
    let mut world = whole(3);
    let epoch = world.view(0).epoch;
    world.fault(&Fault::Cut(1));
    world.run(5 * SECOND);
    world.assert_whole();
    assert_eq!(world.view(0).epoch, epoch);
}

/// The lives that nodes are in.
fn lives(world: &World, nodes: &[usize]) -> Vec<u64> {
    nodes.iter().map(|&node| world.incarnation(node)).collect()
}

#[test]
fn who_has_no_rdma_is_put_out_and_comes_back_when_it_has() {
    let mut world = whole(4);
    let (lost, others) = (world.number(2), lives(&world, &[0, 1, 3]));
    world.fault(&Fault::Break(2, 2));
    world.run(3 * SECOND);
    world.assert_whole();
    world.run(5 * SECOND);
    let left = world.members(0);
    assert_eq!(left.len(), 3);
    assert!(!left.contains(&lost), "{left:?}");
    assert_eq!(lives(&world, &[0, 1, 3]), others);
    world.fault(&Fault::Repair);
    world.run(8 * SECOND);
    world.assert_whole();
    assert_eq!(lives(&world, &[0, 1, 3]), others);
}

#[test]
fn who_stays_without_rdma_disturbs_others_ever_less() {
    let mut world = whole(4);
    world.fault(&Fault::Break(2, 2));
    let mut disturbed = || {
        let second = |_: &u32| {
            world.run(SECOND);
            world.members(1).len() == 4
        };
        (0..1200).filter(second).count()
    };
    let (first, later) = (disturbed(), disturbed());
    assert!(first > later, "{first} s, then {later} s");
    assert!(later < 40, "{later} s");
    assert!(later > 0, "it is let in now and then");
}

#[test]
fn others_go_on_without_a_seed_that_has_no_rdma() {
    let mut world = whole(4);
    let others = lives(&world, &[1, 2, 3]);
    world.fault(&Fault::Break(0, 0));
    world.run(8 * SECOND);
    assert_eq!(world.members(0), [1]);
    for node in 1..4 {
        assert_eq!(world.members(node), [2, 3, 4]);
        assert_eq!(world.view(node), world.view(1));
    }
    world.fault(&Fault::Repair);
    world.run(8 * SECOND);
    world.assert_whole();
    assert_eq!(lives(&world, &[1, 2, 3]), others);
}

#[test]
fn of_two_without_rdma_between_them_always_the_same_is_put_out() {
    let mut world = whole(4);
    let one = (1..=2).min_by_key(|&node| world.number(node)).unwrap();
    let others = lives(&world, &[0, one, 3]);
    world.fault(&Fault::Break(1, 2));
    let mut parted = 0;
    for _ in 0..200 {
        world.run(SECOND);
        parted += u32::from(world.members(0).len() == 3);
        assert_eq!(lives(&world, &[0, one, 3]), others);
    }
    assert!(parted > 100, "{parted} s");
}

#[test]
fn rdma_that_is_broken_for_a_moment_is_no_fault() {
    let mut world = whole(3);
    let before = lives(&world, &[0, 1, 2]);
    for _ in 0..10 {
        world.fault(&Fault::Break(1, 1));
        world.run(2 * SECOND);
        world.fault(&Fault::Repair);
        world.run(6 * SECOND);
    }
    world.assert_whole();
    assert_eq!(lives(&world, &[0, 1, 2]), before);
}

#[test]
fn a_node_whose_daemon_is_restarted_keeps_its_life_and_the_view_stays() {
    let mut world = whole(4);
    let (view, before) = (world.view(0).clone(), lives(&world, &[0, 1, 2, 3]));
    for node in [1, 0, 3, 0, 2] {
        world.fault(&Fault::Restart(node));
        world.run(SECOND);
        assert_eq!((world.view(0), world.view(node)), (&view, &view));
    }
    for node in 0..4 {
        world.fault(&Fault::Restart(node));
    }
    world.run(5 * SECOND);
    world.assert_whole();
    assert_eq!(world.view(0), &view);
    assert_eq!(lives(&world, &[0, 1, 2, 3]), before);
}

#[test]
fn members_that_do_not_come_back_to_a_restarted_seed_are_removed() {
    let mut world = whole(3);
    world.crash(2);
    world.fault(&Fault::Restart(0));
    world.run(2 * SECOND);
    assert_eq!(world.members(0).len(), 3, "not before its time");
    world.run(2 * SECOND);
    assert_eq!(world.members(0).len(), 2);
}

#[test]
fn a_follower_whose_restart_takes_too_long_begins_a_new_life() {
    let mut world = whole(3);
    let (former, others) = (world.incarnation(2), lives(&world, &[0, 1]));
    world.fault(&Fault::Pause(2));
    world.fault(&Fault::Cut(2));
    world.run(4 * SECOND);
    world.fault(&Fault::Resume(2));
    world.fault(&Fault::Restart(2));
    world.run(2 * SECOND);
    world.assert_whole();
    assert_ne!(world.incarnation(2), former);
    assert_eq!(lives(&world, &[0, 1]), others);
}

#[test]
fn others_keep_their_lives_if_the_restart_of_the_seed_takes_too_long() {
    let mut world = whole(3);
    let (former, others) = (world.incarnation(0), lives(&world, &[1, 2]));
    world.fault(&Fault::Pause(0));
    (1..3).for_each(|node| world.fault(&Fault::Cut(node)));
    world.run(4 * SECOND);
    assert_eq!(world.members(1).len(), 2);
    world.nodes[0].paused = false;
    world.fault(&Fault::Restart(0));
    world.run(2 * SECOND);
    world.assert_whole();
    assert_ne!(world.incarnation(0), former);
    assert_eq!(lives(&world, &[1, 2]), others);
}

const COUNT: usize = 4;

fn fault() -> impl Strategy<Value = Fault> {
    let node = 0..COUNT;
    prop_oneof![
        8 => (1..16u8).prop_map(Fault::Pass),
        16 => (node.clone(), 1..8u8).prop_map(|(n, c)| Fault::Deliver(n, c)),
        2 => node.clone().prop_map(Fault::Crash),
        2 => node.clone().prop_map(Fault::Start),
        1 => node.clone().prop_map(Fault::Leave),
        2 => node.clone().prop_map(Fault::Restart),
        2 => (node.clone(), 0..6u8).prop_map(|(n, a)| Fault::Interrupt(n, a)),
        1 => node.clone().prop_map(Fault::Pause),
        2 => node.clone().prop_map(Fault::Resume),
        1 => (1..COUNT).prop_map(Fault::Cut),
        1 => (1..COUNT).prop_map(Fault::Mute),
        1 => (node, 0..6u32).prop_map(|(n, o)| Fault::Suspect(n, o)),
    ]
}

fn fault_also_of_rdma() -> impl Strategy<Value = Fault> {
    prop_oneof![
        36 => fault(),
        1 => (0..COUNT, 0..COUNT).prop_map(|(n, o)| Fault::Break(n, o)),
        1 => Just(Fault::Repair),
    ]
}

/// A world in which all this happened, and then all nodes run.
fn after(faults: &[Fault]) -> World {
    let mut world = World::new(COUNT);
    for fault in faults {
        world.fault(fault);
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
    fn restarts_in_time_change_no_view_and_no_life(
        faults in vec((0..COUNT, prop::option::of(0..6u8)), 0..40)
    ) {
        let mut world = whole(COUNT);
        let view = world.view(0).clone();
        for (node, actions) in faults {
            world.fault(&match actions {
                Some(actions) => Fault::Interrupt(node, actions),
                None => Fault::Restart(node),
            });
            world.run(SECOND);
        }
        world.assert_whole();
        prop_assert_eq!(world.view(0), &view);
    }

    #[test]
    fn after_any_faults_the_cluster_becomes_whole(faults in vec(fault(), 0..120)) {
        let mut world = after(&faults);
        world.run(15 * SECOND);
        world.assert_whole();
    }

    #[test]
    fn after_faults_of_rdma_too_it_becomes_whole_when_those_put_out_have_waited(
        faults in vec(fault_also_of_rdma(), 0..120)
    ) {
        let mut world = after(&faults);
        world.fault(&Fault::Repair);
        world.run_until_whole(400 * SECOND);
    }
}
