// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Cut networks: of TCP, of RDMA, of both, of the seed and of followers. No incarnation ends, and no byte is lost.

use std::thread;
use std::time::{Duration, Instant};

use kite_cluster::{until, Node, Process, Result, Turn};

use crate::{trio, SOON};

/// Networks of a node that are cut.
#[derive(Clone, Copy, Debug)]
enum Cut {
    Tcp,
    Rdma,
    Both,
}

impl Cut {
    fn begin(self, node: &Node) -> Result<()> {
        match self {
            Cut::Tcp => node.disconnect_network(),
            Cut::Rdma => node.disconnect_rnic(),
            Cut::Both => node.disconnect(),
        }
    }
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

/// Regions of all nodes, each with the digest of its bytes. Those of node 3 are in the memory of node 2, too.
fn write_regions(trio: &Turn<'_>) -> Result<Vec<(String, String)>> {
    let mut regions = Vec::new();
    for (home, memory) in [(1, "1"), (2, "2"), (3, "3,2")] {
        let name = format!("cut-{home}");
        let alloc = format!(
            "alloc {name} 3000000 --node {}",
            memory.replace(',', " --node ")
        );
        trio.node(home).kite(&alloc)?;
        let fill = format!("fill {name} --seed {home}");
        regions.push((name, trio.node(2).workload(&fill).sh()?));
    }
    Ok(regions)
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

/// Cuts networks of a node for some time. Afterwards all nodes have the incarnations and regions of before, and read all
/// bytes. Returns the epochs before and after the cut.
fn cut(trio: &Turn<'_>, number: usize, networks: Cut, seconds: u64) -> Result<[u64; 2]> {
    let before = incarnations(trio.node(2))?;
    let epochs = || -> Result<u64> {
        let summary = trio.node(2).kite("status")?;
        let epoch = summary.split("epoch ").nth(1).expect("the epoch");
        Ok(epoch
            .split_whitespace()
            .next()
            .unwrap()
            .parse()
            .expect("a number"))
    };
    let epoch = epochs()?;
    let regions = write_regions(trio)?;
    // Mappings that exist meanwhile.
    let lines = regions.iter().map(|(name, _)| {
        format!("transfer {name} --persist --read-only --threads 1 --timeout-ms 2000")
    });
    let mut readers = lines
        .map(|line| trio.node(2).workload(&line).spawn())
        .collect::<Result<Vec<_>>>()?;
    for reader in &mut readers {
        reader.read_until("ops", SOON)?;
    }
    networks.begin(trio.node(number))?;
    // The duration of the fault, which this test is about.
    thread::sleep(Duration::from_secs(seconds));
    trio.node(number).reconnect()?;
    trio.await_members(3)?;
    for node in trio.nodes() {
        assert_eq!(incarnations(node)?, before, "{networks:?} of {number}");
        for (name, digest) in &regions {
            let line = format!("digest {name}");
            let is_same = || Ok(node.workload(&line).run()?.stdout.trim() == digest.as_str());
            until("the bytes of before", SOON, is_same)?;
        }
    }
    for reader in &mut readers {
        assert_continues(reader)?;
        reader.kill()?;
    }
    for (name, _) in &regions {
        trio.node(2).kite(&format!("free {name}"))?;
    }
    Ok([epoch, epochs()?])
}

#[test]
#[ignore = "long"]
fn cut_of_tcp_alone_changes_no_view() -> Result<()> {
    let trio = trio()?;
    for (number, seconds) in [(1, 6), (2, 15)] {
        let [before, after] = cut(&trio, number, Cut::Tcp, seconds)?;
        assert_eq!(before, after, "node {number}");
    }
    Ok(())
}

#[test]
#[ignore = "long"]
fn cut_of_rdma_ends_no_incarnation() -> Result<()> {
    cut(&trio()?, 3, Cut::Rdma, 10).map(drop)
}

#[test]
fn cut_of_both_networks_ends_no_incarnation() -> Result<()> {
    let trio = trio()?;
    for number in [1, 3] {
        let [before, after] = cut(&trio, number, Cut::Both, 15)?;
        assert!(after > before, "node {number} was never unreachable");
    }
    Ok(())
}
