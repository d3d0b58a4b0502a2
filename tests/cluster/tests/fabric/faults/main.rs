// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Faults of processes, daemons, nodes, networks and RNICs: affected requests fail in bounded time, others continue,
//! and nothing leaks.

mod network;
mod nodes;
mod partitions;
mod processes;
mod store;
mod upgrade;

use std::time::{Duration, Instant};

use kite_cluster::{until, Cluster, Node, Process, Result, Setup, SharedCluster, Turn};

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

/// Returns number, incarnation and admission of each member, without the epochs.
fn incarnations(node: &Node) -> Result<Vec<String>> {
    let lines = node.kite("nodes")?;
    let words = lines.lines().skip(1).map(|line| {
        let words: Vec<&str> = line.split_whitespace().take(3).collect();
        words.join(" ")
    });
    Ok(words.collect())
}

/// Returns the epoch of the view of a node.
fn epoch(node: &Node) -> Result<u64> {
    let summary = node.kite("status")?;
    let words = summary.split("epoch ").nth(1).expect("the epoch");
    let number = words.split_whitespace().next();
    Ok(number.expect("a word").parse().expect("a number"))
}

/// Regions of all nodes, each with the digest of its bytes. Those of node 3 are in the memory of node 2, too.
fn write_regions(trio: &Turn<'_>) -> Result<Vec<(String, String)>> {
    let mut regions = Vec::new();
    // Chunks of 4 MiB are on the nodes in turns.
    for (home, len, memory) in [
        (1, 3_000_000, "1"),
        (2, 3_000_000, "2"),
        (3, 5_000_000, "3,2"),
    ] {
        let name = format!("cut-{home}");
        let memory = memory.replace(',', " --node ");
        let alloc = format!("alloc {name} {len} --node {memory}");
        trio.node(home).kite(&alloc)?;
        let fill = format!("fill {name} --seed {home}");
        regions.push((name, trio.node(2).workload(&fill).sh()?));
    }
    Ok(regions)
}

/// Starts readers of regions that continue after errors.
fn start_readers(node: &Node, regions: &[(String, String)]) -> Result<Vec<Process>> {
    let lines = regions.iter().map(|(name, _)| {
        format!("transfer {name} --persist --read-only --threads 1 --timeout-ms 2000")
    });
    let readers = lines.map(|line| node.workload(&line).spawn());
    let mut readers = readers.collect::<Result<Vec<_>>>()?;
    for reader in &mut readers {
        reader.read_until("ops", SOON)?;
    }
    Ok(readers)
}

/// Waits until regions can be read and have these digests.
fn await_bytes(node: &Node, regions: &[(String, String)]) -> Result<()> {
    for (name, digest) in regions {
        let line = format!("digest {name}");
        let is_same = || Ok(node.workload(&line).run()?.stdout.trim() == digest.as_str());
        until("the bytes of before", SOON, is_same)?;
    }
    Ok(())
}

/// Asserts that transfers with `--persist` succeed from now on. Output of before is read within 500 ms.
fn assert_continues(reader: &mut Process) -> Result<()> {
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(500) {
        reader
            .read_line(SOON)?
            .expect("a transfer loop that continues");
    }
    let ops = |line: String| line.trim_start_matches("ops ").parse::<u64>().expect(&line);
    let before = ops(reader.read_until("ops", SOON)?);
    let after = ops(reader.read_until("ops", SOON)?);
    assert!(after > before, "{before}, then {after}");
    Ok(())
}
