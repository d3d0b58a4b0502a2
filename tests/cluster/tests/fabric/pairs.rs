// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Connections that two nodes share.

use std::time::Duration;

use kite_cluster::{until, Cluster, Node, Process, Result, Setup, SharedCluster};

static TRIO: SharedCluster = SharedCluster::new(|| Cluster::builder().name("pairs").nodes(3));

const SOON: Duration = Duration::from_secs(30);
const LONG: Duration = Duration::from_secs(300);

/// Restarts kite on the first `N` nodes, so that counters start at zero, with parameters for each.
fn start<const N: usize>(cluster: &Cluster, parameters: [String; N]) -> Result<()> {
    for node in cluster.nodes() {
        node.stop_kited()?;
        node.unload("kite")?;
    }
    for ((number, node), parameters) in (1..).zip(cluster.nodes()).zip(parameters) {
        let setup = Setup {
            parameters,
            ..Setup::default()
        };
        node.start_kite(number, &setup)?;
    }
    cluster.await_members(N)
}

/// Returns the number of connected queue pairs.
fn connected(node: &Node) -> Result<u64> {
    let stats = node.stats()?;
    Ok(stats["qp_connects"] - stats["qp_errors"])
}

#[test]
#[ignore = "long"]
fn peers_with_different_conns_per_peer_use_the_smaller() -> Result<()> {
    let cluster = TRIO.take()?;
    for (pairs, shared) in [([1, 4], 1), ([16, 1], 1), ([2, 4], 2), ([4, 2], 2)] {
        start(
            &cluster,
            pairs.map(|pairs| format!("conns_per_peer={pairs}")),
        )?;
        let bad = |number: usize| -> Result<u64> {
            Ok(cluster.node(number).stats()?["malformed_messages"])
        };
        let before = [bad(1)?, bad(2)?];
        for (number, node) in (1..).zip(cluster.nodes()).take(2) {
            let (status, own) = (node.kite("status")?, pairs[number - 1]);
            let shown =
                format!("module:  conns_per_peer={own} max_idle_conns=256 max_inflight=256 ");
            assert!(status.starts_with(&shown), "{status}");
            // Each processor has a connection of its own, if there are enough.
            for processor in [1, 0] {
                let got = node.sh(&format!(
                    "taskset -c {processor} /kite/target/release/kite-workload \
                     attempt alloc 5000 --nodes {}",
                    3 - number
                ))?;
                assert_eq!(got, "OK", "{pairs:?}: node {number}");
            }
        }
        for node in cluster.nodes().iter().take(2) {
            until("all to be connected", SOON, || {
                Ok(connected(node)? == shared)
            })?;
        }
        assert_eq!([bad(1)?, bad(2)?], before, "{pairs:?}");
    }
    cluster.start_kite(&Setup::default())
}

/// Accesses a region of the other node from a processor `times` times, with pauses of about `ms`.
fn access_periodically(node: &Node, processor: u32, times: u32, ms: [u32; 2]) -> Result<Process> {
    let [least, most] = ms;
    node.spawn(&format!(
        "for i in $(seq {times}); do \
             taskset -c {processor} /kite/target/release/kite get far /dev/null || exit; \
             sleep $(awk -v seed=$RANDOM 'BEGIN {{ srand(seed); \
                 print ({least} + rand() * ({most} - {least})) / 1000 }}'); \
         done"
    ))
}

/// The limit of either side evicts connections: both agree to close those that neither uses.
#[test]
#[ignore = "long"]
fn idle_connections_over_the_limit_are_evicted() -> Result<()> {
    let cluster = TRIO.take()?;
    let bound = |connections: u32| format!("max_idle_conns={connections}");
    for bounds in [[0, 256], [256, 0]] {
        start(&cluster, bounds.map(bound))?;
        let (one, two) = (cluster.node(1), cluster.node(2));
        for round in 1..=2 {
            let qp_evictions = two.stats()?["qp_evictions"];
            one.kite("alloc far 9000 --node 2")?;
            for node in [one, two] {
                node.await_gauges("connected_qps=0", SOON)?;
            }
            let parted = two.stats()?["qp_evictions"];
            assert!(
                parted > qp_evictions,
                "{bounds:?}: {parted} in round {round}"
            );
            // An access of each side connects again.
            one.kite("get far /dev/null")?;
            two.kite("get far /dev/null")?;
            one.kite("free far")?;
        }
        for node in [one, two] {
            let stats = node.stats()?;
            for counter in ["qp_errors", "retries", "errors"] {
                assert_eq!(stats[counter], 0, "{counter}, {bounds:?}");
            }
        }
    }
    cluster.start_kite(&Setup::default())
}

/// A connection that is requested during its eviction is established again, and the request succeeds.
#[test]
#[ignore = "long"]
fn connection_requested_during_eviction_is_established() -> Result<()> {
    let cluster = TRIO.take()?;
    start(&cluster, [(); 2].map(|()| "max_idle_conns=0".into()))?;
    let (one, two) = (cluster.node(1), cluster.node(2));
    one.kite("alloc far 9000 --node 2")?;
    one.kite("alloc near 9000")?;
    two.kite("get near /dev/null")?;
    // Connections that were idle for 1 s may be evicted.
    let around = [800, 1300];
    let mut all = [(one, 0), (one, 1), (two, 0), (two, 1)]
        .map(|(node, processor)| access_periodically(node, processor, 12, around))
        .into_iter()
        .collect::<Result<Vec<_>>>()?;
    for user in &mut all {
        let output = user.wait(LONG)?;
        assert!(output.success(), "{output:?}");
    }
    for node in [one, two] {
        let stats = node.stats()?;
        assert!(stats["qp_evictions"] > 2, "{stats:?}");
        assert_eq!((stats["qp_errors"], stats["errors"]), (0, 0), "{stats:?}");
    }
    one.kite("free far")?;
    one.kite("free near")?;
    cluster.start_kite(&Setup::default())
}

/// With room for one connection, both processors use the same, and it is kept.
#[test]
#[ignore = "long"]
fn max_idle_conns_connections_are_kept() -> Result<()> {
    let cluster = TRIO.take()?;
    start(&cluster, [(); 2].map(|()| "max_idle_conns=1".into()))?;
    let (one, two) = (cluster.node(1), cluster.node(2));
    one.kite("alloc far 9000 --node 2")?;
    for node in [one, two] {
        node.await_gauges("connected_qps=1", SOON)?;
    }
    let mut users = [
        access_periodically(one, 0, 30, [50, 150])?,
        access_periodically(one, 1, 30, [50, 150])?,
    ];
    for user in &mut users {
        let output = user.wait(LONG)?;
        assert!(output.success(), "{output:?}");
    }
    for node in [one, two] {
        let stats = node.stats()?;
        assert_eq!(stats["connected_qps"], 1, "{stats:?}");
        assert!(stats["qp_evictions"] <= 1, "{stats:?}");
    }
    one.kite("free far")?;
    cluster.start_kite(&Setup::default())
}

/// Only the connections that exceed the limit are evicted, the least recently used ones first.
#[test]
#[ignore = "long"]
fn recently_used_connections_are_kept() -> Result<()> {
    let cluster = TRIO.take()?;
    let parameters = [
        "conns_per_peer=1 max_idle_conns=1",
        "conns_per_peer=1",
        "conns_per_peer=1",
    ];
    start(&cluster, parameters.map(String::from))?;
    let one = cluster.node(1);
    for number in [2, 3] {
        one.kite(&format!("alloc region-{number} 5000 --node {number}"))?;
    }
    one.await_gauges("connected_qps=1", SOON)?;
    let before = one.stats()?["qp_evictions"];
    for (turn, number) in (1..).zip([2, 3, 2]) {
        one.kite(&format!("get region-{number} /dev/null"))?;
        cluster.node(number).await_gauges("connected_qps=2", SOON)?;
        cluster
            .node(5 - number)
            .await_gauges("connected_qps=1", SOON)?;
        one.await_gauges("connected_qps=1", SOON)?;
        assert!(one.stats()?["qp_evictions"] <= before + turn, "{number}");
    }
    for number in [2, 3] {
        one.kite(&format!("free region-{number}"))?;
    }
    for node in cluster.nodes() {
        assert_eq!(node.stats()?["qp_errors"], 0);
    }
    cluster.start_kite(&Setup::default())
}

/// Returns the messages that arrived without a posted receive. The RNIC makes the sender retry them.
fn unexpected(node: &Node) -> Result<u64> {
    let count = node.sh(&format!(
        "rdma -p statistic show link {}/1 | grep -oE '(send_rnr_err|out_of_buffer) [0-9]+' | cut -d ' ' -f 2",
        node.rnic()?
    ))?;
    Ok(count.parse().expect(&count))
}

/// With many concurrent callers, each request and reply has a posted receive.
#[test]
#[ignore = "long"]
fn every_message_has_a_posted_receive() -> Result<()> {
    let cluster = TRIO.take()?;
    cluster.start_kite(&Setup::default())?;
    let (one, two) = (cluster.node(1), cluster.node(2));
    let mut before = Vec::new();
    for node in [one, two] {
        node.kite(&format!("alloc of-{} 5000", node.name()))?;
        before.push(unexpected(node)?);
    }
    let callers = |node: &Node, home: &Node| {
        node.spawn(&format!(
            "seq 16 | xargs -P 16 -I % \
             /kite/target/release/kite-workload churn map 40 of-{}",
            home.name()
        ))
    };
    let mut all = [callers(one, two)?, callers(two, one)?];
    for caller in &mut all {
        let output = caller.wait(LONG)?;
        assert!(output.success(), "{output:#?}");
    }
    for (node, before) in [one, two].into_iter().zip(before) {
        assert_eq!(unexpected(node)?, before, "{}", node.name());
        node.kite(&format!("free of-{}", node.name()))?;
    }
    Ok(())
}
