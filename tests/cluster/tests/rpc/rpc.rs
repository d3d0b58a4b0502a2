// SPDX-License-Identifier: GPL-2.0 OR MIT
//! RPCs and messages: each is delivered to one server once, from every node, despite lost packets, failed queue
//! pairs, killed processes and dead nodes.

use std::time::Duration;

use kite_cluster::{outputs, until, Cluster, Node, Process, Result, Setup, SharedCluster, Turn};

static TRIO: SharedCluster = SharedCluster::new(|| Cluster::builder().name("rpc").nodes(3));

const SOON: Duration = Duration::from_secs(60);
const LONG: Duration = Duration::from_secs(300);

fn trio() -> Result<Turn<'static>> {
    let trio = TRIO.take()?;
    trio.start_kite(&Setup {
        parameters: "default_timeout_ms=60000".into(),
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

/// Kills servers, which must still run, and frees the region that they served.
fn end(node: &Node, name: &str, servers: &mut [Process]) -> Result<()> {
    for server in servers {
        if !server.is_running() {
            panic!("{:#?}", server.wait(SOON)?);
        }
        server.kill()?;
    }
    node.kite(&format!("free {name}"))?;
    Ok(())
}

fn first_word(node: &Node, name: &str) -> Result<u64> {
    let line = format!("atomics word {name} 0");
    Ok(node.workload(&line).sh()?.parse().unwrap())
}

/// Makes one call. Returns its output and errors.
fn attempt(node: &Node, line: &str) -> Result<String> {
    let output = node.workload(&format!("rpc call {line}")).run()?;
    Ok((output.stdout + &output.stderr).trim().to_string())
}

/// Starts one call that will wait.
fn start_call(node: &Node, line: &str) -> Result<Process> {
    let mut caller = node.workload(&format!("rpc call {line}")).spawn()?;
    caller.read_until("calling", SOON)?;
    Ok(caller)
}

/// Waits until the servers of the node have received `more` calls since `before`.
fn await_served(node: &Node, before: u64, more: u64) -> Result<()> {
    until("calls to be received", SOON, || {
        Ok(node.stats()?["rpcs_served"] >= before + more)
    })
    .map(drop)
}

fn assert_fails(caller: &mut Process, with: &str) -> Result<()> {
    let output = caller.wait(SOON)?;
    assert!(!output.success(), "{output:#?}");
    assert!(output.stderr.contains(with), "{output:#?}");
    Ok(())
}

/// Asserts that all regions of rings and rendezvous calls are freed.
fn assert_no_regions(trio: &Cluster) -> Result<()> {
    for node in trio.nodes() {
        node.await_gauges("regions=0 open_handles=0", SOON)?;
    }
    Ok(())
}

#[test]
fn concurrent_calls_receive_their_own_replies() -> Result<()> {
    let trio = trio()?;
    let one = trio.node(1);
    let mut servers = [
        serve(one, "invert --threads 2")?,
        serve(one, "invert --threads 2")?,
    ];
    let line = "rpc invert invert --threads 4 --operations 50";
    outputs(&mut trio.everywhere(line)?, LONG)?;
    end(one, "invert", &mut servers)
}

/// The smallest ring is full whenever more threads call than it has room for.
#[test]
fn full_ring_blocks_callers() -> Result<()> {
    let trio = trio()?;
    let two = trio.node(2);
    let mut servers = [serve(two, "narrow --ring 32768")?];
    let waits = || -> Result<u64> { Ok(trio.node(1).stats()?["ring_waits"]) };
    let before = waits()?;
    let line = "rpc invert narrow --threads 40 --operations 10";
    outputs(&mut trio.everywhere(line)?, LONG)?;
    assert!(waits()? > before);
    end(two, "narrow", &mut servers)
}

/// A lost message or acknowledgment is sent again. A duplicate is discarded.
#[test]
fn call_is_executed_once_despite_lost_packets_and_failed_qps() -> Result<()> {
    let trio = trio()?;
    let (one, two) = (trio.node(1), trio.node(2));
    let mut servers = [serve(one, "lossy --threads 4")?];
    for node in trio.nodes() {
        node.loss(5.0)?;
    }
    let mut crowd = trio.everywhere("rpc count lossy --threads 4 --operations 500")?;
    for _ in 0..3 {
        // Before this, node 2 may have no queue pair that could fail.
        let before = two.stats()?["rpcs"];
        until("replies to node 2", SOON, || {
            Ok(two.stats()?["rpcs"] > before + 20)
        })?;
        // At least one call or reply is in flight.
        trio.cut(2, SOON)?;
    }
    let sums = outputs(&mut crowd, LONG)?;
    for node in trio.nodes() {
        assert!(node.lost()? > 0, "{} lost nothing", node.name());
        node.loss(0.0)?;
    }
    let count = 2 * 3 * 4 * 500;
    assert_eq!(first_word(trio.node(3), "lossy")?, count);
    let sum: u64 = sums.iter().map(|sum| sum.parse::<u64>().unwrap()).sum();
    assert_eq!(sum, count * (count - 1) / 2, "{sums:?}");
    end(one, "lossy", &mut servers)
}

#[test]
fn messages_arrive_in_order_and_complete() -> Result<()> {
    let trio = trio()?;
    let three = trio.node(3);
    // One thread, so that messages are processed in the order of their arrival.
    let mut servers = [serve(three, "post --ring 32768")?];
    trio.node(1).loss(5.0)?;
    let line = "rpc send post --threads 4 --operations 100";
    let sent = outputs(&mut trio.everywhere(line)?, LONG);
    trio.node(1).loss(0.0)?;
    sent?;
    // Callers of different nodes take turns, so this call may get its reply before the last message is processed.
    let total = format!("calling\n{}", 2 * 3 * 4 * 100);
    until("all messages to be received", SOON, || {
        Ok(attempt(trio.node(2), "post total")? == total)
    })?;
    end(three, "post", &mut servers)
}

#[test]
fn messages_outlive_their_sender() -> Result<()> {
    let trio = trio()?;
    let (one, two, three) = (trio.node(1), trio.node(2), trio.node(3));
    let mut asleep = serve(one, "legacy --no-receive")?;
    let line = "rpc send legacy --threads 1 --operations 100";
    for node in [two, three] {
        node.workload(line).sh()?;
    }
    three.stop_kited()?;
    one.await_view(1, 2)?;
    let mut servers = [serve(one, "legacy")?];
    let total = format!("calling\n{}", 2 * 100);
    until("all messages to be received", SOON, || {
        Ok(attempt(two, "legacy total")? == total)
    })?;
    asleep.kill()?;
    end(one, "legacy", &mut servers)
}

#[test]
fn dead_server_fails_only_its_own_calls() -> Result<()> {
    let trio = trio()?;
    let (one, two) = (trio.node(1), trio.node(2));
    let before = one.stats()?["rpcs_served"];
    let mut first = serve(one, "mortal")?;
    let mut kept = [
        start_call(two, "mortal keep")?,
        start_call(one, "mortal keep")?,
    ];
    await_served(one, before, 2)?;
    // The next server takes over.
    let mut second = serve(one, "mortal")?;
    first.kill()?;
    for caller in &mut kept {
        assert_fails(caller, "ended before it replied")?;
    }
    let mut third = start_call(two, "mortal abort")?;
    assert_fails(&mut third, "ended before it replied")?;
    assert_eq!(attempt(two, "mortal invert")?, "calling\n4 bytes");
    // Pending calls fail with the last server, and later ones find none.
    second.kill()?;
    assert!(attempt(two, "mortal invert")?.contains("the region has no server"));
    let mut waiting = start_call(two, "mortal invert --retry")?;
    let mut servers = [serve(one, "mortal")?];
    assert!(waiting.wait(SOON)?.success());
    assert!(attempt(two, "mortal exit")?.contains("ended before it replied"));
    assert!(servers[0].wait(SOON)?.status != 0);
    end(one, "mortal", &mut [])
}

#[test]
fn unserved_call_ends_at_the_deadline_or_with_the_server() -> Result<()> {
    let trio = trio()?;
    let (one, two) = (trio.node(1), trio.node(2));
    let mut asleep = serve(one, "asleep --no-receive")?;
    assert!(attempt(two, "asleep invert --seconds 1")?.contains("deadline passed"));
    let mut waiting = start_call(two, "asleep invert")?;
    // Another server responds meanwhile, over the same queue pairs.
    let mut servers = [serve(one, "awake")?];
    let line = "rpc invert awake --operations 10";
    outputs(&mut [two.workload(line).spawn()?], LONG)?;
    asleep.kill()?;
    assert_fails(&mut waiting, "ended before it replied")?;
    one.kite("free asleep")?;
    end(one, "awake", &mut servers)
}

#[test]
#[ignore = "long"]
fn calls_of_dead_callers_are_dropped() -> Result<()> {
    let trio = trio()?;
    let (one, two) = (trio.node(1), trio.node(2));
    let before = one.stats()?["rpcs_served"];
    let mut servers = [serve(one, "widow --threads 2")?];
    let mut callers = [
        start_call(two, "widow keep")?,
        two.workload("rpc count widow --operations 1000000000")
            .spawn()?,
    ];
    await_served(one, before, 50)?;
    for caller in &mut callers {
        caller.kill()?;
    }
    assert_eq!(attempt(trio.node(3), "widow invert")?, "calling\n4 bytes");
    end(one, "widow", &mut servers)?;
    // Rings are regions, which are freed when no session calls.
    assert_no_regions(&trio)
}

/// The ring has no room for so many failure replies at once, and no other request waits for them.
#[test]
#[ignore = "long"]
fn server_exit_with_many_pending_calls_delays_no_other() -> Result<()> {
    let trio = trio()?;
    let one = trio.node(1);
    one.workload("rpc exit-unanswered 3000").limit(LONG).sh()?;
    one.await_gauges("regions=0 open_handles=0", SOON)?;
    Ok(())
}

#[test]
fn calls_fail_with_the_node_of_caller_or_server() -> Result<()> {
    let trio = trio()?;
    let (one, three) = (trio.node(1), trio.node(3));
    let before = three.stats()?["rpcs_served"];
    let mut here = serve(one, "here")?;
    let mut there = serve(three, "there")?;
    let mut callers = [
        start_call(one, "there keep")?,
        one.workload("rpc count there --operations 1000000000")
            .spawn()?,
    ];
    let mut leaving = three
        .workload("rpc count here --operations 1000000000")
        .spawn()?;
    await_served(three, before, 20)?;
    three.stop_kited()?;
    for caller in &mut callers {
        assert_fails(caller, "is not in the cluster")?;
    }
    assert!(!leaving.wait(SOON)?.success());
    assert!(!there.wait(SOON)?.success());
    // The other nodes continue.
    assert_eq!(attempt(trio.node(2), "here invert")?, "calling\n4 bytes");
    here.kill()?;
    one.kite("free here")?;
    Ok(())
}

#[test]
fn rendezvous_calls_and_replies_are_complete() -> Result<()> {
    let trio = trio()?;
    let one = trio.node(1);
    let mut servers = [
        serve(one, "long --threads 2 --data-max 200000")?,
        serve(one, "long --threads 2 --data-max 200000")?,
    ];
    one.loss(2.0)?;
    let line = "rpc invert long --threads 3 --operations 20 --data-max 200000";
    let called = outputs(&mut trio.everywhere(line)?, LONG);
    one.loss(0.0)?;
    called?;
    end(one, "long", &mut servers)?;
    assert_no_regions(&trio)
}

/// Each map and unmap of memory of the caller's node takes requests to that node.
#[test]
fn rendezvous_buffers_are_reused_within_a_session() -> Result<()> {
    let trio = trio()?;
    let (one, two) = (trio.node(1), trio.node(2));
    let mut servers = [serve(two, "steady --data-max 100000")?];
    let before = two.stats()?["ctrl_requests"];
    let line = "rpc invert steady --threads 1 --operations 100 --data-max 100000";
    one.workload(line).limit(LONG).sh()?;
    let asked = two.stats()?["ctrl_requests"] - before;
    assert!(asked < 50, "{asked} requests for 100 calls");
    end(two, "steady", &mut servers)?;
    assert_no_regions(&trio)
}

#[test]
fn rendezvous_messages_keep_order_with_inline_ones() -> Result<()> {
    let trio = trio()?;
    let three = trio.node(3);
    let mut servers = [serve(three, "parcels --data-max 20000")?];
    let line = "rpc send parcels --threads 3 --operations 30 --data-max 20000";
    outputs(&mut trio.everywhere(line)?, LONG)?;
    let total = format!("calling\n{}", 2 * 3 * 3 * 30);
    until("all messages to be received", SOON, || {
        Ok(attempt(trio.node(2), "parcels total")? == total)
    })?;
    end(three, "parcels", &mut servers)?;
    assert_no_regions(&trio)
}

#[test]
fn canceled_rendezvous_calls_are_not_executed() -> Result<()> {
    let trio = trio()?;
    let (one, two, three) = (trio.node(1), trio.node(2), trio.node(3));
    let mut asleep = serve(one, "dozing --no-receive --data-max 100000")?;
    let long = "dozing count --bytes 100000";
    assert!(attempt(two, &format!("{long} --seconds 1"))?.contains("deadline passed"));
    let mut killed = start_call(two, long)?;
    let mut leaving = start_call(three, long)?;
    let mut waiting = start_call(two, long)?;
    // All callers have created the regions of their data.
    for (node, calls) in [(two, 2), (three, 1)] {
        until("the calls to begin", SOON, || {
            Ok(node.stats()?["regions"] >= 2 * calls)
        })?;
    }
    killed.kill()?;
    three.stop_kited()?;
    leaving.wait(SOON)?;
    let mut servers = [serve(one, "dozing --data-max 100000")?];
    assert_eq!(waiting.wait(SOON)?.stdout.trim(), "calling\n0");
    assert_eq!(first_word(one, "dozing")?, 1);
    asleep.kill()?;
    end(one, "dozing", &mut servers)?;
    assert_no_regions(&trio)
}

#[test]
fn rendezvous_calls_fail_with_their_server() -> Result<()> {
    let trio = trio()?;
    let (one, two) = (trio.node(1), trio.node(2));
    let before = one.stats()?["rpcs_served"];
    let mut first = serve(one, "brief --data-max 100000")?;
    let mut kept = [
        start_call(two, "brief keep --bytes 100000")?,
        start_call(one, "brief keep --bytes 100000")?,
    ];
    await_served(one, before, 2)?;
    first.kill()?;
    for caller in &mut kept {
        assert_fails(caller, "ended before it replied")?;
    }
    end(one, "brief", &mut [])?;
    assert_no_regions(&trio)
}

#[test]
fn free_ends_the_service_of_the_region() -> Result<()> {
    let trio = trio()?;
    let (one, two) = (trio.node(1), trio.node(2));
    let before = one.stats()?["rpcs_served"];
    let mut server = serve(one, "freed")?;
    let mut caller = start_call(two, "freed keep")?;
    await_served(one, before, 1)?;
    two.kite("free freed")?;
    assert_fails(&mut server, "was freed")?;
    assert_fails(&mut caller, "ended before it replied")
}

#[test]
fn invalid_rpc_requests_are_rejected() -> Result<()> {
    let trio = trio()?;
    for node in [1, 2] {
        let checks = trio.node(node).workload("errors calls").sh()?;
        assert!(checks.ends_with(" checks"), "{checks}");
    }
    trio.node(1).kite("alloc far 4096 --other-rights rwm")?;
    let elsewhere = trio.node(2).workload("rpc serve far").run()?;
    assert!(elsewhere
        .stderr
        .contains("the home of the region is another node"));
    trio.node(1).kite("free far")?;
    Ok(())
}
