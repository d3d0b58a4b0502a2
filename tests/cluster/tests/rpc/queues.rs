// SPDX-License-Identifier: GPL-2.0 OR MIT
//! I/O queues: each submitted request completes, despite lost packets, dead nodes and killed processes. Writes of a
//! process to the memory that it shares with the kernel harm no other process.

use std::time::Duration;

use kite_cluster::{outputs, until, Cluster, Node, Process, Result, Setup, SharedCluster, Turn};

static TRIO: SharedCluster = SharedCluster::new(|| Cluster::builder().name("queues").nodes(3));

const SOON: Duration = Duration::from_secs(30);

/// Timeout of large transfers on slow machines.
const LONG: Duration = Duration::from_secs(300);

/// Gauges of an idle node. The sessions are those of kited and of the reader.
const IDLE: &str = "sessions=2 open_handles=0 inflight=0 io_queues=0";

fn trio() -> Result<Turn<'static>> {
    let trio = TRIO.take()?;
    trio.start_kite(&Setup::patient())?;
    Ok(trio)
}

/// Starts requests that continue until they fail.
fn endless(node: &Node, arguments: &str) -> Result<Process> {
    let mut process = node
        .workload(&format!("queues endless {arguments}"))
        .spawn()?;
    process.read_until("ops", SOON)?;
    Ok(process)
}

/// Waits for the end of a process, whose last line must be the errno.
fn ends_with(process: &mut Process, errno: &str) -> Result<()> {
    let line = process.read_until("error ", SOON)?;
    assert_eq!(line, format!("error {errno}"));
    assert!(process.wait(SOON)?.success());
    Ok(())
}

#[test]
fn io_queue_results_match_a_model() -> Result<()> {
    let trio = trio()?;
    let mut all = trio.everywhere("queues check")?;
    outputs(&mut all, LONG)?;
    for depth in [1, 1024] {
        let line = format!("queues check --depth {depth} --operations 1000 --seed {depth}");
        trio.node(1).workload(&line).limit(LONG).sh()?;
    }
    outputs(&mut trio.everywhere("queues concurrent")?, LONG)?;
    for node in trio.nodes() {
        node.await_gauges(IDLE, SOON)?;
    }
    Ok(())
}

#[test]
#[ignore = "long"]
fn io_queue_loses_no_request_despite_lost_packets_and_failed_qps() -> Result<()> {
    let trio = trio()?;
    let two = trio.node(2);
    trio.with_loss(1.0, || {
        let mut all = trio.everywhere("queues check --operations 60000 --seed 3")?;
        for _ in 0..2 {
            let before = two.stats()?["sqes"];
            until("more submissions", SOON, || {
                Ok(two.stats()?["sqes"] > before + 200)
            })?;
            trio.cut(2, SOON)?;
        }
        outputs(&mut all, LONG).map(drop)
    })
}

#[test]
fn steady_io_queue_traffic_makes_no_system_calls() -> Result<()> {
    let trio = trio()?;
    let stdout = trio.node(1).workload("queues steady 2").limit(LONG).sh()?;
    let calls = stdout
        .split_whitespace()
        .nth(2)
        .and_then(|n| n.parse().ok());
    let calls: u64 = calls.unwrap_or_else(|| panic!("{stdout}"));
    // The scheduler may keep the poller from its processor for longer than its polling interval.
    assert!(calls < 20, "{stdout}");
    Ok(())
}

#[test]
fn io_queue_requests_of_many_handles_complete() -> Result<()> {
    let trio = trio()?;
    // No two of the requests can be posted together, and their number exceeds the limit in flight.
    let line = "queues steady 2 --depth 1024 --regions 8 --operations 100000";
    trio.node(1).workload(line).limit(LONG).sh()?;
    trio.node(1).await_gauges(IDLE, SOON).map(drop)
}

#[test]
fn io_queue_calls_run_concurrently_and_are_canceled() -> Result<()> {
    let trio = trio()?;
    let (one, two) = (trio.node(1), trio.node(2));
    let line = "rpc serve inverter --threads 2 --data-max 20000";
    let mut server = two.workload(line).spawn()?;
    server.read_until("serving", SOON)?;
    for node in [one, two] {
        let stdout = node.workload("queues invert inverter").limit(LONG).sh()?;
        assert_eq!(stdout.trim(), "500 calls");
        // Most of these calls exceed the inline size.
        let line = "queues invert inverter --operations 200 --data-max 20000";
        let stdout = node.workload(line).limit(LONG).sh()?;
        assert_eq!(stdout.trim(), "200 calls");
    }
    let stdout = one.workload("queues send inverter").sh()?;
    assert_eq!(stdout.trim(), "320 messages");
    let mut callers = [
        one.workload("queues cancel-calls inverter").spawn()?,
        two.workload("queues cancel-calls inverter").spawn()?,
    ];
    for caller in &mut callers {
        caller.read_until("canceled 16", SOON)?;
    }
    server.kill()?;
    for caller in &mut callers {
        caller.read_until("ended", SOON)?;
        assert!(caller.wait(SOON)?.success());
    }
    for node in [one, two] {
        node.await_gauges(IDLE, SOON)?;
    }
    one.kite("free inverter").map(drop)
}

#[test]
fn io_queue_requests_fail_with_region_rights_or_node() -> Result<()> {
    let trio = trio()?;
    let (one, two, three) = (trio.node(1), trio.node(2), trio.node(3));
    one.kite("alloc freed 4M --node 2 --node 3")?;
    let mut users = [
        endless(one, "freed")?,
        endless(two, "freed --size 9000")?,
        endless(three, "freed")?,
    ];
    two.kite("free freed")?;
    for user in &mut users {
        ends_with(user, "ESTALE")?;
    }
    one.kite("alloc dying 4M --node 3")?;
    let mut users = [endless(one, "dying")?, endless(two, "dying --size 9000")?];
    three.stop_kited()?;
    for user in &mut users {
        ends_with(user, "EHOSTDOWN")?;
    }
    for node in [one, two] {
        node.await_gauges(IDLE, SOON)?;
    }
    one.kite("free dying").map(drop)
}

#[test]
fn killed_process_leaves_no_io_queue() -> Result<()> {
    let trio = trio()?;
    let node = trio.node(1);
    node.kite("alloc left 4M --node 2 --node 3")?;
    let mut survivor = endless(node, "left")?;
    for size in [8, 4096, 100_000] {
        let mut killed = endless(node, &format!("left --size {size}"))?;
        killed.kill()?;
        node.await_gauges("sessions=3 open_handles=1 io_queues=1", SOON)?;
        survivor.read_until("ops", SOON)?;
    }
    let mut clogged = node.workload("queues stall left").spawn()?;
    clogged.read_until("full", SOON)?;
    clogged.kill()?;
    survivor.kill()?;
    node.await_gauges(IDLE, SOON)?;
    node.kite("free left").map(drop)
}

#[test]
fn invalid_io_queues_and_sqes_are_rejected() -> Result<()> {
    let trio = trio()?;
    let checks = trio.node(1).workload("errors queues").limit(LONG).sh()?;
    assert!(checks.ends_with(" checks"), "{checks}");
    trio.node(1).await_gauges(IDLE, SOON).map(drop)
}

#[test]
fn io_queue_memory_counts_against_rlimit_memlock() -> Result<()> {
    let trio = trio()?;
    let node = trio.node(1);
    node.kite("alloc limited 1M --other-rights rw")?;
    let line =
        "ulimit -l 64; exec /kite/target/release/kite-workload queues endless limited --size 9000";
    let refused = node.command(line).user("alice").spawn()?.wait(SOON)?;
    assert!(refused.stderr.contains("out of memory"), "{refused:#?}");
    node.await_gauges(IDLE, SOON)?;
    node.kite("free limited").map(drop)
}

#[test]
fn hostile_io_queue_disturbs_no_other_process() -> Result<()> {
    let trio = trio()?;
    let (one, two) = (trio.node(1), trio.node(2));
    one.kite("alloc prey 1M --node 2 --other-rights rw")?;
    let line = "queues fuzz --region prey --submissions 1000000";
    let mut hostile = one.workload(line).user("alice").spawn()?;
    hostile.read_until("started", SOON)?;
    // Other processes with I/O queues, on both nodes, get correct results.
    for seed in 10..14 {
        let line = format!("queues check --operations 500 --seed {seed}");
        for node in [one, two] {
            node.workload(&line).limit(LONG).sh()?;
        }
    }
    let output = hostile.wait(Duration::from_secs(900))?;
    assert!(output.success(), "{output:#?}");
    one.await_gauges(IDLE, SOON)?;
    one.kite("free prey")?;
    trio.check()
}

#[test]
fn rnic_removal_fails_submitted_requests() -> Result<()> {
    let trio = trio()?;
    let (one, two) = (trio.node(1), trio.node(2));
    one.kite("alloc gone 4M --node 2")?;
    let mut users = [
        endless(one, "gone")?,
        endless(one, "gone --size 9000")?,
        endless(two, "gone")?,
    ];
    one.remove_rnic()?;
    for user in &mut users[..2] {
        // Submitted requests, or the process that waits for them, fail because the RNIC was removed.
        let output = user.wait(SOON)?;
        let completed = output.stdout.contains("error ENODEV");
        let waited = output.stderr.contains("no such RNIC");
        assert!(completed || waited, "{output:#?}");
        assert!(!output.stdout.contains("error EHOSTDOWN"), "{output:#?}");
    }
    ends_with(&mut users[2], "EHOSTDOWN")?;
    two.await_gauges(IDLE, SOON).map(drop)
}

/// Number of processes of [`Cluster::everywhere`].
const CALLERS: usize = 6;

#[test]
fn io_queue_serves_calls() -> Result<()> {
    let trio = trio()?;
    let (one, two) = (trio.node(1), trio.node(2));
    // With up to 20,000 bytes, most calls and replies exceed the inline size.
    for most in [4096, 20_000] {
        let calls = 200 * (CALLERS + 1);
        let line = format!("queues serve served --data-max {most} --calls {calls}");
        let mut server = two.workload(&line).spawn()?;
        server.read_until("serving", SOON)?;
        let line = format!("queues invert served --operations 200 --data-max {most}");
        let mut callers = trio.everywhere(&line)?;
        assert_eq!(callers.len(), CALLERS);
        for stdout in outputs(&mut callers, LONG)? {
            assert_eq!(stdout.trim(), "200 calls");
        }
        // Callers that wait by system call get replies, too.
        let line = format!("rpc invert served --operations 50 --threads 4 --data-max {most}");
        one.workload(&line).limit(LONG).sh()?;
        server.read_until(&format!("{calls} served"), SOON)?;
        assert!(server.wait(SOON)?.success());
        one.kite("free served")?;
    }
    for node in trio.nodes() {
        node.await_gauges(IDLE, SOON)?;
    }
    Ok(())
}

#[test]
#[ignore = "long"]
fn callers_fail_when_a_server_with_io_queue_is_killed() -> Result<()> {
    let trio = trio()?;
    for most in [4096, 20_000] {
        let line = format!("queues serve mortal --data-max {most}");
        let mut server = trio.node(2).workload(&line).spawn()?;
        server.read_until("serving", SOON)?;
        // After so many served calls, others are in flight.
        let before = trio.node(2).stats()?["rpcs_served"];
        let line = format!("queues invert mortal --operations 1000000 --data-max {most}");
        let mut callers = trio.everywhere(&line)?;
        let two = trio.node(2);
        until("calls", SOON, || {
            Ok(two.stats()?["rpcs_served"] >= before + 100)
        })?;
        server.kill()?;
        for caller in &mut callers {
            let output = caller.wait(SOON)?;
            let ended = "the server ended before it replied, or the other end is closed";
            assert!(output.stderr.contains(ended), "{}", output.stderr);
        }
        trio.node(1).kite("free mortal")?;
    }
    for node in trio.nodes() {
        node.await_gauges(IDLE, SOON)?;
    }
    Ok(())
}

/// Loads the sample of a module with an I/O queue, with parameters.
fn load(node: &Node, parameters: &str) -> Result<()> {
    let line = format!("insmod /run/kite/build/user/kite_queue.ko {parameters}");
    node.command(line).limit(LONG).sh().map(drop)
}

fn parameter(node: &Node, name: &str) -> Result<String> {
    node.sh(&format!("cat /sys/module/kite_queue/parameters/{name}"))
}

fn writes(node: &Node) -> Result<u64> {
    Ok(parameter(node, "writes")?.parse().unwrap())
}

#[test]
fn kernel_module_uses_an_io_queue() -> Result<()> {
    let trio = trio()?;
    let one = trio.node(1);
    let mut server = trio.node(3).workload("rpc serve silent").spawn()?;
    server.read_until("serving", SOON)?;
    for node in [1, 2] {
        load(one, &format!("node={node} silent=silent"))?;
        until("writes to continue", SOON, || Ok(writes(one)? > 1000))?;
        assert_eq!(parameter(one, "ended")?, "0");
        assert!(!one.run("rmmod kite")?.success());
        // The module is unloaded while the writes continue.
        one.sh("rmmod kite_queue")?;
        one.await_gauges(IDLE, SOON)?;
    }
    server.kill()?;
    one.kite("free silent").map(drop)
}

#[test]
fn rnic_removal_fails_requests_of_a_kernel_module() -> Result<()> {
    const ENODEV: &str = "-19";
    let trio = trio()?;
    let one = trio.node(1);
    load(one, "node=2")?;
    until("writes to continue", SOON, || Ok(writes(one)? > 1000))?;
    one.remove_rnic()?;
    until("their end", SOON, || Ok(parameter(one, "ended")? != "0"))?;
    assert_eq!(parameter(one, "ended")?, ENODEV);
    one.sh("rmmod kite_queue").map(drop)
}
