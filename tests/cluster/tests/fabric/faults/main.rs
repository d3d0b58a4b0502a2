// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Faults of processes, daemons, nodes, networks and RNICs: affected requests fail in bounded time, others continue,
//! and nothing leaks.

mod network;
mod nodes;
mod partitions;
mod processes;
mod upgrade;

use std::time::{Duration, Instant};

use kite_cluster::{Cluster, Node, Process, Result, Setup, SharedCluster, Turn};

static TRIO: SharedCluster = SharedCluster::new(|| Cluster::builder().name("faults").nodes(3));
const SOON: Duration = Duration::from_secs(30);
const LONG: Duration = Duration::from_secs(300);

/// Gauges of an idle node. The sessions are those of kited and of the reader.
const IDLE: &str = "sessions=2 open_handles=0 inflight=0";

fn trio() -> Result<Turn<'static>> {
    let trio = TRIO.take()?;
    trio.start_kite(&Setup::default())?;
    Ok(trio)
}

/// Starts transfers that continue until they fail.
fn hold(node: &Node, arguments: &str) -> Result<Process> {
    let mut process = node.workload(&format!("transfer {arguments}")).spawn()?;
    process.read_until("ops", SOON)?;
    Ok(process)
}

/// Returns the errno of the first error of a `hold`.
fn error(process: &mut Process) -> Result<String> {
    let line = process.read_until("error ", SOON)?;
    Ok(line.split(' ').nth(1).unwrap_or_default().into())
}

/// Asserts that a `hold` makes progress from now on. Its earlier output may still be unread, so lines of the first
/// 500 ms do not count.
fn assert_progress(process: &mut Process) -> Result<()> {
    let count = |line: String| -> u64 { line.trim_start_matches("ops ").parse().unwrap_or(0) };
    let start = Instant::now();
    let mut first = None;
    while start.elapsed() < SOON {
        let line = process
            .read_line(SOON)?
            .expect("a transfer loop that continues");
        assert!(line.starts_with("ops "), "disturbed: {line}");
        if start.elapsed() > Duration::from_millis(500) {
            let now = count(line);
            if *first.get_or_insert(now) + 3 < now {
                return Ok(());
            }
        }
    }
    panic!("no progress in {SOON:?}");
}

fn gauge(node: &Node, name: &str) -> Result<u64> {
    Ok(node.stats()?[name])
}
