// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Named scenarios of a simulated cluster.

use std::time::Duration;

use super::cluster::SimCluster;
use super::fault::Fault;
use crate::protocol::SEED_NODE;

const SECOND: Duration = Duration::from_secs(1);

/// Returns a cluster in which all hosts have joined. Host N has number N + 1.
fn whole_cluster(count: usize) -> SimCluster {
    let mut cluster = SimCluster::new(count);
    for host in 0..count {
        cluster.start(host);
        cluster.run(4 * SECOND);
        assert_eq!(cluster.number(host) as usize, host + 1);
    }
    assert!(cluster.is_whole());
    cluster
}

/// Asserts that the cluster becomes whole within `limit` and that no incarnation but those of `changed` has changed.
fn assert_heals(cluster: &mut SimCluster, before: &[u64], changed: &[usize], limit: Duration) {
    cluster.heal();
    cluster.run_until_whole(limit);
    for (host, (now, before)) in cluster.incarnations().iter().zip(before).enumerate() {
        assert_eq!(now != before, changed.contains(&host), "host {host}");
    }
}

/// Returns the epochs in which the hosts were admitted last, in the view of host 1.
fn admissions(cluster: &SimCluster) -> Vec<u64> {
    let members = cluster.view(1).members.iter();
    members.map(|m| m.admitted_epoch).collect()
}

#[test]
fn loss_of_tcp_alone_changes_no_view() {
    for hosts in [&[0][..], &[1], &[1, 2, 3]] {
        let mut cluster = whole_cluster(4);
        let (view, before) = (cluster.view(0).clone(), cluster.incarnations());
        let cut = |host: &&usize| {
            if **host == 0 {
                vec![1, 2, 3]
            } else {
                vec![**host]
            }
        };
        for follower in hosts.iter().flat_map(|host| cut(&host)) {
            cluster.cut_tcp(follower, true, true);
        }
        cluster.run(60 * SECOND);
        for host in 0..4 {
            assert_eq!(cluster.view(host), &view);
        }
        assert_heals(&mut cluster, &before, &[], 10 * SECOND);
        assert_eq!(cluster.view(0), &view);
    }
}

#[test]
fn isolated_node_is_fenced_and_returns_in_its_incarnation() {
    let mut cluster = whole_cluster(4);
    let before = cluster.incarnations();
    cluster.inject(Fault::Isolate(2));
    cluster.run(3 * SECOND);
    assert_eq!(cluster.reachable(0).len(), 4, "not before the dead timeout");
    cluster.run(9 * SECOND);
    for host in [0, 1, 3] {
        assert_eq!(cluster.reachable(host), [1, 2, 4]);
    }
    assert_eq!(cluster.reachable(2), [3], "its local users do not wait");
    assert_heals(&mut cluster, &before, &[], 10 * SECOND);
    let admitted = admissions(&cluster);
    assert!(admitted[2] > admitted[3], "{admitted:?}");
}

#[test]
fn isolated_seed_and_its_survivors_return_in_their_incarnations() {
    let mut cluster = whole_cluster(4);
    let before = cluster.incarnations();
    cluster.inject(Fault::Isolate(0));
    cluster.run(12 * SECOND);
    assert_eq!(cluster.reachable(0), [1]);
    for host in 1..4 {
        assert_eq!(cluster.reachable(host), [2, 3, 4]);
        assert_eq!(cluster.view(host), cluster.view(1));
    }
    assert_heals(&mut cluster, &before, &[], 15 * SECOND);
}

#[test]
fn seed_marked_by_survivors_is_admitted_again_and_no_survivor_is() {
    let mut cluster = whole_cluster(4);
    let (before, admitted) = (cluster.incarnations(), admissions(&cluster));
    cluster.inject(Fault::Pause(0));
    for host in 1..4 {
        cluster.inject(Fault::CutRdma(0, host, true, true));
    }
    cluster.run(12 * SECOND);
    assert_eq!(cluster.reachable(2), [2, 3, 4]);
    assert_heals(&mut cluster, &before, &[], 10 * SECOND);
    let now = admissions(&cluster);
    assert!(now[0] > admitted[0]);
    assert_eq!(now[1..], admitted[1..]);
}

#[test]
fn short_cut_of_rdma_between_two_nodes_ends_no_incarnation() {
    for seconds in [1, 3, 10, 30] {
        let mut cluster = whole_cluster(3);
        let before = cluster.incarnations();
        cluster.inject(Fault::CutRdma(1, 2, true, seconds % 2 == 0));
        cluster.run(seconds * SECOND);
        assert_heals(&mut cluster, &before, &[], 60 * SECOND);
    }
}

#[test]
fn reports_about_a_node_that_replies_to_probes_fence_no_node() {
    let mut cluster = whole_cluster(3);
    let members = cluster.view(0).members.clone();
    for _ in 0..60 {
        cluster.suspect(1, 3);
        cluster.run(SECOND);
    }
    assert!(cluster.view(0).epoch < 60, "{}", cluster.view(0).epoch);
    assert_eq!(cluster.view(0).members, members);
}

#[test]
fn paused_daemon_stays_reachable_until_a_view_waits_for_it() {
    for host in [0, 1] {
        let mut cluster = whole_cluster(3);
        let (view, before) = (cluster.view(0).clone(), cluster.incarnations());
        cluster.inject(Fault::Pause(host));
        cluster.run(40 * SECOND);
        cluster.inject(Fault::Resume(host));
        cluster.run(10 * SECOND);
        assert_eq!(cluster.view(2), &view);
        assert_heals(&mut cluster, &before, &[], SECOND);
    }
    let mut cluster = whole_cluster(4);
    cluster.inject(Fault::Pause(1));
    cluster.inject(Fault::Leave(3));
    let before = cluster.incarnations();
    cluster.run(14 * SECOND);
    assert_eq!(cluster.reachable(0), [1, 2, 3]);
    cluster.run(4 * SECOND);
    assert_eq!(
        cluster.reachable(0),
        [1, 3],
        "the kernel of node 2 has an old view"
    );
    assert_heals(&mut cluster, &before, &[3], 10 * SECOND);
}

#[test]
fn blocked_kernel_is_fenced_and_admitted_when_it_has_applied_the_view() {
    let mut cluster = whole_cluster(4);
    cluster.inject(Fault::BlockApply(1));
    cluster.inject(Fault::Leave(3));
    let before = cluster.incarnations();
    cluster.run(17 * SECOND);
    let epoch = cluster.view(0).epoch;
    assert_eq!(cluster.reachable(0), [1, 3]);
    cluster.run(60 * SECOND);
    assert_eq!(
        cluster.view(0).epoch,
        epoch,
        "not admitted while it is blocked"
    );
    assert_heals(&mut cluster, &before, &[3], 10 * SECOND);
}

#[test]
fn reset_seed_keeps_the_incarnations_of_all_others_in_any_order_of_arrivals() {
    for first in [1, 4] {
        let mut cluster = whole_cluster(4);
        cluster.hosts.push(Default::default());
        let before = cluster.incarnations();
        cluster.inject(Fault::Reset(0, true));
        cluster.run(12 * SECOND);
        assert_eq!(cluster.reachable(2), [2, 3, 4]);
        (1..4).for_each(|host| cluster.inject(Fault::Pause(host)));
        cluster.start(0);
        match first {
            4 => cluster.start(4),
            host => cluster.inject(Fault::Resume(host)),
        }
        cluster.run(5 * SECOND);
        assert_heals(&mut cluster, &before, &[0, 4], 10 * SECOND);
        assert_eq!(cluster.number(4), 5);
    }
}

#[test]
fn seed_without_state_waits_for_survivors_before_a_new_node_joins() {
    let mut cluster = whole_cluster(4);
    cluster.hosts.push(Default::default());
    cluster.is_state_lost = true;
    let (before, epoch) = (cluster.incarnations(), cluster.view(1).epoch);
    cluster.inject(Fault::Reset(0, true));
    cluster.hosts[0].state = None;
    cluster.run(12 * SECOND);
    (1..4).for_each(|host| cluster.inject(Fault::Pause(host)));
    cluster.start(0);
    cluster.start(4);
    cluster.run(SECOND);
    assert!(cluster.hosts[4].kernel.is_none());
    assert_heals(&mut cluster, &before, &[0, 4], 10 * SECOND);
    let now = cluster.view(1).epoch;
    assert!(
        now > epoch + (1 << 20),
        "{now}: no epoch of the former seed is used again"
    );
}

#[test]
fn survivors_of_a_lost_cluster_are_rejected_but_continue() {
    let mut cluster = whole_cluster(3);
    cluster.hosts.push(Default::default());
    cluster.is_state_lost = true;
    let before = cluster.incarnations();
    (1..3).for_each(|host| cluster.inject(Fault::Pause(host)));
    cluster.inject(Fault::Reset(0, true));
    cluster.hosts[0].state = None;
    cluster.start(0);
    cluster.start(3);
    cluster.run(4 * SECOND);
    assert_eq!(cluster.reachable(0), [1, 2], "a new cluster");
    (1..3).for_each(|host| cluster.inject(Fault::Resume(host)));
    cluster.run(20 * SECOND);
    assert_eq!(cluster.incarnations()[1..3], before[1..3]);
    assert_eq!(cluster.reachable(1), [2, 3], "the dead seed is given up");
}

#[test]
fn silently_reset_node_joins_with_its_number() {
    let mut cluster = whole_cluster(3);
    let before = cluster.incarnations();
    cluster.inject(Fault::Reset(1, true));
    cluster.start(1);
    cluster.run(SECOND);
    assert!(
        cluster.hosts[1].kernel.is_none(),
        "its old connection may be alive"
    );
    assert_heals(&mut cluster, &before, &[1], 10 * SECOND);
    assert_eq!(cluster.number(1), 2);
}

#[test]
fn leaving_node_is_removed_at_once() {
    let mut cluster = whole_cluster(3);
    cluster.inject(Fault::Leave(2));
    cluster.deliver_all();
    for host in 0..2 {
        assert_eq!(cluster.view(host).members.len(), 2);
    }
    cluster.inject(Fault::Leave(0));
    cluster.deliver_all();
    assert_eq!(cluster.view(1).find_member(SEED_NODE), None);
}

#[test]
fn node_without_rdma_is_fenced_ever_more_rarely_admitted_and_returns() {
    let mut cluster = whole_cluster(4);
    let before = cluster.incarnations();
    for host in [0, 1, 3] {
        cluster.inject(Fault::CutRdma(2, host, true, true));
    }
    cluster.run(12 * SECOND);
    assert_eq!(cluster.reachable(1), [1, 2, 4]);
    assert_eq!(cluster.reachable(2), [3]);
    let mut reachable_seconds = || {
        let second = |_: &u32| {
            cluster.run(SECOND);
            cluster.reachable(1).len() == 4
        };
        (0..1200).filter(second).count()
    };
    let (first, later) = (reachable_seconds(), reachable_seconds());
    assert!(first > later, "{first} s, then {later} s");
    assert!((1..60).contains(&later), "{later} s");
    assert_heals(&mut cluster, &before, &[], 320 * SECOND);
}

#[test]
fn members_continue_without_a_seed_without_rdma() {
    let mut cluster = whole_cluster(4);
    let (before, admitted) = (cluster.incarnations(), admissions(&cluster));
    for host in 1..4 {
        cluster.inject(Fault::CutRdma(0, host, true, true));
    }
    cluster.run(11 * SECOND);
    assert_eq!(cluster.reachable(0), [1]);
    for host in 1..4 {
        assert_eq!(cluster.reachable(host), [2, 3, 4]);
        assert_eq!(cluster.view(host), cluster.view(1));
    }
    assert_heals(&mut cluster, &before, &[], 20 * SECOND);
    let now = admissions(&cluster);
    assert!(now[0] > admitted[0]);
    assert_eq!(now[1..], admitted[1..]);
}

#[test]
fn full_disk_of_the_seed_delays_views_and_fences_no_node() {
    let mut cluster = whole_cluster(3);
    cluster.hosts.push(Default::default());
    let before = cluster.incarnations();
    cluster.inject(Fault::FillDisk(0));
    cluster.start(3);
    cluster.run(60 * SECOND);
    assert!(cluster.hosts[3].kernel.is_none(), "its number is not saved");
    for host in 0..3 {
        assert_eq!(cluster.reachable(host), [1, 2, 3]);
    }
    assert_heals(&mut cluster, &before, &[3], 10 * SECOND);
}

#[test]
fn daemon_restart_keeps_the_view() {
    let mut cluster = whole_cluster(4);
    let (view, before) = (cluster.view(0).clone(), cluster.incarnations());
    for host in [1, 0, 3, 0, 2] {
        cluster.inject(Fault::Kill(host));
        cluster.start(host);
        cluster.run(2 * SECOND);
        assert_eq!((cluster.view(0), cluster.view(host)), (&view, &view));
    }
    (0..4).for_each(|host| cluster.inject(Fault::Kill(host)));
    cluster.run(30 * SECOND);
    assert_heals(&mut cluster, &before, &[], 10 * SECOND);
    assert_eq!(cluster.view(0), &view);
}

/// Returns the features of all members in the view of a host.
fn features(cluster: &SimCluster, host: usize) -> Vec<u64> {
    let members = cluster.view(host).members.iter();
    members.map(|m| m.features).collect()
}

#[test]
fn nodes_upgraded_one_at_a_time_end_no_other_incarnation_and_keep_all_features() {
    let mut cluster = whole_cluster(3);
    let mut expected = vec![1, 2, 3];
    assert_eq!(features(&cluster, 1), expected);
    for host in [2, 1, 0] {
        let before = cluster.incarnations();
        cluster.inject(Fault::Leave(host));
        cluster.deliver_all();
        cluster.hosts[host].is_upgraded = true;
        cluster.start(host);
        assert_heals(&mut cluster, &before, &[host], 10 * SECOND);
        expected[host] = u64::MAX;
        for host in 0..3 {
            assert_eq!(features(&cluster, host), expected, "view of host {host}");
        }
    }
}

#[test]
fn most_members_silent_on_tcp_are_kept_if_the_seed_reaches_them_by_rdma() {
    let mut cluster = whole_cluster(5);
    let view = cluster.view(0).clone();
    for follower in 2..5 {
        cluster.cut_tcp(follower, true, true);
        // Node 2, the only prober besides the seed, has no RDMA with them.
        cluster.inject(Fault::CutRdma(1, follower, true, true));
    }
    cluster.has_reports = false;
    cluster.run(30 * SECOND);
    assert_eq!(cluster.view(0), &view);
}

/// Runs a cluster of four until a member is unreachable, for at most 15 s. The kernels report only these pairs of host
/// and node, once per second.
fn run_with_reports(faults: &[Fault], reports: &[(usize, u32)]) -> SimCluster {
    let mut cluster = whole_cluster(4);
    cluster.has_reports = false;
    faults.iter().for_each(|&fault| cluster.inject(fault));
    for _ in 0..15 {
        for &(host, node) in reports {
            cluster.suspect(host, node);
        }
        cluster.run(SECOND);
        if cluster.reachable(0).len() < 4 {
            break;
        }
    }
    cluster
}

#[test]
fn node_without_rdma_is_fenced_although_only_one_other_node_reports_it() {
    let faults = [0, 2, 3].map(|host| Fault::CutRdma(1, host, true, true));
    for reports in [&[(1, 4), (3, 2)][..], &[(1, 4)], &[(3, 2)]] {
        let cluster = run_with_reports(&faults, reports);
        assert_eq!(cluster.reachable(0), [1, 3, 4], "{reports:?}");
    }
}

#[test]
fn reports_that_probes_refute_do_not_fence_the_node_in_place_of_its_broken_peer() {
    let faults = [2, 3].map(|host| Fault::CutRdma(1, host, true, true));
    let cluster = run_with_reports(&faults, &[(1, 4), (3, 2), (0, 4), (2, 4)]);
    assert_eq!(cluster.reachable(0), [1, 3, 4]);
}

#[test]
fn broken_path_between_two_nodes_fences_the_one_that_was_admitted_last() {
    for reports in [&[(1, 4), (3, 2)][..], &[(1, 4)], &[(3, 2)]] {
        let cluster = run_with_reports(&[Fault::CutRdma(1, 3, true, true)], reports);
        assert_eq!(cluster.reachable(0), [1, 2, 3], "{reports:?}");
    }
}

#[test]
fn seed_without_rdma_is_fenced_in_place_of_the_node_that_it_reports() {
    let faults = [1, 2, 3].map(|host| Fault::CutRdma(0, host, true, true));
    let cluster = run_with_reports(&faults, &[(0, 4)]);
    assert_eq!(cluster.reachable(0), [1]);
    assert_eq!(cluster.reachable(3), [2, 3, 4]);
}
