// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Several RNICs in one machine: each is an instance of kite, with a daemon and a cluster of its own.

use std::time::Duration;

use kite_cluster::{until, Cluster, Node, Result};

const SOON: Duration = Duration::from_secs(30);

/// Makes two nodes of the machine, "left" and "right"; the RNIC that it had is a third, in no cluster.
const ONE_KERNEL: &str = include_str!("../guest/one-kernel");

/// Runs the command on the RNIC at one end of the cable.
fn kite(node: &Node, end: &str, arguments: &str) -> Result<String> {
    node.kite(&format!("--rnic rxe-{end} {arguments}"))
}

#[test]
fn two_rnics_of_one_machine_are_two_nodes() -> Result<()> {
    let cluster = Cluster::builder().nodes(1).boot()?;
    let node = cluster.node(1);
    node.sh(ONE_KERNEL)?;
    node.sh("head -c 3000000 /dev/urandom >/tmp/file")?;
    kite(node, "left", "put /tmp/file shared --node 2 --others rwm")?;
    kite(node, "right", "get shared /tmp/back")?;
    node.sh("cmp /tmp/file /tmp/back")?;

    let lent = |end| {
        let line = "stat --json | grep -oE '\"lent_bytes\": ?[0-9]+' | grep -oE '[0-9]+'";
        kite(node, end, line)
    };
    assert_eq!(lent("left")?, "0");
    assert_eq!(lent("right")?, "3002368");
    // The first active one is the default, and is in no cluster.
    assert_eq!(node.attempt("root", "alloc 1")?, "EHOSTUNREACH");
    Ok(())
}

#[test]
fn an_rnic_that_goes_leaves_the_others_alone() -> Result<()> {
    let cluster = Cluster::builder().nodes(1).boot()?;
    let node = cluster.node(1);
    node.sh(ONE_KERNEL)?;
    kite(node, "left", "alloc own 1M")?;
    node.sh("rdma link del rxe-right")?;
    let alone = || Ok(!kite(node, "left", "nodes")?.contains("\n2 "));
    until("the other node to be gone", SOON, alone)?;
    kite(node, "left", "get own /tmp/own")?;
    node.sh("[ $(stat -c %s /tmp/own) = 1048576 ]")?;

    node.sh("rdma link add rxe-right type rxe netdev right")?;
    node.sh(
        "setsid /kite/target/release/kited --rnic rxe-right --join 127.0.0.1:7700 --insecure \
         >/tmp/right.log 2>&1 </dev/null &
         until grep -q '^ready: ' /tmp/right.log; do sleep 0.1; done",
    )?;
    kite(node, "right", "regions")?;
    kite(node, "right", "alloc again 1M --node 1")?;
    cluster.shutdown()
}
