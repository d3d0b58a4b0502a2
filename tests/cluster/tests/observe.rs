// SPDX-License-Identifier: GPL-2.0 OR MIT
//! What an operator can see of kite from outside: files, counters, trace events, the kernel's log.

use std::time::Duration;

use kite_cluster::{Cluster, Result, Setup, SharedCluster, Turn};

static PAIR: SharedCluster = SharedCluster::new(|| Cluster::builder().name("observe").nodes(2));

const SOON: Duration = Duration::from_secs(30);

fn pair() -> Result<Turn<'static>> {
    let pair = PAIR.take()?;
    pair.start_kite(&Setup::default())?;
    Ok(pair)
}

#[test]
fn fdinfo_tells_what_a_session_has() -> Result<()> {
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
    // The kernel cuts the names of programs to 15 characters.
    assert_eq!(
        of("kite-workload")?,
        "kite-rnic:\trxe0\nkite-handles:\t2\nkite-daemon:\t0"
    );
    assert_eq!(
        of("kited")?,
        "kite-rnic:\trxe0\nkite-handles:\t0\nkite-daemon:\t1"
    );
    node.kite("free seen")?;
    assert!(watch.wait(SOON)?.success());
    Ok(())
}

/// Runs a line with all of kite's trace events on, and returns what was traced.
fn traced(pair: &Cluster, line: &str) -> Result<String> {
    pair.node(1).sh(&format!(
        "set -e; cd /sys/kernel/tracing; echo >trace; echo 1 >events/kite/enable
        {line} >/dev/null
        echo 0 >events/kite/enable; cat trace"
    ))
}

#[test]
fn trace_events_tell_what_a_request_does() -> Result<()> {
    let pair = pair()?;
    let workload = "/kite/target/release/kite-workload";
    pair.node(1).kite("alloc traced 100000 --node 2")?;
    let trace = traced(&pair, &format!("{workload} attempt write traced"))?;
    pair.node(1).kite("free traced")?;
    let has = |event: &str, words: &[&str]| {
        trace
            .lines()
            .any(|line| line.contains(event) && words.iter().all(|word| line.contains(word)))
    };
    assert!(
        has(" kite_access: write ", &["home=1 ", "result=0"]),
        "{trace}"
    );
    assert!(has(" kite_post: ", &["node=2 ", "inflight="]), "{trace}");

    let trace = traced(&pair, "/kite/target/release/kite regions --node 2")?;
    assert!(trace.contains(" kite_call: node=2 "), "{trace}");
    Ok(())
}

#[test]
fn counters_tell_what_was_moved() -> Result<()> {
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
fn the_module_says_what_it_is_and_warns_once_of_its_key() -> Result<()> {
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
    for parameter in ["pairs", "slots", "lend_mib", "timeout_ms"] {
        assert!(info.contains(&format!("{parameter}:")), "{info}");
    }
    node.stop_kited()?;
    node.sh("rmmod kite; dmesg --clear")?;
    pair.start_kite(&Setup::default())?;
    let log = node.sh("dmesg | grep kite:")?;
    assert_eq!(log.matches("global key").count(), 1, "{log}");
    Ok(())
}
