// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The queue pairs that two nodes share.

use std::time::Duration;

use kite_cluster::{until, Cluster, Node, Result, Setup, SharedCluster};

static PAIR: SharedCluster = SharedCluster::new(|| Cluster::builder().name("pairs").nodes(2));

const SOON: Duration = Duration::from_secs(30);
const LONG: Duration = Duration::from_secs(300);

/// Starts kite anew, so that counters begin at zero, with a number of queue pairs for each node.
fn start(cluster: &Cluster, pairs: [u8; 2]) -> Result<()> {
    for node in cluster.nodes() {
        node.stop_kited()?;
        node.unload("kite")?;
    }
    for ((number, node), pairs) in (1..).zip(cluster.nodes()).zip(pairs) {
        let setup = Setup {
            parameters: format!("pairs={pairs}"),
            ..Setup::default()
        };
        node.start_kite(number, &setup)?;
    }
    cluster.await_members(2)
}

/// Queue pairs that are connected.
fn connected(node: &Node) -> Result<u64> {
    let stats = node.stats()?;
    Ok(stats["connects"] - stats["disconnects"])
}

#[test]
fn nodes_with_different_numbers_share_the_smaller_one() -> Result<()> {
    let cluster = PAIR.take()?;
    for (pairs, shared) in [([1, 4], 1), ([16, 1], 1), ([2, 4], 2), ([4, 2], 2)] {
        start(&cluster, pairs)?;
        let bad =
            |number: usize| -> Result<u64> { Ok(cluster.node(number).stats()?["bad_messages"]) };
        let before = [bad(1)?, bad(2)?];
        for (number, node) in (1..).zip(cluster.nodes()) {
            // Each processor has a connection of its own, if there are that many.
            for processor in [1, 0] {
                let got = node.sh(&format!(
                    "taskset -c {processor} /kite/target/release/kite-workload \
                     attempt alloc 5000 --nodes {}",
                    3 - number
                ))?;
                assert_eq!(got, "OK", "{pairs:?}: node {number}");
            }
        }
        for node in cluster.nodes() {
            until("all to be connected", SOON, || {
                Ok(connected(node)? == shared)
            })?;
        }
        assert_eq!([bad(1)?, bad(2)?], before, "{pairs:?}");
    }
    cluster.start_kite(&Setup::default())
}

/// Messages for which the RNIC had no receive: it had them sent again.
fn unexpected(node: &Node) -> Result<u64> {
    let count = node.sh(&format!(
        "rdma -p statistic show link {}/1 | grep -oE '(send_rnr_err|out_of_buffer) [0-9]+' | cut -d ' ' -f 2",
        node.rnic()?
    ))?;
    Ok(count.parse().expect(&count))
}

/// However many call each other at once: requests and replies each have their receives.
#[test]
fn every_message_finds_a_receive() -> Result<()> {
    let cluster = PAIR.take()?;
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
