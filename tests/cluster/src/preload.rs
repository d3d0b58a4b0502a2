// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Unmodified verbs programs on nodes with `libkite_verbs.so` preloaded: start, and count of commands to the RNIC.

use std::process::Command;
use std::time::Duration;

use crate::{until, Cluster, Node, Output, Process, Result, Setup};

const SOON: Duration = Duration::from_secs(60);

/// Starts kite so that later QP commands of an RNIC are of programs only: all nodes are connected, and kite creates no
/// further connections under load.
///
/// # Errors
/// See [`Cluster::start_kite`].
pub fn start_for_verbs(cluster: &Cluster) -> Result<()> {
    cluster.start_kite(&Setup {
        parameters: "conns_per_peer=1".into(),
        ..Setup::patient()
    })?;
    for node in cluster.nodes() {
        until("nodes to be connected", SOON, || {
            let stats = node.stats()?;
            Ok(stats["qp_connects"] > stats["qp_errors"])
        })?;
    }
    Ok(())
}

/// Returns the command line with `libkite_verbs.so` preloaded: the program finds the device of kite only.
pub fn preloaded(line: &str) -> String {
    format!("LD_PRELOAD=/kite/target/release/libkite_verbs.so {line}")
}

/// Starts a server program of rdma-core or perftest as a user, and waits until it listens at TCP port 18515.
///
/// # Errors
/// See [`Node::sh`]; [`Error::Timeout`](crate::Error::Timeout) if the program does not listen.
///
/// # Panics
/// If the program ends.
pub fn serve(node: &Node, line: &str, user: &str) -> Result<Process> {
    let mut server = node.command(line).user(user).spawn()?;
    until("server to listen", SOON, || {
        assert!(server.is_running(), "{line}: {:?}", server.wait(SOON)?);
        Ok(!node.sh("ss -Hltn sport = :18515")?.is_empty())
    })?;
    Ok(server)
}

/// Returns the number of QP commands that the RNIC of a node has received.
///
/// # Errors
/// See [`Node::sh`].
pub fn commands(node: &Node) -> Result<u64> {
    let counts = node.sh("cat /sys/kernel/debug/mlx5/*/commands/*QP*/n")?;
    let counts = counts.lines().map(|count| count.parse::<u64>().unwrap());
    Ok(counts.sum())
}

/// Builds `tests/cluster/guest/programs/NAME.c`, which uses a library of rdma-core alone. Returns the path of the
/// program on nodes.
pub fn compile(name: &str, library: &str) -> String {
    let (source, program) = (
        format!("tests/cluster/guest/programs/{name}.c"),
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

/// Waits for a program, and asserts that it fails.
///
/// # Errors
/// See [`Process::wait`].
pub fn failed(mut program: Process) -> Result<Output> {
    let output = program.wait(SOON)?;
    assert!(!output.success(), "{output:?}");
    Ok(output)
}
