// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Throttled requests and their effect on others.

use kite_cluster::{outputs, until, Node, Process, Result};

use crate::{pair, parse_requests, requests, used, LONG, SOON};

/// Starts a request of alice that her limit throttles for hours.
fn throttled_request(node: &Node, kind: &str) -> Result<Process> {
    node.kite("limit --user $(id -u alice) --bytes 1")?;
    let line = format!("requests {kind} shared --count 100 --len 4000 --timeout-ms 4000000");
    let mut process = node.workload(&line).user("alice").spawn()?;
    process.read_until("begun", SOON)?;
    until("alice to be throttled", SOON, || {
        Ok(used(node)?["throttled"] != 0)
    })?;
    Ok(process)
}

/// Requests of another user are not delayed, also those of low priority.
#[test]
fn limit_of_one_user_delays_no_other() -> Result<()> {
    let pair = pair()?;
    let one = pair.node(1);
    let mut processes = Vec::new();
    for kind in ["write", "fill", "queue-write", "queue-add"] {
        processes.push(throttled_request(one, kind)?);
    }
    let before = used(one)?;
    for kind in ["write", "fill", "fetch-add", "queue-write --low"] {
        let output = requests(one, "bob", &format!("{kind} shared"))?;
        let (count, _, error) = parse_requests(&output);
        assert_eq!((count, error.as_str()), (100, ""), "{kind}");
    }
    for (key, value) in before.as_object().into_iter().flatten() {
        if key != "throttled" {
            assert_eq!(
                used(one)?[key],
                *value,
                "requests of bob were charged to alice"
            );
        }
    }
    one.kite("limit --user $(id -u alice) --remove")?;
    for output in outputs(&mut processes, SOON)? {
        let (count, _, error) = parse_requests(&output);
        assert_eq!(
            (count, error.as_str()),
            (100, ""),
            "requests did not complete after the removal of the limit"
        );
    }
    one.kite("free shared")?;
    Ok(())
}

/// Requests that always wait for the limit do not starve those that retry without waiting.
#[test]
fn all_interfaces_share_one_limit_fairly() -> Result<()> {
    let pair = pair()?;
    let one = pair.node(1);
    one.kite("limit --user $(id -u alice) --requests 400")?;
    let line = "requests write shared --count 1000000000";
    let mut greedy = one.workload(line).user("alice").spawn()?;
    greedy.read_until("begun", SOON)?;
    for kind in ["queue-write", "queue-add", "fill"] {
        let output = requests(one, "alice", &format!("{kind} shared --count 60"))?;
        let (count, _, error) = parse_requests(&output);
        assert_eq!((count, error.as_str()), (60, ""), "{kind}");
    }
    greedy.kill()?;
    one.kite("limit --user $(id -u alice) --remove")?;
    one.kite("free shared")?;
    Ok(())
}

/// More requests of I/O queues are throttled than there are workers, each of which would wait for hours.
#[test]
fn throttled_requests_leave_workers_to_others() -> Result<()> {
    let pair = pair()?;
    let one = pair.node(1);
    one.kite("limit --user $(id -u alice) --bytes 1")?;
    let request =
        "/kite/target/release/kite-workload requests queue-add shared --timeout-ms 4000000";
    let line = format!("for i in $(seq 40); do {request} --count 32 & done; wait");
    let mut crowd = one.command(line).user("alice").limit(LONG).spawn()?;
    one.await_gauges("io_queues=40", LONG)?;
    until("all requests to be throttled", SOON, || {
        Ok(used(one)?["throttled"] != 0)
    })?;
    let output = requests(one, "bob", "queue-add shared --count 60 --timeout-ms 30000")?;
    let (count, _, error) = parse_requests(&output);
    assert_eq!((count, error.as_str()), (60, ""));
    one.kite("limit --user $(id -u alice) --remove")?;
    let output = crowd.wait(LONG)?;
    assert_eq!(output.stdout.matches("32 in").count(), 40, "{output:#?}");
    one.kite("free shared")?;
    Ok(())
}

#[test]
fn throttled_request_times_out_and_leaks_nothing() -> Result<()> {
    let pair = pair()?;
    let (one, two) = (pair.node(1), pair.node(2));
    one.kite("limit --user $(id -u alice) --bytes 1")?;
    for kind in ["read", "write", "vectored", "fill", "copy", "queue-write"] {
        let line = format!("{kind} shared --count 100 --len 4000 --timeout-ms 500");
        let output = requests(one, "alice", &line)?;
        assert_eq!(parse_requests(&output).2, "TimedOut", "{kind}: {output}");
    }
    one.kite("limit --user $(id -u alice) --remove")?;
    one.kite("free shared")?;
    one.await_gauges("inflight=0 sessions=2 open_handles=0", SOON)?;
    two.await_gauges("lent_bytes=0", SOON)?;
    Ok(())
}

#[test]
fn throttled_process_can_be_killed() -> Result<()> {
    let pair = pair()?;
    let one = pair.node(1);
    for kind in ["write", "fill", "queue-write", "queue-add"] {
        let mut process = throttled_request(one, kind)?;
        process.kill()?;
        // A worker ends its request at the deadline, at the latest.
        one.kite("limit --user $(id -u alice) --remove")?;
        one.await_gauges("inflight=0 sessions=2 io_queues=0", SOON)?;
    }
    one.kite("free shared")?;
    Ok(())
}

#[test]
fn throttled_request_does_not_delay_rnic_removal() -> Result<()> {
    let pair = pair()?;
    let one = pair.node(1);
    let mut processes = Vec::new();
    for kind in ["write", "fill", "queue-write", "queue-add"] {
        processes.push(throttled_request(one, kind)?);
    }
    one.remove_rnic()?;
    for output in outputs(&mut processes, SOON)? {
        let error = parse_requests(&output).2;
        assert!(
            ["NoRnic", "Stale", "HostDown"].contains(&&*error),
            "{output}"
        );
    }
    Ok(())
}

/// Requests that wait for a removed limit return nothing to its successor.
#[test]
#[ignore = "long"]
fn limits_change_while_throttled_processes_are_killed() -> Result<()> {
    let pair = pair()?;
    let one = pair.node(1);
    let flip = "kite='/kite/target/release/kite limit --user '$(id -u alice); \
                while :; do $kite --bytes 1; $kite --remove; done";
    let mut flips = one.command(flip).spawn()?;
    for kind in ["write", "fill", "queue-write", "queue-add"].repeat(4) {
        let line = format!("requests {kind} shared --count 1000000 --timeout-ms 4000000");
        let waits = one.stats()?["throttled"];
        let mut process = one.workload(&line).user("alice").spawn()?;
        until("alice to be throttled", LONG, || {
            Ok(one.stats()?["throttled"] > waits)
        })?;
        process.kill()?;
    }
    flips.kill()?;
    one.kite("limit --user $(id -u alice) --remove")?;
    one.await_gauges("inflight=0 sessions=2 io_queues=0", SOON)?;
    one.kite("limit --user $(id -u alice) --requests 1000")?;
    requests(one, "alice", "write shared --count 100")?;
    assert_eq!(used(one)?["requests"], 100);
    one.kite("limit --user $(id -u alice) --remove")?;
    one.kite("free shared")?;
    Ok(())
}

/// A queued request that is canceled, or whose process ends, passes its turn to the next one.
#[test]
fn destroyed_queue_returns_its_admission() -> Result<()> {
    let pair = pair()?;
    let one = pair.node(1);
    one.kite("limit --user $(id -u alice) --bytes 1000")?;
    let line = "requests queue-fill shared --count 20 --len 20000 --timeout-ms 4000000";
    let mut process = one.workload(line).user("alice").spawn()?;
    // One request passes at once, and is charged.
    until("a second request to reserve its turn", SOON, || {
        Ok(used(one)?["bytes"].as_u64() > Some(20_000))
    })?;
    process.kill()?;
    one.await_gauges("io_queues=0", SOON)?;
    assert_eq!(used(one)?["bytes"], 20_000);
    one.kite("limit --user $(id -u alice) --remove")?;
    one.kite("free shared")?;
    Ok(())
}
