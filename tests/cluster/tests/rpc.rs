// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Calls and messages: each reaches one server once, whoever sends it from wherever, and whatever becomes
//! of packets, queue pairs, processes and nodes.

use std::time::Duration;

use kite_cluster::{Cluster, Node, Process, Result, Setup, SharedCluster, Turn};

static TRIO: SharedCluster = SharedCluster::new(|| Cluster::builder().name("rpc").nodes(3));

const SOON: Duration = Duration::from_secs(60);
const LONG: Duration = Duration::from_secs(300);

fn trio() -> Result<Turn<'static>> {
    let trio = TRIO.take()?;
    trio.start_kite(&Setup {
        parameters: "timeout_ms=60000".into(),
        ..Setup::patient()
    })?;
    Ok(trio)
}

/// Starts a server, and waits until it serves.
fn serve(node: &Node, line: &str) -> Result<Process> {
    let mut server = node.workload(&format!("rpc serve {line}")).spawn()?;
    server.read_until("serving", SOON)?;
    Ok(server)
}

/// Lets two processes on each node run this.
fn everywhere(trio: &Cluster, line: &str) -> Result<Vec<Process>> {
    let nodes = trio.nodes().iter().flat_map(|node| [node, node]);
    nodes.map(|node| node.workload(line).spawn()).collect()
}

/// Waits for processes, and returns what they printed.
fn all(processes: &mut [Process]) -> Result<Vec<String>> {
    processes
        .iter_mut()
        .map(|process| {
            let output = process.wait(LONG)?;
            assert!(output.success(), "{output:#?}");
            Ok(output.stdout.trim().to_string())
        })
        .collect()
}

#[test]
fn each_call_gets_its_own_reply() -> Result<()> {
    let trio = trio()?;
    let one = trio.node(1);
    let mut servers = [
        serve(one, "invert --threads 2")?,
        serve(one, "invert --threads 2")?,
    ];
    all(&mut everywhere(
        &trio,
        "rpc invert invert --threads 4 --operations 50",
    )?)?;
    for server in &mut servers {
        server.kill()?;
    }
    one.kite("free invert")?;
    Ok(())
}
