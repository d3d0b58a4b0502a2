// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Failures under requests of VQPs: connections, nodes, processes, the RNIC.

use kite_cluster::vqp::{endless, expose_memory, failures};
use kite_cluster::{outputs, until, Cluster, Result, Setup};

use crate::{fail_node_during_adds, trio, without_promotion, LONG, SOON, TRIO};

/// Requests on a failed connection are sent again once no packet of them can arrive late.
#[test]
fn vqp_order_is_kept_when_a_connection_fails() -> Result<()> {
    let trio = trio()?;
    let (_memory, name) = expose_memory(trio.node(3), 3, "")?;
    let one = trio.node(1);
    let line = format!("vqp order {name} --pairs 1000000000");
    let mut order = one.workload(&line).limit(LONG).spawn()?;
    let mut goes = || {
        let before = one.stats()?["vqp_rc_requests"];
        until("requests by RC", LONG, || {
            assert!(order.is_running(), "{:?}", order.wait(SOON)?);
            Ok(one.stats()?["vqp_rc_requests"] > before + 1000)
        })
    };
    goes()?;
    for _ in 0..3 {
        trio.cut(3, SOON)?;
        goes()?;
    }
    order.kill()
}

/// Such a DCT still executes requests. The view change ends all the same, and other nodes use the next DCT.
#[test]
fn dct_that_does_not_drain_is_replaced_and_keeps_the_module_loaded() -> Result<()> {
    let trio = trio()?;
    let three = trio.node(3);
    three.hold_targets(true)?;
    trio.node(2).stop_kited()?;
    // The drain of the DCT is canceled after 4 s.
    until("the new view on node 3", SOON / 2, || {
        Ok(three.kite("nodes")?.lines().count() == 3)
    })?;
    three.hold_targets(false)?;
    let (memory, name) = expose_memory(three, 3, "")?;
    let line = format!("vqp check {name} --operations 20");
    trio.node(1).workload(&line).limit(LONG).sh()?;
    drop(memory);
    let alarm = trio.check().unwrap_err().to_string();
    assert!(alarm.contains("DCT cannot be destroyed"), "{alarm}");
    assert!(!alarm.contains("key cannot be replaced"), "{alarm}");
    three.stop_kited()?;
    let refused = three.unload("kite").unwrap_err().to_string();
    assert!(refused.contains("in use"), "{refused}");
    three.reset()?;
    three.wait_ready()
}

/// Requests to a node that dies fail, and no others, with DC alone and with promoted peers.
#[test]
fn dead_node_fails_only_requests_to_it() -> Result<()> {
    let trio = TRIO.take()?;
    trio.start_kite(&without_promotion())?;
    node_dies_under_requests(&trio, "dci_errors")?;
    trio.start_kite(&Setup::patient())?;
    node_dies_under_requests(&trio, "qp_errors")
}

/// Node 3 dies under requests of node 1. Asserts that the counter `failure` of node 1 grows.
fn node_dies_under_requests(trio: &Cluster, failure: &str) -> Result<()> {
    let (_two, to_two) = expose_memory(trio.node(2), 2, "")?;
    let (_three, to_three) = expose_memory(trio.node(3), 3, "")?;
    let one = trio.node(1);
    let mut doomed = endless(one, &format!("{to_three} --until-node-failure"))?;
    let line = format!("vqp check {to_two} --operations 600");
    let mut others = [one.workload(&line).limit(LONG).spawn()?];
    until("requests by RC", SOON, || {
        Ok(failure != "qp_errors" || one.stats()?["vqp_rc_requests"] > 1000)
    })?;
    let before = one.stats()?;
    trio.node(3).disconnect()?;
    let ended = doomed.wait(SOON)?;
    outputs(&mut others, LONG)?;
    trio.node(3).reconnect()?;
    assert!(ended.success(), "{ended:?}");
    assert!(one.stats()?[failure] > before[failure], "{failure}");
    one.await_gauges("inflight=0", SOON)?;
    until("all DCIs to be restored", SOON, || {
        Ok(one.stats()?["dcis"] >= before["dcis"])
    })?;
    Ok(())
}

/// Requests to a responsive node do not wait for those to an unresponsive one: there are enough DCIs.
#[test]
fn unresponsive_node_delays_no_requests_to_others() -> Result<()> {
    let trio = TRIO.take()?;
    trio.start_kite(&without_promotion())?;
    let (_two, to_two) = expose_memory(trio.node(2), 2, "")?;
    let (_three, to_three) = expose_memory(trio.node(3), 3, "")?;
    let one = trio.node(1);
    one.sh("rm -f /tmp/go")?;
    let line = format!(
        "vqp read-isolation {to_three} --other {to_two} --start-file /tmp/go --operations 6"
    );
    let mut beside = one.workload(&line).limit(LONG).spawn()?;
    beside.read_until("read", SOON)?;
    trio.node(3).disconnect_rnic()?;
    one.sh("touch /tmp/go")?;
    let ended = beside.wait(LONG)?;
    trio.node(3).reconnect()?;
    assert!(ended.success(), "{ended:?}");
    Ok(())
}

/// No atomic is applied twice, and no completed one is lost. The last one may have been applied or not.
#[test]
#[ignore = "long"]
fn atomics_of_an_unresponsive_node_are_applied_once() -> Result<()> {
    let trio = TRIO.take()?;
    trio.start_kite(&without_promotion())?;
    fail_node_during_adds(&trio)
}

#[test]
fn killed_process_leaves_no_vqp() -> Result<()> {
    let trio = trio()?;
    let (mut memory, name) = expose_memory(trio.node(3), 3, "")?;
    let (one, before) = (trio.node(1), failures(&trio)?);
    for _ in 0..5 {
        endless(one, &name)?.kill()?;
    }
    one.await_gauges("sessions=2 inflight=0", SOON)?;
    // Requests to memory of a process that ended fail.
    let mut asker = endless(one, &name)?;
    memory.kill()?;
    let output = asker.wait(SOON)?;
    assert!(!output.success());
    assert!(output.stderr.contains("no memory the key"), "{output:?}");
    assert_eq!(
        failures(&trio)?,
        before,
        "a request reached memory that was freed"
    );
    Ok(())
}

/// Pushed requests fail when their RNIC is removed.
#[test]
fn rnic_removal_fails_pushed_work_requests() -> Result<()> {
    let trio = trio()?;
    let (one, three) = (trio.node(1), trio.node(3));
    let (_memory, name) = expose_memory(three, 3, "")?;
    let part = |part| endless(one, &format!("{name} --parts 2 --part {part}"));
    let mut users = [part(0)?, part(1)?];
    // An idle process has no reference to the RNIC either.
    let idle = one.workload(&format!("vqp read-twice {name} --start-file /nowhere"));
    let mut idle = idle.spawn()?;
    idle.read_until("read", SOON)?;
    one.remove_rnic()?;
    for user in &mut users {
        let output = user.wait(SOON)?;
        assert!(output.stderr.contains("no such RNIC"), "{output:?}");
    }
    idle.kill()
}

/// Threads of the lowest priority poll the receive queues. Others take the processor from them again and again, for 3 s, and
/// so preempt some while they process messages.
#[test]
#[ignore = "long"]
fn node_answers_while_preempted_threads_of_low_priority_poll() -> Result<()> {
    let trio = trio()?;
    let (one, two) = (trio.node(1), trio.node(2));
    two.kite("alloc answers 4096 --node 2")?;
    // With lazy preemption a thread is preempted in the kernel only after a whole tick. Groups of sessions would share
    // the processor regardless of the priority.
    two.sh(
        "echo full > /sys/kernel/debug/sched/preempt; sysctl -q kernel.sched_autogroup_enabled=0",
    )?;
    let poll = "vqp poll-empty 1 99 --threads 8";
    let line = format!("exec chrt -i 0 taskset -c 0 /kite/target/release/kite-workload {poll}");
    let mut pollers = two.command(line).user("alice").spawn()?;
    pollers.read_until("ready", LONG)?;
    let hog = "timeout 3 sh -c \"while :; do :; done\" &";
    let hogs = format!("for hog in 1 2 3 4 5 6 7 8; do {hog} done; wait");
    let hogs = format!("while :; do sleep 0.2; {hogs}; done");
    let mut hogs = two.spawn(&format!("exec taskset -c 0 sh -c '{hogs}'"))?;
    // The other node serves each of these requests.
    let line = "requests fill answers --count 5000 --timeout-ms 2000";
    let report = one.workload(line).limit(LONG).sh()?;
    hogs.kill()?;
    pollers.kill()?;
    two.sh(
        "echo lazy > /sys/kernel/debug/sched/preempt; sysctl -q kernel.sched_autogroup_enabled=1",
    )?;
    two.kite("free answers")?;
    assert!(report.contains("5000 in"), "{report}");
    Ok(())
}
