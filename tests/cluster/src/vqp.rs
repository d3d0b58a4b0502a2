// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Helpers for tests of virtual queue pairs: remote memory, echo servers, endless requests.

use std::time::Duration;

use crate::{until, Cluster, Node, Process, Result};

const SOON: Duration = Duration::from_secs(30);
const LONG: Duration = Duration::from_secs(300);

/// Registers memory of a node until the process ends. Returns the process and the name "NODE ADDRESS KEY".
pub fn expose_memory(node: &Node, number: usize, options: &str) -> Result<(Process, String)> {
    let mut process = node.workload(&format!("vqp expose {options}")).spawn()?;
    let line = process.read_until("", SOON)?;
    Ok((process, format!("{number} {line}")))
}

/// Starts an echo server at a port of a node.
pub fn echo(node: &Node, port: u32) -> Result<Process> {
    let mut process = node.workload(&format!("vqp echo {port}")).spawn()?;
    process.read_until("ready", SOON)?;
    Ok(process)
}

/// Starts requests that continue until they fail.
///
/// # Panics
/// If the process ends.
pub fn endless(node: &Node, name: &str) -> Result<Process> {
    let line = format!("vqp check {name} --operations 1000000");
    let before = node.stats()?["vqp_requests"];
    let mut process = node.workload(&line).limit(LONG).spawn()?;
    until("requests to be in flight", SOON, || {
        assert!(process.is_running());
        Ok(node.stats()?["vqp_requests"] > before + 100)
    })?;
    Ok(process)
}

/// Returns the number of DCIs of all nodes that have failed.
pub fn failures(cluster: &Cluster) -> Result<u64> {
    let nodes = cluster.nodes().iter();
    nodes.map(|node| Ok(node.stats()?["dci_errors"])).sum()
}
