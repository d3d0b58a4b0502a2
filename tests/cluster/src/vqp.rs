// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Helpers of the tests of virtual queue pairs: registered memory, echo servers, continuous requests.

use std::time::Duration;

use crate::{until, Cluster, Node, Process, Result};

const SOON: Duration = Duration::from_secs(30);
const LONG: Duration = Duration::from_secs(300);

/// Memory of a node, for as long as the process lives, and how it is named: "NODE ADDRESS KEY".
pub fn offer(node: &Node, number: usize, options: &str) -> Result<(Process, String)> {
    let mut process = node.workload(&format!("vqp offer {options}")).spawn()?;
    let line = process.read_until("", SOON)?;
    Ok((process, format!("{number} {line}")))
}

/// Starts a process that returns messages at a port of a node.
pub fn echo(node: &Node, port: u32) -> Result<Process> {
    let mut process = node.workload(&format!("vqp echo {port}")).spawn()?;
    process.read_until("ready", SOON)?;
    Ok(process)
}

/// Has requests go on until something happens to them.
///
/// # Panics
/// If the process that makes them ends.
pub fn endless(node: &Node, name: &str) -> Result<Process> {
    let line = format!("vqp check {name} --operations 1000000");
    let before = node.stats()?["vqp_requests"];
    let mut process = node.workload(&line).limit(LONG).spawn()?;
    until("requests are under way", SOON, || {
        assert!(process.is_running());
        Ok(node.stats()?["vqp_requests"] > before + 100)
    })?;
    Ok(process)
}

/// Returns the number of DCI failures of all nodes.
pub fn failures(cluster: &Cluster) -> Result<u64> {
    let nodes = cluster.nodes().iter();
    nodes.map(|node| Ok(node.stats()?["dci_errors"])).sum()
}
