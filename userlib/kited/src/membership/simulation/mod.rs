// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Simulation of a cluster of state machines, with faults in any order.
//!
//! After the last fault, all nodes must reach the same view of all nodes.

mod cluster;
mod fault;
mod node;
mod schedules;

use std::time::Duration;

use cluster::SimCluster;
use fault::Fault;

const SECOND: Duration = Duration::from_secs(1);

fn whole_cluster(count: usize) -> SimCluster {
    let mut cluster = SimCluster::new(count);
    // The seed defers new nodes at first.
    cluster.run(3 * SECOND);
    cluster.assert_whole();
    cluster
}

#[test]
fn nodes_that_start_join_the_cluster() {
    assert_eq!(whole_cluster(4).members(0), [1, 2, 3, 4]);
}

#[test]
fn crashed_node_is_unreachable_and_returns_with_its_number() {
    let mut cluster = whole_cluster(3);
    let former = cluster.incarnation(1);
    cluster.crash(1);
    cluster.run(2 * SECOND);
    assert_eq!(cluster.members(0).len(), 3, "not before the dead timeout");
    cluster.run(4 * SECOND);
    assert_eq!(cluster.members(2).len(), 2);
    assert_eq!(cluster.view(2).members.len(), 3);
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
fn suspected_node_without_tcp_and_rdma_is_unreachable_early() {
    let mut cluster = whole_cluster(3);
    cluster.inject(&Fault::Pause(2));
    cluster.inject(&Fault::BreakRdma(2, 2));
    let number = cluster.number(2);
    cluster.inject(&Fault::Suspect(1, number));
    cluster.run(7 * SECOND / 2);
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
    cluster.run(6 * SECOND);
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
    cluster.run(6 * SECOND);
    assert_eq!((cluster.members(1).len(), cluster.members(2).len()), (2, 3));
    let (latest, missed) = (cluster.view(1), cluster.view(2));
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
fn seed_that_restarts_at_once_continues_with_the_members() {
    for state_is_lost in [false, true] {
        let mut cluster = whole_cluster(3);
        let before = incarnations(&cluster, &[1, 2]);
        cluster.crash(0);
        if state_is_lost {
            cluster.inject(&Fault::LoseState);
        }
        cluster.start(0);
        cluster.run(SECOND);
        cluster.assert_whole();
        assert_eq!(incarnations(&cluster, &[1, 2]), before);
    }
}

#[test]
fn restarted_seed_keeps_members_that_connect_after_a_new_node() {
    let mut cluster = whole_cluster(3);
    cluster.crash(2);
    let before = cluster.incarnation(1);
    cluster.inject(&Fault::CutTcp(1));
    cluster.crash(0);
    cluster.start(0);
    cluster.start(2);
    cluster.run(4 * SECOND);
    assert!(cluster.members(2).contains(&cluster.number(2)));
    cluster.inject(&Fault::HealTcp(1));
    cluster.run(2 * SECOND);
    cluster.assert_whole();
    assert_eq!(cluster.incarnation(1), before);
}

#[test]
fn member_that_crashed_with_the_seed_is_unreachable_for_the_next_seed() {
    let mut cluster = whole_cluster(4);
    cluster.crash(0);
    cluster.crash(3);
    cluster.run(4 * SECOND);
    cluster.start(0);
    cluster.run(SECOND);
    assert_eq!(cluster.members(1).len(), 4, "reachable at first");
    cluster.run(5 * SECOND);
    assert_eq!(cluster.members(1).len(), 3);
}

#[test]
fn paused_daemon_whose_kernel_replies_by_rdma_changes_no_view() {
    let mut cluster = whole_cluster(3);
    let view = cluster.view(0).clone();
    cluster.inject(&Fault::Pause(1));
    cluster.run(30 * SECOND);
    assert_eq!(cluster.view(0), &view);
    cluster.inject(&Fault::Resume(1));
    cluster.run(2 * SECOND);
    cluster.assert_whole();
    assert_eq!(cluster.view(0), &view);
}

#[test]
fn paused_daemon_that_misses_a_view_is_unreachable_until_it_continues() {
    let mut cluster = whole_cluster(3);
    let before = incarnations(&cluster, &[0, 1]);
    cluster.inject(&Fault::Pause(1));
    cluster.inject(&Fault::Leave(2));
    cluster.run(10 * SECOND);
    assert_eq!(cluster.members(0).len(), 2, "reachable for five timeouts");
    cluster.run(15 * SECOND);
    assert_eq!(cluster.members(0), [1]);
    cluster.inject(&Fault::Resume(1));
    cluster.start(2);
    cluster.run(3 * SECOND);
    cluster.assert_whole();
    assert_eq!(incarnations(&cluster, &[0, 1]), before);
}

/// Cuts nodes from TCP, and from RDMA if `rdma`, for some time. Returns the epochs before, during and after the cut.
fn cut(nodes: &[usize], rdma: bool, time: Duration) -> [u64; 3] {
    let mut cluster = whole_cluster(4);
    let before = incarnations(&cluster, &[0, 1, 2, 3]);
    let epoch = cluster.view(3).epoch;
    for &node in nodes {
        cluster.inject(&Fault::CutTcp(node));
        if rdma {
            cluster.inject(&Fault::BreakRdma(node, node));
        }
    }
    cluster.run(time);
    let during = cluster.view(3).epoch;
    cluster.inject(&Fault::RepairRdma);
    nodes
        .iter()
        .for_each(|&node| cluster.inject(&Fault::HealTcp(node)));
    cluster.run_until_whole(10 * SECOND);
    assert_eq!(incarnations(&cluster, &[0, 1, 2, 3]), before, "{nodes:?}");
    [epoch, during, cluster.view(3).epoch]
}

#[test]
fn cut_of_tcp_alone_changes_no_view() {
    for nodes in [&[0][..], &[1], &[1, 2], &[0, 1, 2]] {
        for seconds in [1, 6, 12] {
            let [before, during, after] = cut(nodes, false, seconds * SECOND);
            assert_eq!((during, after), (before, before), "{nodes:?}, {seconds} s");
        }
    }
}

#[test]
fn cut_of_both_networks_marks_nodes_and_ends_no_incarnation() {
    for nodes in [&[0][..], &[1], &[1, 2], &[0, 1, 2]] {
        let [before, during, after] = cut(nodes, true, 8 * SECOND);
        assert!(before < during && during < after, "{nodes:?}");
    }
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
fn node_without_rdma_is_unreachable_and_returns_after_repair() {
    let mut cluster = whole_cluster(4);
    let all = incarnations(&cluster, &[0, 1, 2, 3]);
    let isolated = cluster.number(2);
    cluster.inject(&Fault::BreakRdma(2, 2));
    cluster.run(3 * SECOND);
    cluster.assert_whole();
    cluster.run(5 * SECOND);
    let left = cluster.members(0);
    assert_eq!(left.len(), 3);
    assert!(!left.contains(&isolated), "{left:?}");
    cluster.inject(&Fault::RepairRdma);
    cluster.run(8 * SECOND);
    cluster.assert_whole();
    assert_eq!(incarnations(&cluster, &[0, 1, 2, 3]), all);
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
    let all = incarnations(&cluster, &[0, 1, 2, 3]);
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
    assert_eq!(incarnations(&cluster, &[0, 1, 2, 3]), all);
}

#[test]
fn of_two_nodes_without_rdma_the_same_is_unreachable_each_time() {
    let mut cluster = whole_cluster(4);
    let one = (1..=2).min_by_key(|&node| cluster.number(node)).unwrap();
    let all = incarnations(&cluster, &[0, 1, 2, 3]);
    let isolated = cluster.number(3 - one);
    cluster.inject(&Fault::BreakRdma(1, 2));
    let mut isolated_seconds = 0;
    for _ in 0..200 {
        cluster.run(SECOND);
        isolated_seconds += u32::from(!cluster.members(0).contains(&isolated));
        assert!(cluster.members(0).len() >= 3);
    }
    assert!(isolated_seconds > 100, "{isolated_seconds} s");
    assert_eq!(incarnations(&cluster, &[0, 1, 2, 3]), all);
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
fn members_that_do_not_reconnect_to_a_restarted_seed_are_unreachable() {
    let mut cluster = whole_cluster(3);
    cluster.crash(2);
    cluster.inject(&Fault::Restart(0));
    cluster.run(2 * SECOND);
    assert_eq!(cluster.members(0).len(), 3, "not before the dead timeout");
    cluster.run(4 * SECOND);
    assert_eq!(cluster.members(0).len(), 2);
}

#[test]
fn slow_restart_of_a_daemon_keeps_all_incarnations_and_the_view() {
    for node in [0, 2] {
        let mut cluster = whole_cluster(3);
        let all = incarnations(&cluster, &[0, 1, 2]);
        let view = cluster.view(1).clone();
        cluster.inject(&Fault::Pause(node));
        (1..3).for_each(|other| cluster.inject(&Fault::Disconnect(other)));
        cluster.run(8 * SECOND);
        cluster.nodes[node].paused = false;
        cluster.inject(&Fault::Restart(node));
        cluster.run(2 * SECOND);
        cluster.assert_whole();
        assert_eq!(incarnations(&cluster, &[0, 1, 2]), all);
        assert_eq!(cluster.view(1), &view);
    }
}
