// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Requests of virtual queue pairs by I/O queue: the same results as by system calls, without the calls.

use std::time::Duration;

use kite_cluster::vqp::{echo, endless, expose_memory, failures};
use kite_cluster::{
    outputs, until, Cluster, Fabric, Node, Process, Result, Setup, SharedCluster, Turn,
};

static TRIO: SharedCluster = SharedCluster::new(|| {
    let builder = Cluster::builder().name("vqp-queue").nodes(3);
    // Soft-RoCE has no DC.
    builder.fabric(Fabric::Connectx)
});

const SOON: Duration = Duration::from_secs(30);
const LONG: Duration = Duration::from_secs(300);

/// Gauges without requests in flight.
const IDLE: &str = "io_queues=0 inflight=0";

fn trio() -> Result<Turn<'static>> {
    let trio = TRIO.take()?;
    trio.start_kite(&Setup::patient())?;
    Ok(trio)
}

fn run(node: &Node, line: &str) -> Result<String> {
    node.workload(&format!("vqp {line}")).limit(LONG).sh()
}

/// Starts a process that accepts connections at a port and pops no messages.
fn idle(node: &Node, port: u32) -> Result<Process> {
    let mut process = node.workload(&format!("vqp idle {port}")).spawn()?;
    process.read_until("ready", SOON)?;
    Ok(process)
}

/// Starts messages from node 1 to a process on node 3 that pops none. Some of them wait in the queue.
fn held(trio: &Cluster, name: &str, options: &str) -> Result<(Process, Process)> {
    let taker = idle(trio.node(3), 9)?;
    let line = format!("vqp queue backlog {name} --port 9 {options}");
    let mut sender = trio.node(1).workload(&line).limit(LONG).spawn()?;
    sender.read_until("held", SOON)?;
    Ok((taker, sender))
}

#[test]
fn vqp_requests_by_io_queue_match_a_model() -> Result<()> {
    let trio = trio()?;
    let (_memory, name) = expose_memory(trio.node(3), 3, "")?;
    let before = failures(&trio)?;
    // Two processes, one of which uses its virtual queue pair by both interfaces at once.
    let check = |node: usize, how: &str| {
        let line = format!("vqp check {name} --parts 3 --operations 200 {how}");
        trio.node(node).workload(&line).limit(LONG).spawn()
    };
    let mut all = [check(1, "--both")?, check(2, "--part 2 --queue")?];
    outputs(&mut all, LONG)?;
    assert_eq!(failures(&trio)?, before);
    for node in trio.nodes() {
        node.await_gauges(IDLE, SOON)?;
    }
    Ok(())
}

#[test]
fn atomics_by_io_queue_and_ioctl_add_up() -> Result<()> {
    let trio = trio()?;
    let (_memory, name) = expose_memory(trio.node(3), 3, "")?;
    let count = |(node, how): (usize, &str)| {
        let line = format!("vqp count {name} --operations 150 {how}");
        trio.node(node).workload(&line).limit(LONG).spawn()
    };
    let all = [(1, "--queue"), (1, ""), (2, "--queue")].map(count);
    let mut all = all.into_iter().collect::<Result<Vec<_>>>()?;
    let sums = outputs(&mut all, LONG)?;
    let sum: u64 = sums
        .iter()
        .map(|sum| sum.trim().parse::<u64>().unwrap())
        .sum();
    let count = 3 * 150;
    assert_eq!(sum, count * (count - 1) / 2, "each has seen another number");
    Ok(())
}

#[test]
fn vqp_order_is_kept_by_an_io_queue() -> Result<()> {
    let trio = trio()?;
    let (_memory, name) = expose_memory(trio.node(3), 3, "")?;
    let before = failures(&trio)?;
    run(
        trio.node(1),
        &format!("order {name} --rounds 20 --pairs 300 --queue"),
    )?;
    assert_eq!(failures(&trio)?, before);
    Ok(())
}

#[test]
fn vqp_messages_are_sent_by_an_io_queue() -> Result<()> {
    let trio = trio()?;
    let _echo = echo(trio.node(3), 7)?;
    let before = failures(&trio)?;
    for longest in [64, 131_072] {
        run(
            trio.node(1),
            &format!("ping 3 7 --len-max {longest} --queue"),
        )?;
    }
    assert_eq!(failures(&trio)?, before);
    Ok(())
}

#[test]
fn rejected_requests_of_an_io_queue_disturb_no_other() -> Result<()> {
    let trio = trio()?;
    let (_memory, name) = expose_memory(trio.node(3), 3, "")?;
    let one = trio.node(1);
    let before = failures(&trio)?;
    let line = format!("vqp check {name} --operations 200 --queue");
    let mut other = [one.workload(&line).limit(LONG).spawn()?];
    for _ in 0..3 {
        run(one, &format!("invalid {name} --queue"))?;
    }
    outputs(&mut other, LONG)?;
    assert_eq!(failures(&trio)?, before);
    Ok(())
}

/// Malformed requests, and entries rewritten while the kernel reads them, disturb no other virtual queue pair.
#[test]
fn hostile_vqp_sqes_disturb_no_other_vqp() -> Result<()> {
    let trio = trio()?;
    let (_memory, name) = expose_memory(trio.node(3), 3, "")?;
    let (_other, other_name) = expose_memory(trio.node(3), 3, "")?;
    let (one, before) = (trio.node(1), failures(&trio)?);
    let line = format!("vqp fuzz {name} --queue --operations 40000");
    let mut hostile = [one.workload(&line).limit(LONG).spawn()?];
    let mut checks = 0;
    while hostile[0].is_running() {
        run(
            one,
            &format!("check {other_name} --operations 40 --queue --seed {checks}"),
        )?;
        checks += 1;
    }
    outputs(&mut hostile, SOON)?;
    assert!(checks > 1);
    assert_eq!(failures(&trio)?, before);
    one.await_gauges(IDLE, SOON).map(drop)
}

#[test]
fn steady_vqp_requests_need_few_system_calls() -> Result<()> {
    let trio = trio()?;
    let (_memory, name) = expose_memory(trio.node(3), 3, "")?;
    let stdout = run(trio.node(1), &format!("queue steady {name}"))?;
    let calls = stdout.split(", ").nth(1).and_then(|calls| {
        let number = calls.split(' ').next()?;
        number.parse::<u64>().ok()
    });
    let calls = calls.unwrap_or_else(|| panic!("{stdout}"));
    // The scheduler may keep the poller from its processor for longer than its polling interval. Each request then
    // wakes it until it runs. By system calls, 32 requests take two calls.
    assert!(calls < 20_000 / 32, "{stdout}");
    Ok(())
}

#[test]
fn vqp_requests_over_the_depth_wait() -> Result<()> {
    let trio = trio()?;
    let (_memory, name) = expose_memory(trio.node(3), 3, "")?;
    run(trio.node(1), &format!("queue full {name}"))?;
    trio.node(1).await_gauges(IDLE, SOON).map(drop)
}

#[test]
fn prerequisite_of_a_canceled_request_serves_no_other() -> Result<()> {
    let trio = trio()?;
    let (_memory, name) = expose_memory(trio.node(3), 3, "")?;
    run(trio.node(1), &format!("queue cancel {name}"))?;
    trio.node(1).await_gauges(IDLE, SOON).map(drop)
}

/// A request waits for memory that its cgroup gets only after other memory is reclaimed.
#[test]
fn vqp_requests_complete_in_a_cgroup_at_its_limit() -> Result<()> {
    let trio = trio()?;
    let (_memory, name) = expose_memory(trio.node(3), 3, "")?;
    let one = trio.node(1);
    one.sh("cd /sys/fs/cgroup && echo +memory >cgroup.subtree_control && mkdir full")?;
    one.sh("echo 16M >/sys/fs/cgroup/full/memory.max")?;
    for way in ["--queue", ""] {
        // The page cache fills the cgroup.
        one.sh(&format!(
            "echo $$ >/sys/fs/cgroup/full/cgroup.procs
            while :; do cat /usr/bin/* >/dev/null; done & reader=$!
            /kite/target/release/kite-workload vqp check {name} --operations 400 {way}
            done=$?; kill $reader; wait; exit $done"
        ))?;
    }
    let full = one.sh("awk '$1 == \"max\" { print $2 }' /sys/fs/cgroup/full/memory.events")?;
    assert!(
        full.parse::<u64>().unwrap() > 0,
        "cgroup limit reached {full} times"
    );
    // A read in progress delays the end of the reader.
    until("the cgroup to be empty", SOON, || {
        Ok(one.sh("rmdir /sys/fs/cgroup/full").is_ok())
    })?;
    one.await_gauges(IDLE, SOON).map(drop)
}

/// Messages that are not popped block those behind them, and no others. They fail when either end closes.
#[test]
fn waiting_vqp_requests_fail_with_their_node_or_vqp() -> Result<()> {
    let trio = trio()?;
    let (_memory, name) = expose_memory(trio.node(3), 3, "")?;
    let (mut taker, mut sender) = held(&trio, &name, "")?;
    taker.kill()?;
    let output = sender.wait(SOON)?;
    // The first message and those in the queue fail. Those behind the first are canceled.
    let ended = r#"{"Canceled": 255, "ConnectionReset": 19}"#;
    assert!(output.stdout.trim().ends_with(ended), "{output:?}");
    // One of the queued messages was canceled before.
    let (mut taker, mut sender) = held(&trio, &name, "--close")?;
    let output = sender.wait(SOON)?;
    let ended = r#"{"BadHandle": 17, "Canceled": 256}"#;
    assert!(output.stdout.trim().ends_with(ended), "{output:?}");
    taker.kill()?;
    trio.node(1).await_gauges(IDLE, SOON).map(drop)
}

#[test]
fn killed_process_leaves_no_vqp_request() -> Result<()> {
    let trio = trio()?;
    let (_memory, name) = expose_memory(trio.node(3), 3, "")?;
    let (one, before) = (trio.node(1), failures(&trio)?);
    for _ in 0..5 {
        endless(one, &format!("{name} --queue"))?.kill()?;
    }
    let (mut taker, mut sender) = held(&trio, &name, "")?;
    sender.kill()?;
    taker.kill()?;
    one.await_gauges("sessions=2 io_queues=0 inflight=0", SOON)?;
    assert_eq!(failures(&trio)?, before);
    Ok(())
}

#[test]
fn dead_node_fails_vqp_requests_of_io_queues() -> Result<()> {
    let trio = trio()?;
    let (_two, to_two) = expose_memory(trio.node(2), 2, "")?;
    let (_three, to_three) = expose_memory(trio.node(3), 3, "")?;
    let one = trio.node(1);
    let mut doomed = endless(one, &format!("{to_three} --until-node-failure --queue"))?;
    let line = format!("vqp check {to_two} --operations 400 --queue");
    let mut others = [one.workload(&line).limit(LONG).spawn()?];
    trio.node(3).disconnect()?;
    let ended = doomed.wait(SOON)?;
    outputs(&mut others, LONG)?;
    trio.node(3).reconnect()?;
    assert!(ended.success(), "{ended:?}");
    one.await_gauges(IDLE, SOON).map(drop)
}

#[test]
fn rnic_removal_fails_vqp_requests_of_io_queues() -> Result<()> {
    let trio = trio()?;
    let (one, three) = (trio.node(1), trio.node(3));
    let (_memory, name) = expose_memory(three, 3, "")?;
    let mut busy = endless(one, &format!("{name} --queue"))?;
    let (mut taker, mut sender) = held(&trio, &name, "")?;
    one.remove_rnic()?;
    let output = busy.wait(SOON)?;
    assert!(output.stderr.contains("no such RNIC"), "{output:?}");
    let output = sender.wait(SOON)?;
    let told = output.stdout.trim().ends_with(r#"{"NoRnic": 274}"#);
    // Or the error reaches the process while it waits.
    let waited = output.stderr.contains("no such RNIC");
    assert!(told || waited, "{output:?}");
    taker.kill()
}

/// Attributes of an MR expire, and are read again without an action of the process.
#[test]
fn mr_attributes_are_read_again_for_an_io_queue() -> Result<()> {
    let trio = trio()?;
    let (mut memory, name) = expose_memory(trio.node(3), 3, "")?;
    let one = trio.node(1);
    let mut asker = endless(one, &format!("{name} --queue"))?;
    memory.kill()?;
    let output = asker.wait(SOON)?;
    assert!(output.stderr.contains("no memory the key"), "{output:?}");
    one.await_gauges(IDLE, SOON).map(drop)
}
