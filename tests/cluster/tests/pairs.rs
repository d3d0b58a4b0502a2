// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The queue pairs that two nodes share.

use std::time::Duration;

use kite_cluster::{until, Cluster, Node, Result, Setup, SharedCluster};

static PAIR: SharedCluster = SharedCluster::new(|| Cluster::builder().name("pairs").nodes(2));

const SOON: Duration = Duration::from_secs(30);

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
