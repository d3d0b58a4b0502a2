// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Hostile users: no request of theirs harms the kernel or other users.

use std::time::Duration;

use kite_cluster::{Cluster, Node, Result, Setup, SharedCluster, Turn};

static PAIR: SharedCluster = SharedCluster::new(|| Cluster::builder().name("abuse").nodes(2));

const SOON: Duration = Duration::from_secs(30);
const LONG: Duration = Duration::from_secs(900);

/// Gauges of an idle node. The sessions are those of kited and of the reader.
const IDLE: &str = "sessions=2 open_handles=0 inflight=0 regions=0 lent_bytes=0";

fn pair() -> Result<Turn<'static>> {
    let pair = PAIR.take()?;
    pair.start_kite(&Setup::default())?;
    Ok(pair)
}

fn is_well(cluster: &Cluster) -> Result<()> {
    for node in cluster.nodes() {
        node.await_gauges(IDLE, SOON)?;
    }
    cluster
        .node(1)
        .kite("alloc well 9000000 --node 1 --node 2")?;
    let written = cluster.node(1).workload("fill well").sh()?;
    assert_eq!(cluster.node(2).workload("digest well").sh()?, written);
    cluster.node(2).kite("free well")?;
    cluster.check()
}

fn fuzz(node: &Node, requests: u32, seed: u32) -> Result<String> {
    let line = format!("fuzz --requests {requests} --seed {seed}");
    node.workload(&line).user("alice").limit(LONG).sh()
}

#[test]
#[ignore = "long"]
fn random_requests_leave_kernel_and_other_users_intact() -> Result<()> {
    let pair = pair()?;
    let report = fuzz(pair.node(1), 200_000, 1)?;
    // Some requests succeeded, so the requests passed the checks of arguments.
    let worked = report
        .lines()
        .find(|line| line.ends_with(" OK"))
        .expect(&report);
    let count: u32 = worked.split_whitespace().next().unwrap().parse().unwrap();
    assert!(count > 5000, "{report}");
    is_well(&pair)
}

#[test]
#[ignore = "long"]
fn random_requests_of_two_nodes_leave_both_kernels_intact() -> Result<()> {
    let pair = pair()?;
    let start = |n: usize| {
        let line = format!("fuzz --requests 30000 --no-sweep --seed {}", n + 100);
        pair.node(n).workload(&line).user("alice").spawn()
    };
    let mut fuzzers = [start(1)?, start(2)?];
    for fuzzer in &mut fuzzers {
        let output = fuzzer.wait(LONG)?;
        assert!(output.success(), "{output:#?}");
    }
    fuzz(pair.node(1), 0, 0)?;
    is_well(&pair)
}

#[test]
#[ignore = "long"]
fn killed_process_with_random_requests_leaks_nothing() -> Result<()> {
    let pair = pair()?;
    for seed in 200..205 {
        let line = format!("fuzz --requests 10000000 --seed {seed}");
        let mut fuzzer = pair.node(2).workload(&line).user("alice").spawn()?;
        fuzzer.read_until("2000 requests", LONG)?;
        fuzzer.kill()?;
    }
    fuzz(pair.node(1), 0, 0)?;
    is_well(&pair)
}

#[test]
#[ignore = "long"]
fn random_requests_without_a_cluster_leave_the_kernel_intact() -> Result<()> {
    let pair = pair()?;
    pair.node(2).stop_kited()?;
    fuzz(pair.node(2), 30_000, 2)?;
    pair.start_kite(&Setup::default())?;
    is_well(&pair)
}
