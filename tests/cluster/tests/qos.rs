// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Priorities and limits: which requests are delayed, for how long, and that no others are.

use std::time::Duration;

use kite_cluster::{outputs, until, Cluster, Node, Process, Result, Setup, SharedCluster, Turn};

static PAIR: SharedCluster = SharedCluster::new(|| Cluster::builder().name("qos").nodes(2));

const SOON: Duration = Duration::from_secs(30);
const LONG: Duration = Duration::from_secs(300);

/// A pair of nodes without limits, and a region "shared" of node 2.
fn pair() -> Result<Turn<'static>> {
    let pair = PAIR.take()?;
    pair.start_kite(&Setup::patient())?;
    let one = pair.node(1);
    one.sh("kite=/kite/target/release/kite; $kite free shared 2>/dev/null || true")?;
    one.kite("qos --policy sw")?;
    one.kite("limit --user $(id -u alice) --remove")?;
    one.kite("alloc shared 64M --node 2 --other-rights rw")?;
    Ok(pair)
}

/// A value in JSON that the command prints.
fn json(node: &Node, arguments: &str) -> Result<serde_json::Value> {
    let text = node.kite(&format!("{arguments} --json"))?;
    Ok(serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}")))
}

/// Returns the usage of the only limit.
fn used(node: &Node) -> Result<serde_json::Value> {
    let limits = json(node, "limit")?;
    assert_eq!(limits.as_array().map(Vec::len), Some(1), "{limits}");
    Ok(limits[0]["used"].clone())
}

/// Parses the output of `requests`: number of requests, milliseconds, and the first error.
fn made(output: &str) -> (u64, u64, String) {
    let line = output.lines().last().unwrap_or_default();
    let (done, error) = line.split_once(", then ").unwrap_or((line, ""));
    let mut words = done.split_whitespace();
    let mut number = || words.find_map(|word| word.parse().ok());
    match (number(), number()) {
        (Some(count), Some(ms)) => (count, ms, error.to_owned()),
        _ => panic!("{output}"),
    }
}

fn requests(node: &Node, user: &str, line: &str) -> Result<String> {
    let requests = node.workload(&format!("requests {line}"));
    requests.user(user).limit(LONG).sh()
}

/// Requests of each kind that the limit counts for one of it.
const KINDS: [(&str, u64); 9] = [
    ("read", 1),
    ("write", 1),
    ("vectored", 2),
    ("set", 1),
    ("copy", 1),
    ("fetch-add", 1),
    ("lock", 1),
    ("queue-write", 1),
    ("queue-add", 1),
];

#[test]
fn limit_applies_to_every_kind_of_request() -> Result<()> {
    let pair = pair()?;
    let one = pair.node(1);
    for (kind, counted) in KINDS {
        one.kite("limit --user $(id -u alice) --requests 100")?;
        let output = requests(one, "alice", &format!("{kind} shared --count 60"))?;
        let (count, ms, error) = made(&output);
        assert_eq!((count, error.as_str()), (60, ""), "{kind}");
        // A hundredth of a second may be used later, so one request goes for nothing.
        let least = (60 * counted - 2) * 10 - 10;
        assert!(ms >= least, "{kind}: {ms} ms, at least {least}");
        let used = used(one)?;
        assert_eq!(used["requests"], 60 * counted, "{kind}: {used}");
        assert_ne!(used["throttled"], 0, "{kind}");
        one.kite("limit --user $(id -u alice) --remove")?;
    }
    one.kite("free shared")?;
    Ok(())
}

#[test]
fn limit_applies_to_messages_and_their_bytes() -> Result<()> {
    let pair = pair()?;
    let (one, two) = (pair.node(1), pair.node(2));
    one.kite("free shared")?;
    let mut server = two.workload("rpc serve shared --most 200000").spawn()?;
    server.read_until("serving", SOON)?;
    for (kind, len) in [("send", 1000), ("send", 100_000), ("queue-send", 1000)] {
        one.kite(&format!(
            "limit --user $(id -u alice) --bytes {}",
            100 * len
        ))?;
        let output = requests(
            one,
            "alice",
            &format!("{kind} shared --count 40 --len {len}"),
        )?;
        let (count, ms, error) = made(&output);
        assert_eq!((count, error.as_str()), (40, ""), "{kind} of {len}");
        assert!(ms >= 370, "{kind} of {len}: {ms} ms");
        let used = used(one)?;
        assert_eq!(used["bytes"], 40 * len, "{kind} of {len}: {used}");
        one.kite("limit --user $(id -u alice) --remove")?;
    }
    server.kill()?;
    Ok(())
}

#[test]
fn limit_applies_within_one_request() -> Result<()> {
    let pair = pair()?;
    let one = pair.node(1);
    one.kite("limit --user $(id -u alice) --bytes 16M")?;
    let write = format!("write shared --count 1 --len {}", 8 << 20);
    let (count, ms, error) = made(&requests(one, "alice", &write)?);
    assert_eq!((count, error.as_str()), (1, ""));
    // But for the last part, and what may be used later.
    assert!(ms >= 400, "{ms} ms");
    assert_eq!(used(one)?["bytes"], 8 << 20);
    one.kite("limit --user $(id -u alice) --remove")?;
    one.kite("free shared")?;
    Ok(())
}

/// Has alice make a request that her limit holds back for hours.
fn held(node: &Node, kind: &str) -> Result<Process> {
    node.kite("limit --user $(id -u alice) --bytes 1")?;
    let line = format!("requests {kind} shared --count 100 --len 4000 --timeout-ms 4000000");
    let mut process = node.workload(&line).user("alice").spawn()?;
    process.read_until("begun", SOON)?;
    until("alice is held back", SOON, || {
        Ok(used(node)?["throttled"] != 0)
    })?;
    Ok(process)
}

/// Not even one of low priority.
#[test]
fn limit_of_one_user_delays_no_other() -> Result<()> {
    let pair = pair()?;
    let one = pair.node(1);
    let mut processes = Vec::new();
    for kind in ["write", "set", "queue-write", "queue-add"] {
        processes.push(held(one, kind)?);
    }
    let before = used(one)?;
    for kind in ["write", "set", "fetch-add", "queue-write --low"] {
        let output = requests(one, "bob", &format!("{kind} shared"))?;
        let (count, _, error) = made(&output);
        assert_eq!((count, error.as_str()), (100, ""), "{kind}");
    }
    for (key, value) in before.as_object().into_iter().flatten() {
        if key != "throttled" {
            assert_eq!(used(one)?[key], *value, "bob's are not alice's");
        }
    }
    one.kite("limit --user $(id -u alice) --remove")?;
    for output in outputs(&mut processes, SOON)? {
        let (count, _, error) = made(&output);
        assert_eq!(
            (count, error.as_str()),
            (100, ""),
            "when the limit is lifted all go on"
        );
    }
    one.kite("free shared")?;
    Ok(())
}

/// Clients that sleep do not prevent requests of clients that poll.
#[test]
fn all_interfaces_share_one_limit_fairly() -> Result<()> {
    let pair = pair()?;
    let one = pair.node(1);
    one.kite("limit --user $(id -u alice) --requests 400")?;
    let line = "requests write shared --count 1000000000";
    let mut greedy = one.workload(line).user("alice").spawn()?;
    greedy.read_until("begun", SOON)?;
    for kind in ["queue-write", "queue-add", "set"] {
        let output = requests(one, "alice", &format!("{kind} shared --count 60"))?;
        let (count, _, error) = made(&output);
        assert_eq!((count, error.as_str()), (60, ""), "{kind}");
    }
    greedy.kill()?;
    one.kite("limit --user $(id -u alice) --remove")?;
    one.kite("free shared")?;
    Ok(())
}

/// More requests of queues are held back than there are workers, each of which would wait for hours.
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
    until("all are held back", SOON, || {
        Ok(used(one)?["throttled"] != 0)
    })?;
    let output = requests(one, "bob", "queue-add shared --count 60 --timeout-ms 30000")?;
    let (count, _, error) = made(&output);
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
    for kind in ["read", "write", "vectored", "set", "copy", "queue-write"] {
        let line = format!("{kind} shared --count 100 --len 4000 --timeout-ms 500");
        let output = requests(one, "alice", &line)?;
        assert_eq!(made(&output).2, "TimedOut", "{kind}: {output}");
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
    for kind in ["write", "set", "queue-write", "queue-add"] {
        let mut process = held(one, kind)?;
        process.kill()?;
        // What a worker does for a queue pair ends by its deadline, at the latest.
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
    for kind in ["write", "set", "queue-write", "queue-add"] {
        processes.push(held(one, kind)?);
    }
    one.remove_rnic()?;
    for output in outputs(&mut processes, SOON)? {
        let error = made(&output).2;
        assert!(
            ["NoRnic", "Stale", "HostDown"].contains(&&*error),
            "{output}"
        );
    }
    Ok(())
}

/// A rejected request is not charged and delays no other.
#[test]
fn rejected_request_is_not_charged() -> Result<()> {
    let pair = pair()?;
    let one = pair.node(1);
    one.kite("limit --user $(id -u alice) --bytes 100M")?;
    for (len, count) in [(u64::MAX, 30), (u64::MAX / 2 + 1, 2), ((64 << 20) + 1, 1)] {
        let line = format!("queue-set shared --len {len} --count {count}");
        assert_eq!(
            made(&requests(one, "alice", &line)?).2,
            "OutOfRange",
            "{len}"
        );
    }
    assert_eq!(used(one)?["bytes"], 0);
    let output = requests(one, "alice", "queue-set shared --len 1000 --count 50")?;
    assert_eq!(made(&output).2, "", "{output}");
    assert_eq!(used(one)?["bytes"], 50_000);
    one.kite("limit --user $(id -u alice) --remove")?;
    one.kite("free shared")?;
    Ok(())
}

/// Requests that wait for a removed limit return nothing to its successor.
#[test]
fn limits_change_while_throttled_processes_are_killed() -> Result<()> {
    let pair = pair()?;
    let one = pair.node(1);
    let flip = "kite='/kite/target/release/kite limit --user '$(id -u alice); \
                while :; do $kite --bytes 1; $kite --remove; done";
    let mut flips = one.command(flip).spawn()?;
    for kind in ["write", "set", "queue-write", "queue-add"].repeat(4) {
        let line = format!("requests {kind} shared --count 1000000 --timeout-ms 4000000");
        let waits = one.stats()?["throttled"];
        let mut process = one.workload(&line).user("alice").spawn()?;
        until("alice is held back", LONG, || {
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

/// A queued request that is canceled, or whose queue is destroyed, passes its admission on to the next.
#[test]
fn destroyed_queue_returns_its_admission() -> Result<()> {
    let pair = pair()?;
    let one = pair.node(1);
    one.kite("limit --user $(id -u alice) --bytes 1000")?;
    let line = "requests queue-set shared --count 20 --len 20000 --timeout-ms 4000000";
    let mut process = one.workload(line).user("alice").spawn()?;
    // One goes at once, and pays later.
    until("one turn is booked", SOON, || {
        Ok(used(one)?["bytes"].as_u64() > Some(20_000))
    })?;
    process.kill()?;
    one.await_gauges("io_queues=0", SOON)?;
    assert_eq!(used(one)?["bytes"], 20_000);
    one.kite("limit --user $(id -u alice) --remove")?;
    one.kite("free shared")?;
    Ok(())
}

#[test]
fn cgroup_limit_includes_descendants() -> Result<()> {
    let pair = pair()?;
    let one = pair.node(1);
    one.sh("mkdir -p /sys/fs/cgroup/batch/inner")?;
    one.kite("limit --cgroup /sys/fs/cgroup/batch --requests 100")?;
    let within = |cgroup: &str| {
        let line = format!(
            "echo $$ >/sys/fs/cgroup/{cgroup}/cgroup.procs; \
             exec /kite/target/release/kite-workload requests write shared --count 20"
        );
        one.command(line).limit(LONG).sh()
    };
    for (cgroup, requests) in [("batch", 20), ("batch/inner", 40), ("", 40)] {
        let output = within(cgroup)?;
        let (count, ms, error) = made(&output);
        assert_eq!((count, error.as_str()), (20, ""), "{cgroup}");
        assert!(cgroup.is_empty() || ms >= 170, "{cgroup}: {ms} ms");
        assert_eq!(used(one)?["requests"], requests, "{cgroup}");
    }
    one.kite("limit --cgroup /sys/fs/cgroup/batch --remove")?;
    one.sh("rmdir /sys/fs/cgroup/batch/inner /sys/fs/cgroup/batch")?;
    one.kite("free shared")?;
    Ok(())
}

#[test]
fn limits_and_policies_require_the_administrator() -> Result<()> {
    let pair = pair()?;
    let one = pair.node(1);
    for line in ["qos --policy none", "limit --user 7 --requests 1"] {
        let line = format!("/kite/target/release/kite {line} 2>&1");
        let output = one.command(line).user("alice").run()?;
        assert!(!output.success(), "{output:#?}");
        assert!(output.stdout.contains("administrator"), "{output:#?}");
    }
    assert_eq!(json(one, "qos")?["policy"], "sw");
    assert_eq!(json(one, "limit")?, serde_json::json!([]));
    one.kite("free shared")?;
    Ok(())
}

/// Requests without end, or nearly.
fn endless(node: &Node, line: &str) -> Result<Process> {
    let line = format!("requests {line} --count 1000000000");
    let mut process = node.workload(&line).spawn()?;
    process.read_until("begun", SOON)?;
    Ok(process)
}

#[test]
fn low_priority_yields_only_while_high_priority_is_active() -> Result<()> {
    let pair = pair()?;
    let one = pair.node(1);
    let rate = || Ok(json(one, "qos")?["rate"].as_u64());
    let mut low = endless(one, "write shared --len 65536 --low")?;
    until("one has low priority", SOON, || {
        Ok(json(one, "qos")?["sessions"] == 1)
    })?;
    assert_eq!(rate()?, None, "alone it may have all");
    let mut high = vec![
        endless(one, "write shared --len 65536")?,
        endless(one, "read shared --len 65536")?,
    ];
    until("low priority has a rate", LONG, || Ok(rate()?.is_some()))?;
    let waits = one.stats()?["throttled"];
    until("low priority has to wait", LONG, || {
        Ok(one.stats()?["throttled"] > waits)
    })?;
    for process in &mut high {
        process.kill()?;
    }
    until("it may have all again", LONG, || Ok(rate()?.is_none()))?;
    low.kill()?;
    until("nobody has low priority", SOON, || {
        Ok(json(one, "qos")?["sessions"] == 0)
    })?;
    one.kite("free shared")?;
    Ok(())
}

#[test]
fn kernel_module_of_low_priority_yields_on_a_workqueue() -> Result<()> {
    let pair = pair()?;
    let one = pair.node(1);
    let mut high = vec![
        endless(one, "write shared --len 65536")?,
        endless(one, "read shared --len 65536")?,
    ];
    one.sh("insmod /run/kite/build/user/kite_background.ko region=shared")?;
    let waits = one.stats()?["throttled"];
    until("it has to wait", LONG, || {
        Ok(one.stats()?["throttled"] > waits)
    })?;
    one.sh("rmmod kite_background")?;
    for process in &mut high {
        process.kill()?;
    }
    one.kite("free shared")?;
    Ok(())
}

/// Clients of both priorities, by all interfaces, verify the data that they read and write. None starves.
#[test]
fn both_priorities_keep_their_data_under_every_policy() -> Result<()> {
    let pair = pair()?;
    let one = pair.node(1);
    one.kite("free shared")?;
    for policy in ["none", "hw", "sw"] {
        one.kite(&format!("qos --policy {policy}"))?;
        one.kite("alloc shared 4M --node 1 --node 2 --other-rights rw")?;
        let crowd = |number: usize| {
            let low = if number % 2 == 0 { "--low" } else { "" };
            let line = format!(
                "integrity shared --writers 4 --unit 300017 --first {} --threads 1 --operations 40 {low}",
                number - 1
            );
            pair.node(number.div_ceil(2)).workload(&line).spawn()
        };
        let mut writers = (1..=4).map(crowd).collect::<Result<Vec<_>>>()?;
        outputs(&mut writers, LONG)?;
        one.kite("free shared")?;
    }
    Ok(())
}

/// The queue pairs by which requests went to node 2 that were traced.
fn pairs_of(node: &Node, line: &str) -> Result<String> {
    let trace = "cd /sys/kernel/tracing";
    node.sh(&format!(
        "set -e; {trace}; echo >trace; echo 1 >events/kite/kite_post/enable; \
         /kite/target/release/kite-workload requests {line}; \
         echo 0 >events/kite/kite_post/enable; \
         grep -o 'kite_post: node=2 pair=.* count=[0-9]*' trace | tr = ' ' | \
         awk '{{ all[$5] += $7 }} END {{ for (pair in all) if (all[pair] > 50) print \"pair=\" pair }}'"
    ))
}

#[test]
fn hw_policy_separates_qps_of_priorities() -> Result<()> {
    let pair = pair()?;
    let one = pair.node(1);
    one.kite("qos --policy hw")?;
    for kind in ["write", "read", "queue-write"] {
        // At first only that queue pair is connected which is wanted.
        for _ in 0..2 {
            requests(one, "root", &format!("{kind} shared --low"))?;
        }
        let line = |low: &str| format!("{kind} shared --count 400 {low}");
        let tail = |out: String| out.lines().skip(2).collect::<Vec<_>>().join(" ");
        assert_eq!(tail(pairs_of(one, &line(""))?), "pair=0", "{kind}");
        assert_eq!(tail(pairs_of(one, &line("--low"))?), "pair=1", "{kind}");
    }
    one.kite("qos --policy sw")?;
    one.kite("free shared")?;
    Ok(())
}
