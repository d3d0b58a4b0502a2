// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The software ConnectX with the stock driver: rdma-core and perftest on two nodes, and faults of driver and device.
//! Tests of single work requests are in `tests/connectx`.

mod device;
mod kite;
mod verbs;

use std::time::Duration;

use kite_cluster::{until, Cluster, Fabric, Node, Result, SharedCluster};

static PAIR: SharedCluster = SharedCluster::new(|| {
    let cluster = Cluster::builder().name("connectx").nodes(2).cpus(1);
    cluster.fabric(Fabric::Connectx)
});

const SOON: Duration = Duration::from_secs(30);

/// Timeout of a program of perftest or rdma-core.
const LIMIT: Duration = Duration::from_secs(120);

/// Runs `server` on node 1, and, when it listens at `port`, `client` on node 2, with the address of node 1 added.
/// Returns the output of the client. `port` is the default of the programs.
fn run_pair(pair: &Cluster, server: &str, client: &str, port: u16) -> Result<String> {
    let (one, two) = (pair.node(1), pair.node(2));
    let mut waiting = one.command(server).spawn()?;
    let listens = format!("ss -Hltn sport = :{port} | grep -q LISTEN");
    until("the server to listen", SOON, || {
        Ok(one.run(&listens)?.success())
    })?;
    let line = format!("{client} {}", one.address());
    let output = two.command(line).limit(LIMIT).sh()?;
    let served = waiting.wait(LIMIT)?;
    assert!(
        served.success(),
        "{server}: {}{}",
        served.stdout,
        served.stderr
    );
    Ok(output)
}

fn perftest_on(pair: &Cluster, line: &str) -> Result<()> {
    let program = format!("{line} -F -n 200");
    let output = run_pair(pair, &program, &program, 18515)?;
    // A line of numbers follows the heading.
    let mut lines = output.lines().skip_while(|line| !line.contains("#bytes"));
    let numbers = lines.nth(1).unwrap_or_default().trim_start();
    assert!(
        numbers.starts_with(|c: char| c.is_ascii_digit()),
        "{output}"
    );
    Ok(())
}

/// Returns warnings and errors of the driver since the node booted.
fn driver_warnings(node: &Node) -> Result<String> {
    node.sh("dmesg --level=emerg,alert,crit,err,warn | grep -E 'mlx5|infiniband' | grep -v ' kite: ' || true")
}

fn sleep_for_events(pair: &Cluster) -> Result<()> {
    let program = "ibv_rc_pingpong -e -n 200";
    let output = run_pair(pair, &format!("{program} -c"), program, 18515)?;
    assert!(output.contains("200 iters in"), "{output}");
    Ok(())
}

/// Waits until the node's port is active.
fn await_port(node: &Node) -> Result<()> {
    let active = "grep -qs ACTIVE /sys/class/infiniband/*/ports/1/state";
    until("the port to be active", SOON, || {
        Ok(node.run(active)?.success())
    })
    .map(drop)
}
