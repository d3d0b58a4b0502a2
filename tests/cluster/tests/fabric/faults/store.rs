// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Membership in etcd with a server on each node: a lost server, and a lost quorum.

use std::thread;
use std::time::Duration;

use kite_cluster::{outputs, until, Node, Output, Result, Setup, Turn};

use crate::{
    assert_continues, await_bytes, epoch, incarnations, start_readers, write_regions, LONG, SOON,
    TRIO,
};

/// Runs `kite status --check`.
fn check(node: &Node) -> Result<Output> {
    node.run("/kite/target/release/kite status --check")
}

/// Waits until the membership of a node is frozen by the store.
fn await_frozen(node: &Node) -> Result<()> {
    let frozen = "frozen:  no node joins or becomes unreachable: store: ";
    let is_frozen = || Ok(node.kite("status")?.contains(frozen));
    until("the membership to be frozen", SOON, is_frozen)?;
    let checked = check(node)?;
    assert_eq!(checked.status, 1, "{checked:?}");
    let reason = "membership frozen: store: ";
    assert!(checked.stdout.contains(reason), "{checked:?}");
    Ok(())
}

/// Waits until the membership of no node is frozen, and all members are reachable.
fn await_thawed(trio: &Turn<'_>) -> Result<()> {
    for node in trio.nodes() {
        let is_healthy = || Ok(check(node)?.success());
        until("the membership to be healthy", LONG, is_healthy)?;
    }
    Ok(())
}

/// Allocates, writes, reads, locks and frees a region on all nodes.
fn use_regions(trio: &Turn<'_>) -> Result<()> {
    trio.node(1).kite("alloc counted 4096 --node 2")?;
    let mut users = trio.everywhere("locks count counted --threads 1 --operations 20")?;
    outputs(&mut users, LONG)?;
    trio.node(3).kite("free counted").map(drop)
}

/// Fails if the view of a node has another epoch.
fn assert_epoch(trio: &Turn<'_>, expected: u64) -> Result<()> {
    for node in trio.nodes() {
        assert_eq!(epoch(node)?, expected, "{}", node.name());
    }
    Ok(())
}

#[test]
#[ignore = "long"]
fn lost_servers_of_the_store_remove_no_node_and_stop_no_access() -> Result<()> {
    let trio = TRIO.take()?;
    let setup = Setup {
        has_store: true,
        ..Setup::default()
    };
    trio.start_kite(&setup)?;
    let [one, two, three] = trio.nodes() else {
        unreachable!("three nodes");
    };
    await_thawed(&trio)?;
    let (before, view) = (incarnations(one)?, epoch(one)?);
    let regions = write_regions(&trio)?;
    let mut readers = start_readers(three, &regions)?;
    // All daemons use the first server while it runs.
    one.kill_etcd()?;
    use_regions(&trio)?;
    await_thawed(&trio)?;
    assert_epoch(&trio, view)?;
    two.kill_etcd()?;
    trio.nodes().iter().try_for_each(await_frozen)?;
    two.sh("pkill -STOP -x kited")?;
    // Silence of this length is a fault while there is a coordinator.
    thread::sleep(Duration::from_millis(u64::from(setup.dead_ms) * 2));
    use_regions(&trio)?;
    assert_epoch(&trio, view)?;
    two.sh("pkill -CONT -x kited")?;
    [one, two].into_iter().try_for_each(Node::start_etcd)?;
    await_thawed(&trio)?;
    for node in trio.nodes() {
        assert_eq!(incarnations(node)?, before);
        await_bytes(node, &regions)?;
    }
    for reader in &mut readers {
        assert_continues(reader)?;
        reader.kill()?;
        let output = reader.wait(SOON)?.stdout;
        assert!(!output.contains("error"), "{output}");
    }
    for (name, _) in &regions {
        three.kite(&format!("free {name}"))?;
    }
    Ok(())
}
