// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Virtual queue pairs: connected without a message to the other node, and isolated from each other on a shared RNIC.

mod connect;
mod failure;
mod messages;
mod operations;
mod promotion;
mod users;

use std::time::Duration;

use kite_cluster::vqp::expose_memory;
use kite_cluster::{outputs, until, Cluster, Fabric, Result, Setup, SharedCluster, Turn};

static TRIO: SharedCluster = SharedCluster::new(|| {
    let builder = Cluster::builder().name("vqp").nodes(3);
    // Soft-RoCE has no DC.
    builder.fabric(Fabric::Connectx)
});

const SOON: Duration = Duration::from_secs(30);
const LONG: Duration = Duration::from_secs(300);

fn trio() -> Result<Turn<'static>> {
    let trio = TRIO.take()?;
    trio.start_kite(&Setup::patient())?;
    Ok(trio)
}

/// Processes on these nodes add to one word of a node, and each gets other values: one RNIC executes all atomics.
fn assert_adds_once(trio: &Cluster, at: usize, nodes: [usize; 4]) -> Result<()> {
    let home = trio.node(at);
    let (_memory, name) = expose_memory(home, at, "")?;
    let line = format!("vqp count {name} --operations 150");
    let [before] = home.rnic_counts(["atomics"])?;
    let all = nodes.map(|node| trio.node(node).workload(&line).limit(LONG).spawn());
    let mut all = all.into_iter().collect::<Result<Vec<_>>>()?;
    let sums = outputs(&mut all, LONG)?;
    let sum: u64 = sums
        .iter()
        .map(|sum| sum.trim().parse::<u64>().unwrap())
        .sum();
    let count = 4 * 150;
    assert_eq!(
        sum,
        count * (count - 1) / 2,
        "two adds returned the same value"
    );
    // Every other operation reads first, and then swaps at least once.
    let [after] = home.rnic_counts(["atomics"])?;
    assert!(
        after - before >= count / 2 * 3,
        "atomics of the RNIC: {before} to {after}"
    );
    Ok(())
}

/// Returns a configuration without promoted peers: requests use DC wherever possible.
fn without_promotion() -> Setup {
    Setup {
        parameters: "max_promoted=0".into(),
        ..Setup::patient()
    }
}

/// Runs requests of all lengths up to `mib` MiB, which transfer each byte from one node to another and back.
fn transfer_all_lengths(trio: &Cluster, node: usize, at: usize, mib: usize) -> Result<()> {
    let (mut memory, name) = expose_memory(trio.node(at), at, &format!("--mib {mib}"))?;
    let line = format!("vqp large {name} --mib {mib}");
    trio.node(node).workload(&line).limit(LONG).sh()?;
    memory.kill()
}

/// Node 1 adds to a word of node 3 until that does not respond. Asserts that each completed add was applied once.
fn fail_node_during_adds(trio: &Cluster) -> Result<()> {
    let (_memory, name) = expose_memory(trio.node(3), 3, "")?;
    let one = trio.node(1);
    let before = one.stats()?["vqp_requests"];
    let line = format!("vqp count {name} --operations 1000000 --until-node-failure");
    let mut count = one.workload(&line).limit(LONG).spawn()?;
    until("1000 adds", SOON, || {
        assert!(count.is_running(), "{:?}", count.wait(SOON)?);
        Ok(one.stats()?["vqp_requests"] > before + 1000)
    })?;
    trio.node(3).disconnect_rnic()?;
    let ended = outputs(&mut [count], LONG);
    trio.node(3).reconnect()?;
    let number = |stdout: &str| stdout.trim().parse::<u64>().unwrap();
    let counted = number(&ended?[0]);
    let now = one.workload(&format!("vqp count {name} --operations 1"));
    let now = number(&outputs(&mut [now.limit(LONG).spawn()?], LONG)?[0]);
    assert!(now == counted || now == counted + 1, "{now} of {counted}");
    Ok(())
}

/// Exchanges messages of up to 2 MiB, which use RDMA for their data.
fn exchange_long_messages(trio: &Cluster, from: usize, to: usize) -> Result<()> {
    let place = 2 << 20;
    let echo = trio
        .node(to)
        .workload(&format!("vqp echo 8 --buffer-size {place}"));
    let mut echo = echo.spawn()?;
    echo.read_until("ready", SOON)?;
    let line = format!("vqp ping {to} 8 --buffer-size {place} --len-max {place} --messages 24");
    trio.node(from).workload(&line).limit(LONG).sh()?;
    echo.kill()
}
