// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Observability of kite: files, counters, trace events, kernel log.

use std::time::Duration;

use kite_cluster::{until, Cluster, Node, Result, Setup, SharedCluster, Turn};

static PAIR: SharedCluster =
    SharedCluster::new(|| Cluster::builder().name("observe").nodes(2).memory(2048));

const SOON: Duration = Duration::from_secs(30);
const LONG: Duration = Duration::from_secs(300);

fn pair() -> Result<Turn<'static>> {
    let pair = PAIR.take()?;
    pair.start_kite(&Setup::default())?;
    Ok(pair)
}

#[test]
fn fdinfo_shows_rnic_and_handles_of_a_session() -> Result<()> {
    let pair = pair()?;
    let node = pair.node(1);
    node.kite("alloc seen 9000 --node 2")?;
    let mut watch = node.workload("watch seen").spawn()?;
    watch.read_until("watching", SOON)?;
    let of = |program: &str| {
        node.sh(&format!(
            "cat $(grep -l kite-rnic /proc/$(pgrep -xo {program})/fdinfo/*) | grep ^kite-"
        ))
    };
    let rnic = node.rnic()?;
    // The kernel cuts the names of programs to 15 characters.
    assert_eq!(
        of("kite-workload")?,
        format!("kite-rnic:\t{rnic}\nkite-handles:\t2\nkite-daemon:\t0")
    );
    assert_eq!(
        of("kited")?,
        format!("kite-rnic:\t{rnic}\nkite-handles:\t0\nkite-daemon:\t1")
    );
    node.kite("free seen")?;
    assert!(watch.wait(SOON)?.success());
    Ok(())
}

#[test]
fn status_check_exits_0_in_a_cluster_and_2_without_rnic() -> Result<()> {
    let pair = pair()?;
    let node = pair.node(1);
    for (rnic, start, status) in [("", "ok: ", 0), ("nosuch", "down: ", 2)] {
        let line = "/kite/target/release/kite status --check --rnic";
        let text = node.sh(&format!("{line} '{rnic}'; echo $?"))?;
        assert!(text.starts_with(start), "{text}");
        assert!(text.ends_with(&format!("\n{status}")), "{text}");
    }
    Ok(())
}

#[test]
fn nodes_are_shown_and_accepted_by_host_name() -> Result<()> {
    let pair = pair()?;
    let (one, two) = (pair.node(1), pair.node(2));
    for node in [one, two] {
        let names = "kite nodes | awk 'NR > 1 { print $1, $2 }'";
        let names = node.sh(&format!("/kite/target/release/{names}"))?;
        assert_eq!(names, "1 node1\n2 node2");
    }
    two.kite("alloc named 9000 --node node1")?;
    for (option, home) in [("", "node2"), ("-n", "2"), ("--node node2", "node2")] {
        let regions = one.kite(&format!("regions {option}"))?;
        let row: Vec<&str> = regions
            .lines()
            .last()
            .unwrap_or_default()
            .split_whitespace()
            .collect();
        assert_eq!((row[0], row[3]), ("named", home), "{option}: {regions}");
    }
    let unknown = one.run("/kite/target/release/kite regions --node nosuch")?;
    assert!(
        unknown.stderr.contains("no node has the host name nosuch"),
        "{unknown:?}"
    );
    one.kite("migrate named --node node2")?;
    assert_eq!(one.stats()?["lent_bytes"], 0);
    two.kite("free named").map(drop)
}

#[test]
fn shell_completes_names_of_regions_and_nodes() -> Result<()> {
    let pair = pair()?;
    let node = pair.node(1);
    node.kite("alloc complete-me 9000")?;
    let completed = |words: &str| {
        node.sh(&format!(
            "PATH=$PATH:/kite/target/release; bash -c '\
             source <(kite completion bash); COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); \
             COMP_TYPE=9; _clap_complete_kite kite \"${{COMP_WORDS[COMP_CWORD]}}\"; echo \"${{COMPREPLY[@]}}\"'"
        ))
    };
    assert_eq!(completed("kite get comp")?, "complete-me");
    assert_eq!(completed("kite put file name --node no")?, "node1 node2");
    assert_eq!(completed("kite reg")?, "regions");
    node.kite("free complete-me").map(drop)
}

/// Enables or disables all trace events of kite.
fn trace(node: &Node, on: bool) -> Result<String> {
    let line = match on {
        true => "echo >trace; echo 1 >events/kite/enable",
        false => "echo 0 >events/kite/enable; cat trace",
    };
    node.sh(&format!("set -e; cd /sys/kernel/tracing; {line}"))
}

/// Runs a line with all trace events of kite enabled. Returns the trace.
fn traced(pair: &Cluster, line: &str) -> Result<String> {
    let node = pair.node(1);
    trace(node, true)?;
    let ran = node.sh(line);
    let traced = trace(node, false);
    ran.and(traced)
}

/// Returns `true` if the trace has the event with all of these words.
fn has(trace: &str, event: &str, words: &[&str]) -> bool {
    let event = format!(" {event}: ");
    let mut lines = trace.lines();
    lines.any(|line| line.contains(&event) && words.iter().all(|word| line.contains(word)))
}

#[test]
fn trace_events_record_each_step_of_a_request() -> Result<()> {
    let pair = pair()?;
    let workload = "/kite/target/release/kite-workload";
    pair.node(1).kite("alloc traced 100000 --node 2")?;
    let trace = traced(&pair, &format!("{workload} attempt write traced"))?;
    let line = format!("{workload} atomics fetch-add traced 8 --operations 1");
    let atomics = traced(&pair, &line)?;
    pair.node(1).kite("free traced")?;
    let atomic = ["home=1 ", "offset=8 ", "result=0"];
    assert!(has(&atomics, "kite_atomic", &atomic), "{atomics}");
    let access = ["write ", "home=1 ", "result=0"];
    assert!(has(&trace, "kite_access", &access), "{trace}");
    assert!(
        has(&trace, "kite_post", &["node=2 ", "inflight="]),
        "{trace}"
    );

    let trace = traced(&pair, "/kite/target/release/kite regions --node 2")?;
    assert!(
        has(&trace, "kite_ctrl_request", &["node=2 ", "result=0"]),
        "{trace}"
    );
    Ok(())
}

/// Writes to memory of node 2, whose kernel has left the cluster. The kernel of node 1 still has node 2 in its view,
/// since the daemon of node 1 is stopped. Returns the result of the write.
fn write_to_departed_node(pair: &Cluster) -> Result<String> {
    let (one, two) = (pair.node(1), pair.node(2));
    one.kite("alloc far 9000 --node 2")?;
    one.sh("pkill -STOP -x kited")?;
    let wrote = two
        .kill_kited()
        .and_then(|()| one.attempt("root", "write far --timeout-ms 3000"));
    one.sh("pkill -CONT -x kited")?;
    one.await_view(1, 1)?;
    wrote
}

#[test]
fn unresponsive_node_is_visible_in_events_and_counters() -> Result<()> {
    let pair = pair()?;
    let (one, two) = (pair.node(1), pair.node(2));
    let before = [one.stats()?, two.stats()?];
    trace(one, true)?;
    let wrote = write_to_departed_node(&pair);
    let after = [one.stats()?, two.stats()?];
    pair.start_kite(&Setup::default())?;
    one.kite("alloc near 9000 --node 2")?;
    one.kite("free near")?;
    let trace = trace(one, false)?;
    let free = one.attempt("root", "free far")?;
    assert!(["OK", "EHOSTDOWN", "ENOENT"].contains(&&*free), "{free}");

    assert_eq!(wrote?, "ETIMEDOUT");
    for (node, counter) in [
        (0, "errors"),
        (0, "retries"),
        (0, "qp_errors"),
        (1, "malformed_messages"),
    ] {
        assert!(after[node][counter] > before[node][counter], "{counter}");
    }
    for (event, words) in [
        ("kite_access", ["write ", "home=1 ", "result=-110"]),
        (
            "kite_retry",
            ["node=2 ", "len=4096 ", "status=retry exceeded"],
        ),
        ("kite_qp_state", ["node=2 ", "generation=", " down"]),
        ("kite_view", ["members=2 ", "unreachable=1 ", "removed=0"]),
        ("kite_view", ["members=2 ", "unreachable=0 ", "removed=1"]),
        ("kite_qp_state", ["node=2 ", "generation=1 ", " up"]),
    ] {
        assert!(has(&trace, event, &words), "{event} {words:?}: {trace}");
    }
    Ok(())
}

/// Waits until a counter of a node has grown. Repeats `meanwhile` until then.
fn move_counter(
    node: &Node,
    counter: &str,
    mut meanwhile: impl FnMut() -> Result<()>,
) -> Result<()> {
    let before = node.stats()?[counter];
    until(&format!("{counter} to move"), LONG, || {
        meanwhile()?;
        Ok(node.stats()?[counter] > before)
    })
    .map(drop)
}

/// The memory is freed while the node is still preparing it, so the free must wait.
#[test]
#[ignore = "long"]
fn cancellation_of_a_pending_request_is_counted() -> Result<()> {
    let pair = pair()?;
    let (one, two) = (pair.node(1), pair.node(2));
    // Clearing so many bytes takes longer than killing a process.
    let len = 800 << 20;
    move_counter(two, "duplicate_messages", || {
        let line = format!("anonymous {len} --nodes 2");
        let mut borrower = one.workload(&line).spawn()?;
        two.await_gauges(&format!("lent_bytes={len}"), SOON)?;
        borrower.kill()?;
        two.await_gauges("lent_bytes=0", LONG).map(drop)
    })
}

#[test]
fn counters_match_the_transferred_bytes() -> Result<()> {
    let pair = pair()?;
    let node = pair.node(1);
    node.sh("head -c 3000000 /dev/urandom >/tmp/file")?;
    let before = node.stats()?;
    node.kite("put /tmp/file counted --node 2")?;
    let between = node.stats()?;
    node.kite("get counted /tmp/back")?;
    let after = node.stats()?;
    node.kite("free counted")?;
    assert_eq!(between["write_bytes"] - before["write_bytes"], 3_000_000);
    assert_eq!(after["read_bytes"] - between["read_bytes"], 3_000_000);
    assert_eq!(after["local_bytes"], before["local_bytes"]);
    assert_eq!(after["inflight"], 0);
    assert_eq!(after["errors"], before["errors"]);
    assert!(after["work_requests"] > between["work_requests"]);
    Ok(())
}

#[test]
fn modinfo_is_complete_and_global_key_is_logged_once() -> Result<()> {
    let pair = pair()?;
    let node = pair.node(1);
    let info = node.sh("modinfo /run/kite/build/kite.ko")?;
    for field in ["license", "author", "description", "vermagic"] {
        assert!(
            info.lines()
                .any(|line| line.starts_with(&format!("{field}:"))),
            "{info}"
        );
    }
    for parameter in [
        "conns_per_peer",
        "max_idle_conns",
        "max_inflight",
        "max_promoted",
        "max_lent_mib",
        "max_local_mib",
        "max_poll_us",
        "default_timeout_ms",
    ] {
        assert!(info.contains(&format!("{parameter}:")), "{info}");
    }
    node.stop_kited()?;
    node.sh("rmmod kite; dmesg --clear")?;
    pair.start_kite(&Setup::default())?;
    let log = node.sh("dmesg | grep kite:")?;
    assert_eq!(log.matches("global key").count(), 1, "{log}");
    Ok(())
}
