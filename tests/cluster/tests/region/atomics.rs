// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Atomic operations on words of regions: each is applied exactly once, from every node, on local and remote words,
//! and despite lost packets and failed queue pairs.

use std::time::Duration;

use kite_cluster::{outputs, until, Cluster, Node, Result, Setup, SharedCluster, Turn};

static TRIO: SharedCluster = SharedCluster::new(|| Cluster::builder().name("atomics").nodes(3));

const SOON: Duration = Duration::from_secs(60);
const LONG: Duration = Duration::from_secs(300);

/// A word on node 1, and a word on node 2.
const OFFSETS: [u64; 2] = [8, 4 << 20];

fn trio() -> Result<Turn<'static>> {
    let trio = TRIO.take()?;
    trio.start_kite(&Setup {
        parameters: "default_timeout_ms=60000".into(),
        ..Setup::patient()
    })?;
    Ok(trio)
}

fn word(node: &Node, name: &str, offset: u64) -> Result<u64> {
    let line = format!("atomics word {name} {offset}");
    Ok(node.workload(&line).sh()?.parse().unwrap())
}

/// Asserts that each number from 0 to `count` - 1 was returned once, by the sum of the numbers.
fn assert_each_once(sums: &[String], count: u64) {
    let sum: u64 = sums.iter().map(|sum| sum.parse::<u64>().unwrap()).sum();
    assert_eq!(sum, count * (count - 1) / 2, "{sums:?}");
}

#[test]
fn concurrent_fetch_adds_are_applied_exactly_once() -> Result<()> {
    let trio = trio()?;
    trio.node(1).kite("alloc tally 8M --node 1 --node 2")?;
    for offset in OFFSETS {
        // More requests than can be in flight.
        let line = format!("atomics fetch-add tally {offset} --threads 40 --operations 10");
        let sums = outputs(&mut trio.everywhere(&line)?, LONG)?;
        let count = 2 * 3 * 40 * 10;
        assert_eq!(word(trio.node(3), "tally", offset)?, count);
        assert_each_once(&sums, count);
    }
    assert!(trio.node(3).stats()?["atomics"] >= 2 * 2 * 40 * 10);
    trio.node(1).kite("free tally")?;
    Ok(())
}

#[test]
fn swap_lock_excludes_threads_of_all_nodes() -> Result<()> {
    let trio = trio()?;
    trio.node(2).kite("alloc turns 8M --node 1 --node 2")?;
    for offset in OFFSETS {
        let line = format!("atomics spin-lock turns {offset} --threads 2 --operations 20");
        outputs(&mut trio.everywhere(&line)?, LONG)?;
        assert_eq!(word(trio.node(3), "turns", offset + 8)?, 2 * 3 * 2 * 20);
    }
    trio.node(2).kite("free turns")?;
    Ok(())
}

/// A request whose reply was lost is retried, and gets the same reply.
#[test]
#[ignore = "long"]
fn fetch_add_is_applied_once_despite_lost_packets_and_failed_qps() -> Result<()> {
    let trio = trio()?;
    let one = trio.node(1);
    one.kite("alloc lossy 4096 --node 2")?;
    let sums = trio.with_loss(5.0, || {
        let line = "atomics fetch-add lossy 0 --threads 4 --operations 1000";
        let mut before = one.stats()?["atomics"];
        let mut crowd = trio.everywhere(line)?;
        for _ in 0..3 {
            until("more operations", SOON, || {
                Ok(one.stats()?["atomics"] > before + 20)
            })?;
            trio.cut(2, SOON)?;
            before = one.stats()?["atomics"];
        }
        outputs(&mut crowd, LONG)
    })?;
    let count = 2 * 3 * 4 * 1000;
    assert_eq!(word(trio.node(3), "lossy", 0)?, count);
    assert_each_once(&sums, count);
    one.kite("free lossy")?;
    Ok(())
}

#[test]
fn atomics_fail_when_the_lender_or_home_is_down() -> Result<()> {
    let trio = trio()?;
    let (one, three) = (trio.node(1), trio.node(3));
    one.kite("alloc there 4096 --node 3")?;
    three.kite("alloc theirs 4096 --node 2")?;
    let before = one.stats()?["atomics"];
    let add = |name| format!("atomics fetch-add {name} 0 --operations 1000000000");
    let mut crowds = [
        one.workload(&add("there")).spawn()?,
        one.workload(&add("theirs")).spawn()?,
    ];
    until("the first operations", SOON, || {
        Ok(one.stats()?["atomics"] > before + 10)
    })?;
    three.stop_kited()?;
    for crowd in &mut crowds {
        let output = crowd.wait(SOON)?;
        assert!(!output.success());
        assert!(
            output.stderr.contains("is not in the cluster"),
            "{output:#?}"
        );
    }
    one.kite("free there")?;
    Ok(())
}

#[test]
fn invalid_atomic_requests_are_rejected() -> Result<()> {
    let trio = trio()?;
    for node in [1, 2] {
        let checks = trio.node(node).workload("errors atomics").sh()?;
        assert!(checks.ends_with(" checks"), "{checks}");
    }
    Ok(())
}
