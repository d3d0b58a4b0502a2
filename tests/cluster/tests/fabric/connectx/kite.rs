// SPDX-License-Identifier: GPL-2.0 OR MIT
//! kite on the software ConnectX.

use std::fs;
use std::time::{Duration, Instant};

use kite_cluster::{until, Cluster, Fabric, Node, Result, Setup};

use crate::{driver_warnings, perftest_on, sleep_for_events, LIMIT, PAIR, SOON};

#[test]
#[ignore = "long"]
fn mapped_doorbells_start_work_requests() -> Result<()> {
    let builder = Cluster::builder().nodes(2).cpus(1);
    let pair = builder
        .fabric(Fabric::Connectx)
        .map_doorbells(true)
        .boot()?;
    perftest_on(&pair, "ib_write_bw -q 16")?;
    perftest_on(&pair, "ib_send_lat")?;
    sleep_for_events(&pair)?;
    put_and_get(&pair)?;
    let log = fs::read_to_string(pair.artefacts().join("connectx.log")).unwrap();
    assert!(!log.contains("trapped"), "{log}");
    pair.shutdown()
}

#[test]
fn kite_puts_and_gets_a_file() -> Result<()> {
    put_and_get(&*PAIR.take()?)
}

fn put_and_get(pair: &Cluster) -> Result<()> {
    pair.start_kite(&Setup::default())?;
    let (one, two) = (pair.node(1), pair.node(2));
    one.sh("head -c 5000000 /dev/urandom >/tmp/file")?;
    one.kite("put /tmp/file shared --node 2 --other-rights rwm")?;
    two.kite("get shared /tmp/back")?;
    one.kite("get shared /tmp/back")?;
    let sum = |node: &Node, file| node.sh(&format!("sha256sum <{file}"));
    let sent = sum(one, "/tmp/file")?;
    assert_eq!(
        [sum(one, "/tmp/back")?, sum(two, "/tmp/back")?],
        [&sent[..], &sent[..]]
    );
    one.kite("free shared")?;
    pair.nodes().iter().try_for_each(Node::stop_kited)?;
    pair.nodes()
        .iter()
        .try_for_each(|node| node.unload("kite"))?;
    for node in pair.nodes() {
        assert_eq!(driver_warnings(node)?, "");
    }
    Ok(())
}

/// The network delays packets until the queue pair that sent them has failed and the process that wrote is dead. The
/// memory that they are for must not be freed before they arrive.
#[test]
#[ignore = "long"]
fn memory_is_freed_only_after_packets_of_a_failed_qp_arrived() -> Result<()> {
    const LATE: Duration = Duration::from_secs(30);
    let trio = Cluster::builder().name("late").nodes(3).cpus(1);
    let trio = trio.fabric(Fabric::Connectx).boot()?;
    let (one, two, three) = (trio.node(1), trio.node(2), trio.node(3));
    trio.start_kite(&Setup::patient())?;
    two.kite("alloc late 4M --node 3 --other-rights rw")?;
    two.kite("alloc near 4M --other-rights rw")?;
    let mut neighbour = one.workload("transfer near").spawn()?;
    neighbour.read_until("ops", SOON)?;
    let mut writer = one.workload("transfer late --size 1000000").spawn()?;
    writer.read_until("ops", SOON)?;
    let start = Instant::now();
    one.delay(three, LATE)?;
    let retries = || Ok(one.stats()?["retries"] > 0);
    until("a queue pair to fail", SOON, retries)?;
    writer.kill()?;
    let freed = two.attempt("root", "free late")?;
    assert!(["OK", "ETIMEDOUT"].contains(&&*freed), "{freed}");
    // A free that these packets do not affect does not wait.
    assert_eq!(two.attempt("root", "free near")?, "OK");
    assert!(start.elapsed() < LATE, "{:?}", start.elapsed());
    three.await_gauges("lent_bytes=0", LIMIT)?;
    let elapsed = start.elapsed();
    assert!(elapsed >= LATE, "freed after {elapsed:?}");
    trio.shutdown()
}

/// The daemon of the node still responds. A kernel grants a name only after all others have announced the view to it.
#[test]
#[ignore = "long"]
fn node_with_rnic_link_down_is_unreachable_and_returns() -> Result<()> {
    let trio = Cluster::builder().name("unreached").nodes(3).cpus(1);
    let trio = trio.fabric(Fabric::Connectx).boot()?;
    trio.start_kite(&Setup::default())?;
    let (one, two, three) = (trio.node(1), trio.node(2), trio.node(3));
    one.kite("alloc stays 100000 --node 2")?;
    three.disconnect_rnic()?;
    let lost = one.attempt("root", "alloc 5000 --nodes 3")?;
    assert!(["ETIMEDOUT", "EHOSTDOWN"].contains(&&*lost), "{lost}");
    let succeeds = |node: &Node, what: &str| {
        let done = || Ok(["OK", "EEXIST"].contains(&&*node.attempt("root", what)?));
        until(what, LIMIT, done).map(drop)
    };
    // Node 3 is the owner of some of the names.
    for i in 0..12 {
        succeeds(one, &format!("alloc 5000 --nodes 2 --name name-{i}"))?;
        succeeds(two, &format!("map name-{i} r"))?;
    }
    assert_eq!(two.attempt("root", "write stays")?, "OK");
    three.reconnect()?;
    succeeds(three, "write stays")?;
    succeeds(one, "alloc 5000 --nodes 3")?;
    trio.await_members(3)?;
    trio.shutdown()
}
