// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Lost packets, failed QPs, cut links, unreachable nodes.

use std::thread;
use std::time::Duration;

use kite_cluster::{until, Node, Result, Setup, Turn};

use crate::{gauge, hold, trio, IDLE, LONG, SOON, TRIO};

fn patient_trio() -> Result<Turn<'static>> {
    let trio = TRIO.take()?;
    trio.start_kite(&Setup::patient())?;
    Ok(trio)
}

/// Runs the test program `count` times at once, each with its number in place of `{}`. Returns a line of each: the
/// number and the output.
fn at_once(node: &Node, count: usize, arguments: &str) -> Result<Vec<String>> {
    let program = "/kite/target/release/kite-workload";
    let arguments = arguments.replace("{}", "$i");
    let line =
        format!("for i in $(seq {count}); do (echo $i $({program} {arguments})) & done; wait");
    let output = node.command(line).limit(LONG).sh()?;
    Ok(output.lines().map(Into::into).collect())
}

#[test]
#[ignore = "long"]
fn lost_packets_corrupt_no_data() -> Result<()> {
    let trio = trio()?;
    trio.node(1)
        .kite("alloc lossy 3000217 --node 1 --node 2 --node 3")?;
    for node in trio.nodes() {
        node.loss(5.0)?;
    }
    let start = |n: usize| {
        let first = (n - 1) * 2;
        let line = format!(
            "integrity lossy --unit 300017 --writers 6 --first {first} --threads 2 --seconds 15 --seed {}",
            std::process::id()
        );
        trio.node(n).workload(&line).spawn()
    };
    let mut writers = (1..=3).map(start).collect::<Result<Vec<_>>>()?;
    let outputs: Vec<_> = writers.iter_mut().map(|writer| writer.wait(LONG)).collect();
    for node in trio.nodes() {
        assert!(node.lost()? > 0, "{} lost nothing", node.name());
        node.loss(0.0)?;
    }
    for output in outputs {
        let output = output?;
        assert!(output.success(), "{output:#?}");
    }
    trio.node(2).kite("free lossy")?;
    Ok(())
}

#[test]
#[ignore = "long"]
fn control_requests_succeed_despite_lost_packets() -> Result<()> {
    let trio = patient_trio()?;
    let (one, two, three) = (trio.node(1), trio.node(2), trio.node(3));
    let mut lost = 0;
    for round in 0..3 {
        three.stop_kited()?;
        one.loss(5.0)?;
        two.loss(5.0)?;
        three.start_kite(3, &Setup::patient())?;
        three.loss(5.0)?;
        trio.await_members(3)?;
        for i in 0..4 {
            let name = format!("brief-{round}-{i}");
            let alloc = format!("alloc 300000 --nodes 3,1,2 --name {name}");
            let [write, free] = ["write", "free"].map(|verb| format!("{verb} {name}"));
            assert_eq!(one.attempt("root", &alloc)?, "OK", "{name}");
            assert_eq!(two.attempt("root", &write)?, "OK", "{name}");
            assert_eq!(three.attempt("root", &free)?, "OK", "{name}");
            assert_eq!(two.attempt("root", &write)?, "ENOENT", "{name}");
        }
        for node in trio.nodes() {
            lost += node.lost()?;
            node.loss(0.0)?;
        }
    }
    assert!(lost > 0, "no packet was lost");
    three.await_gauges(&format!("lent_bytes=0 {IDLE}"), SOON)?;
    Ok(())
}

#[test]
#[ignore = "long"]
fn requests_of_a_failed_qp_complete_on_the_next() -> Result<()> {
    let trio = TRIO.take()?;
    trio.start_kite(&Setup {
        parameters: "default_timeout_ms=60000".into(),
        ..Setup::patient()
    })?;
    let (one, two) = (trio.node(1), trio.node(2));
    one.kite("alloc redone 3000217 --node 2")?;
    let before = one.stats()?;
    let more = |name: &str, by: u64| Ok(gauge(one, name)? > before[name] + by);
    let line = "integrity redone --unit 300017 --writers 2 --threads 2 --seconds 15";
    let mut writers = one.workload(line).spawn()?;
    until("writes", SOON, || more("write_bytes", 3_000_000))?;
    two.disconnect()?;
    until("a queue pair to fail", SOON, || more("retries", 0))?;
    two.reconnect()?;
    let output = writers.wait(LONG)?;
    assert!(output.success(), "{output:#?}");
    one.kite("free redone")?;
    one.await_gauges(IDLE, SOON)?;
    Ok(())
}

#[test]
#[ignore = "long"]
fn link_cut_delays_transfers_and_later_ones_succeed() -> Result<()> {
    let trio = TRIO.take()?;
    // A suspected node has two heartbeats to respond: more time than the cut takes, also on a busy machine.
    trio.start_kite(&Setup {
        heartbeat_ms: 4_000,
        dead_ms: 20_000,
        ..Setup::default()
    })?;
    trio.node(1).kite("alloc cut 8M --node 2")?;
    let mut process = hold(trio.node(1), "cut --persist --timeout-ms 20000")?;
    trio.node(2).disconnect()?;
    // The duration of the fault, which this test is about.
    thread::sleep(Duration::from_secs(2));
    trio.node(2).reconnect()?;
    trio.await_members(3)?;
    let works = || Ok(trio.node(1).attempt("root", "write cut")? == "OK");
    until("writes to work again", SOON, works)?;
    process.kill()?;
    let output = process.wait(SOON)?.stdout;
    for line in output.lines().filter(|line| line.starts_with("error")) {
        let known = ["ETIMEDOUT", "EHOSTDOWN"]
            .iter()
            .any(|errno| line.contains(errno));
        assert!(known, "{output}");
    }
    trio.node(1).kite("free cut")?;
    trio.node(1).await_gauges(IDLE, SOON)?;
    Ok(())
}

/// Requests to an unreachable node wait, and no others do.
#[test]
#[ignore = "long"]
fn unreachable_member_delays_no_requests_to_others() -> Result<()> {
    let trio = patient_trio()?;
    let (one, two, three) = (trio.node(1), trio.node(2), trio.node(3));
    let lent = |node: &Node| Ok(format!("lent_bytes={}", gauge(node, "lent_bytes")?));
    let (lent_by_two, lent_by_three): (String, String) = (lent(two)?, lent(three)?);
    let idle = format!("{IDLE} regions={}", gauge(one, "regions")?);
    two.pause()?;
    // Memory that may have been lent is freed by requests that do not succeed yet. Their number exceeds that of the
    // workers for all nodes.
    let tried = at_once(one, 40, "attempt alloc 5000 --nodes 2");
    let reached = one.attempt("root", "alloc 4194304 --nodes 3");
    let gone = one.await_gauges(&idle, SOON);
    let given_back = three.await_gauges(&lent_by_three, SOON);
    two.resume()?;
    let tried = tried?;
    let timed_out = tried.iter().filter(|line| line.ends_with(" ETIMEDOUT"));
    assert_eq!(timed_out.count(), 40, "{tried:?}");
    assert_eq!(reached?, "OK");
    gone?;
    given_back?;
    two.await_gauges(&lent_by_two, SOON)?;
    Ok(())
}

/// Names are sent to each node independently.
#[test]
#[ignore = "long"]
fn joining_node_receives_names_while_a_member_is_unreachable() -> Result<()> {
    const NAMES: usize = 12;
    let trio = patient_trio()?;
    let (one, two, three) = (trio.node(1), trio.node(2), trio.node(3));
    for i in 1..=NAMES {
        one.kite(&format!("alloc name-{i} 4096"))?;
    }
    // Names that are not found now are those that node 3 owns.
    three.pause()?;
    let found = at_once(one, NAMES, "attempt map name-{} r");
    three.resume()?;
    let found = found?;
    let kept: Vec<&str> = found
        .iter()
        .filter_map(|line| line.strip_suffix(" ETIMEDOUT"))
        .collect();
    assert!(!kept.is_empty(), "node 3 owns none of the names: {found:?}");
    two.pause()?;
    let joined = three
        .stop_kited()
        .and_then(|()| three.start_kite(3, &Setup::patient()))
        .and_then(|()| three.await_view(3, 3));
    let mapped = joined.and_then(|()| {
        kept.iter()
            .map(|i| three.attempt("root", &format!("map name-{i} r")))
            .collect::<Result<Vec<_>>>()
    });
    two.resume()?;
    assert_eq!(mapped?, vec!["OK"; kept.len()]);
    for i in 1..=NAMES {
        let freed = || Ok(one.attempt("root", &format!("free name-{i}"))? == "OK");
        until("the resumed node to respond", SOON, freed)?;
    }
    one.await_gauges(IDLE, SOON)?;
    Ok(())
}
