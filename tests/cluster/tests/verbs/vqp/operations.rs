// SPDX-License-Identifier: GPL-2.0 OR MIT
//! One-sided operations and atomics of VQPs, and the rights that they need.

use std::time::{Duration, Instant};

use kite_cluster::vqp::{echo, expose_memory, failures};
use kite_cluster::{outputs, until, Process, Result};

use crate::{assert_adds_once, transfer_all_lengths, trio, without_promotion, LONG, SOON, TRIO};

/// Maximum delay until deregistered memory is freed, with a margin.
const GIVEN_BACK: Duration = Duration::from_secs(4);

#[test]
fn vqp_results_match_a_model() -> Result<()> {
    let trio = trio()?;
    let (_memory, name) = expose_memory(trio.node(3), 3, "")?;
    let before = failures(&trio)?;
    let check = |part: usize| {
        let line = format!(
            "vqp check {name} --parts 2 --part {} --operations 200",
            part - 1
        );
        trio.node(part).workload(&line).limit(LONG).spawn()
    };
    let mut all = [check(1)?, check(2)?];
    outputs(&mut all, LONG)?;
    assert_eq!(failures(&trio)?, before);
    for node in trio.nodes() {
        node.await_gauges("inflight=0", SOON)?;
    }
    Ok(())
}

/// The RNIC with the word executes the atomics of all nodes.
#[test]
fn vqp_fetch_adds_are_applied_exactly_once() -> Result<()> {
    let trio = trio()?;
    assert_adds_once(&trio, 3, [1, 1, 2, 2])
}

#[test]
fn rejected_work_requests_disturb_no_other_vqp() -> Result<()> {
    let trio = trio()?;
    let (_memory, name) = expose_memory(trio.node(3), 3, "")?;
    let one = trio.node(1);
    let before = failures(&trio)?;
    let mut other = one
        .workload(&format!("vqp check {name} --operations 300"))
        .limit(LONG)
        .spawn()?;
    for _ in 0..3 {
        one.workload(&format!("vqp invalid {name}"))
            .limit(LONG)
            .sh()?;
    }
    outputs(std::slice::from_mut(&mut other), LONG)?;
    assert_eq!(failures(&trio)?, before);
    Ok(())
}

#[test]
fn vqp_request_may_be_as_long_as_its_mr() -> Result<()> {
    let trio = TRIO.take()?;
    trio.start_kite(&without_promotion())?;
    transfer_all_lengths(&trio, 1, 3, 256)
}

#[test]
fn vqp_loses_no_request_despite_lost_packets() -> Result<()> {
    let trio = trio()?;
    let (_memory, name) = expose_memory(trio.node(3), 3, "")?;
    trio.with_loss(2.0, || {
        let check = |part: usize| {
            let line = format!(
                "vqp check {name} --parts 2 --part {} --operations 60",
                part - 1
            );
            trio.node(part).workload(&line).limit(LONG).spawn()
        };
        let mut all = [check(1)?, check(2)?];
        outputs(&mut all, LONG).map(drop)
    })
}

/// A million malformed or nearly valid requests disturb no other user.
#[test]
#[ignore = "long"]
fn hostile_process_disturbs_no_other_vqp() -> Result<()> {
    let trio = trio()?;
    let (_memory, name) = expose_memory(trio.node(3), 3, "--others rw")?;
    let (_other, other_name) = expose_memory(trio.node(3), 3, "")?;
    let one = trio.node(1);
    let (before, failed) = (one.stats()?, failures(&trio)?);
    let _echo = echo(trio.node(3), 7)?;
    let mut taker = trio.node(3).workload("vqp idle 9 --receive").spawn()?;
    taker.read_until("ready", SOON)?;
    let abuse = |how: &str| {
        one.workload(&format!("vqp fuzz {name} {how}"))
            .user("alice")
            .limit(LONG)
            .spawn()
    };
    // One program of another user runs all the time, and others start and end.
    let talk = one.workload("vqp ping 3 7 --messages 1000000000");
    let mut talk = talk.limit(LONG).spawn()?;
    let mut hostile = [
        abuse("")?,
        abuse("--one-sided --operations 300000")?,
        abuse("--port 9 --operations 200000")?,
    ];
    let mut checks = 0;
    while hostile.iter_mut().any(Process::is_running) {
        for line in [
            format!("check {other_name} --operations 40"),
            "ping 3 7 --messages 50".into(),
        ] {
            let line = format!("vqp {line} --seed {checks}");
            one.workload(&line).limit(LONG).sh()?;
        }
        checks += 1;
    }
    outputs(&mut hostile, SOON)?;
    assert!(checks > 1);
    assert!(talk.is_running(), "{:?}", talk.wait(SOON)?);
    talk.kill()?;
    let after = one.stats()?;
    assert!(after["vqp_rc_requests"] > before["vqp_rc_requests"] + 10_000);
    assert_eq!(after["qp_errors"], before["qp_errors"]);
    assert_eq!(failures(&trio)?, failed);
    one.await_gauges("sessions=2 inflight=0", SOON)?;
    Ok(())
}

/// Users can access their own memory and memory with rights for others.
#[test]
fn vqp_cannot_access_memory_of_others() -> Result<()> {
    let trio = trio()?;
    let (one, three) = (trio.node(1), trio.node(3));
    let (_own, own) = expose_memory(three, 3, "")?;
    let (_given, given) = expose_memory(three, 3, "--others rw")?;
    let check = |name: &str| {
        let line = format!("vqp check {name} --operations 5");
        one.workload(&line).user("alice").sh()
    };
    check(&given)?;
    let refused = check(&own).unwrap_err().to_string();
    assert!(refused.contains("permission denied"), "{refused}");
    Ok(())
}

/// Memory may be deregistered while a pushed request waits for other memory. The request then checks it again.
#[test]
fn vqp_request_with_expired_lease_is_revalidated() -> Result<()> {
    let trio = trio()?;
    let (one, three) = (trio.node(1), trio.node(3));
    let before = failures(&trio)?;
    for (taken_back, ended) in [(true, "no memory the key"), (false, "written")] {
        let (mut memory, name) = expose_memory(three, 3, "")?;
        three.sh("rm -f /tmp/go")?;
        let mut taker = three
            .workload("vqp idle 9 --receive --start-file /tmp/go")
            .spawn()?;
        taker.read_until("ready", SOON)?;
        let late = one
            .workload(&format!("vqp delayed-write {name} --port 9"))
            .limit(LONG);
        let mut late = late.spawn()?;
        late.read_until("pushed", SOON)?;
        let keys = || -> Result<u64> {
            let count = three.sh("cat /sys/kernel/debug/mlx5/*/commands/DESTROY_MKEY/n")?;
            Ok(count
                .lines()
                .map(|count| count.parse::<u64>().unwrap())
                .sum())
        };
        if taken_back {
            // Memory of earlier tests is freed seconds later, and must not be counted.
            let mut last = (keys()?, Instant::now());
            until("deferred frees to end", SOON, || {
                let now = keys()?;
                if now != last.0 {
                    last = (now, Instant::now());
                }
                Ok(last.1.elapsed() > GIVEN_BACK)
            })?;
            let before = keys()?;
            memory.kill()?;
            until("its memory to be freed", SOON, || Ok(keys()? > before))?;
        }
        three.sh("touch /tmp/go")?;
        let output = late.wait(LONG)?;
        assert!(output.stdout.trim().ends_with(ended), "{output:?}");
        taker.kill()?;
    }
    assert_eq!(failures(&trio)?, before);
    Ok(())
}

/// A node connects to itself as to others.
#[test]
fn vqp_connects_to_its_own_node() -> Result<()> {
    let trio = trio()?;
    let two = trio.node(2);
    let (_memory, name) = expose_memory(two, 2, "")?;
    let _echo = echo(two, 7)?;
    let before = failures(&trio)?;
    let run = |line: &str| two.workload(&format!("vqp {line}")).limit(LONG).sh();
    run(&format!("check {name} --operations 50"))?;
    run(&format!("order {name} --rounds 3"))?;
    run("ping 2 7 --messages 50")?;
    assert_eq!(failures(&trio)?, before);
    Ok(())
}
