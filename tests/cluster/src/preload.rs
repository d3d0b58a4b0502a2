// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Programs of verbs as they are, which run on nodes with `libkite_verbs.so` preloaded: how tests start them, and see that
//! they go by kite.

use std::process::Command;
use std::time::Duration;

use crate::{until, Cluster, Node, Output, Process, Result, Setup};

const SOON: Duration = Duration::from_secs(60);
const LONG: Duration = Duration::from_secs(300);

/// Starts kite so that all commands of the RNIC for QPs are those of programs: all nodes are connected, and kite
/// creates no further QPs under load.
///
/// # Errors
/// Those of [`Cluster::start_kite`].
pub fn start_for_verbs(cluster: &Cluster) -> Result<()> {
    cluster.start_kite(&Setup {
        parameters: "conns_per_peer=1".into(),
        ..Setup::patient()
    })?;
    for node in cluster.nodes() {
        until("the nodes to be connected", SOON, || {
            let stats = node.stats()?;
            Ok(stats["qp_connects"] > stats["qp_errors"])
        })?;
    }
    Ok(())
}

/// A command line by which a program finds kite's device, and no other.
pub fn preloaded(line: &str) -> String {
    format!("LD_PRELOAD=/kite/target/release/libkite_verbs.so {line}")
}

/// Starts a program that waits for another at a port of TCP, as those of rdma-core and perftest do.
///
/// # Errors
/// Those of [`Node::sh`]; if it does not listen.
///
/// # Panics
/// If it ends.
pub fn serve(node: &Node, line: &str) -> Result<Process> {
    let mut server = node.command(line).limit(LONG).spawn()?;
    until("it listens", SOON, || {
        assert!(server.is_running(), "{line}: {:?}", server.wait(SOON)?);
        Ok(!node.sh("ss -Hltn sport = :18515")?.is_empty())
    })?;
    Ok(server)
}

/// Returns the number of commands of the RNIC of a node that concern QPs.
///
/// # Errors
/// Those of [`Node::sh`].
pub fn commands(node: &Node) -> Result<u64> {
    let counts = node.sh("cat /sys/kernel/debug/mlx5/*/commands/*QP*/n")?;
    let counts = counts.lines().map(|count| count.parse::<u64>().unwrap());
    Ok(counts.sum())
}

/// Builds a program that knows a library of rdma-core alone, of `tests/cluster/guest/NAME.c`. Returns where it is on nodes.
pub fn compile(name: &str, library: &str) -> String {
    let (source, program) = (
        format!("tests/cluster/guest/{name}.c"),
        format!("target/{name}"),
    );
    let built = Command::new("cc")
        .args(["-Wall", "-Wextra", "-Werror", "-O2", "-pthread", "-o"])
        .args([&program, &source, &format!("-l{library}")])
        .current_dir("/kite")
        .status();
    assert!(built.unwrap().success());
    format!("/kite/{program}")
}

/// Waits for the end of a program, which is not to its liking.
///
/// # Errors
/// Those of [`Process::wait`].
pub fn failed(mut program: Process) -> Result<Output> {
    let output = program.wait(SOON)?;
    assert!(!output.success(), "{output:?}");
    Ok(output)
}
