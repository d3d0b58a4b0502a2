// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Random schedules of faults. The simulated kernels check each step, and at the end all nodes are reachable again.

use proptest::collection::vec;
use proptest::prelude::*;

use super::cluster::SimCluster;
use super::fault::Fault;
use super::{whole_cluster, SECOND};

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
        1 => node.clone().prop_map(Fault::CutTcp),
        2 => node.clone().prop_map(Fault::HealTcp),
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
        cluster.inject(&Fault::HealTcp(node));
        cluster.start(node);
    }
    cluster
}

/// Returns the number of schedules per test, of which `KITE_SCHEDULES` selects more.
fn schedules() -> u32 {
    let selected = std::env::var("KITE_SCHEDULES").ok();
    selected
        .and_then(|count| count.parse().ok())
        .unwrap_or(5_000)
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
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(schedules()) })]

    /// The simulated kernels check that no incarnation ends meanwhile but that of a crash.
    #[test]
    fn cluster_is_whole_after_any_faults(faults in vec(fault(), 0..120)) {
        let mut cluster = cluster_after(&faults);
        cluster.run_until_whole(60 * SECOND);
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
