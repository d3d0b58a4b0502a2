// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Several RNICs in one machine: each is an instance of kite, with a daemon and a cluster of its own.

use std::time::Duration;

use kite_cluster::{until, Builder, Cluster, Fabric, Node, Result, Setup};

const SOON: Duration = Duration::from_secs(30);

/// Makes two nodes of the machine, "left" and "right". Its first RNIC is a third one, in no cluster.
const ONE_KERNEL: &str = include_str!("../../guest/one-kernel");

/// Returns the plan of a machine to which RNICs can be added.
fn alone() -> Builder {
    Cluster::builder().nodes(1).fabric(Fabric::Rxe)
}

/// Runs the command on the RNIC at one end of the link.
fn kite(node: &Node, end: &str, arguments: &str) -> Result<String> {
    node.kite(&format!("--rnic rxe-{end} {arguments}"))
}

#[test]
fn two_rnics_of_one_host_are_two_nodes() -> Result<()> {
    let cluster = alone().boot()?;
    let node = cluster.node(1);
    node.sh(ONE_KERNEL)?;
    node.sh("head -c 3000000 /dev/urandom >/tmp/file")?;
    kite(
        node,
        "left",
        "put /tmp/file shared --node 2 --other-rights rwm",
    )?;
    kite(node, "right", "get shared /tmp/back")?;
    node.sh("cmp /tmp/file /tmp/back")?;

    let lent = |end| {
        let line = "stats --json | grep -oE '\"lent_bytes\": ?[0-9]+' | grep -oE '[0-9]+'";
        kite(node, end, line)
    };
    assert_eq!(lent("left")?, "0");
    assert_eq!(lent("right")?, "3002368");
    // The first active RNIC is the default, and is in no cluster.
    assert_eq!(node.attempt("root", "alloc 1")?, "EHOSTUNREACH");
    // Without a link, the next RNIC is the default.
    node.disconnect()?;
    let left = kite(node, "left", "nodes")?;
    let default = || Ok(node.run("/kite/target/release/kite nodes")?.stdout.trim() == left.trim());
    until("the next RNIC to be the default", SOON, default)?;
    node.reconnect()?;
    let back = || Ok(node.attempt("root", "alloc 1")? == "EHOSTUNREACH");
    until("the first RNIC to be the default", SOON, back)?;
    Ok(())
}

#[test]
#[ignore = "long"]
fn rnic_removal_keeps_other_rnics_working() -> Result<()> {
    let cluster = alone().boot()?;
    let node = cluster.node(1);
    node.sh(ONE_KERNEL)?;
    kite(node, "left", "alloc own 1M")?;
    node.sh("rdma link del rxe-right")?;
    let alone = || Ok(!kite(node, "left", "nodes")?.contains("\n2 "));
    until("the other node to leave", SOON, alone)?;
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

/// udev renames RNICs in the same way, possibly after the module is loaded.
#[test]
#[ignore = "long"]
fn renamed_rnic_is_found_by_its_new_name() -> Result<()> {
    let cluster = alone().boot()?;
    cluster.start_kite(&Setup::default())?;
    let node = cluster.node(1);
    let mut holder = node.workload("anonymous 5000").spawn()?;
    holder.read_until("holding", SOON)?;
    node.sh("rdma dev set rxe0 name other")?;
    let status = node.kite("status")?;
    assert!(status.contains("other: active"), "{status}");
    assert!(!status.contains("rxe0"), "{status}");
    let nodes = node.kite("--rnic other nodes")?;
    assert!(nodes.contains("(this node)"), "{nodes}");
    node.kite("--rnic other alloc renamed 9000")?;
    node.kite("--rnic other get renamed /dev/null")?;
    let former = node.run("/kite/target/release/kite --rnic rxe0 nodes")?;
    assert!(former.stderr.contains("no such RNIC"), "{former:#?}");
    // Earlier sessions keep the RNIC, and show its new name.
    let of = |program: &str| {
        node.sh(&format!(
            "cat /proc/$(pgrep -xo {program})/fdinfo/* | grep ^kite-rnic"
        ))
    };
    assert_eq!(of("kite-workload")?, "kite-rnic:\tother");
    assert_eq!(of("kited")?, "kite-rnic:\tother");
    holder.kill()?;
    node.kite("free renamed")?;
    node.sh("rdma dev set other name rxe0")?;
    node.kite("--rnic rxe0 nodes")?;
    cluster.shutdown()
}
