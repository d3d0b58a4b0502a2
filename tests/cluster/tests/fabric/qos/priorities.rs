// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Priorities and the policies that keep them apart.

use kite_cluster::{outputs, until, Node, Process, Result};

use crate::{json, pair, requests, LONG, SOON};

/// Starts requests that continue until they are killed.
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
    until("a session of low priority", SOON, || {
        Ok(json(one, "qos")?["sessions"] == 1)
    })?;
    assert_eq!(
        rate()?,
        None,
        "low priority is limited without high priority"
    );
    let mut high = vec![
        endless(one, "write shared --len 65536")?,
        endless(one, "read shared --len 65536")?,
    ];
    until("a rate for low priority", LONG, || Ok(rate()?.is_some()))?;
    let waits = one.stats()?["throttled"];
    until("low priority to be throttled", LONG, || {
        Ok(one.stats()?["throttled"] > waits)
    })?;
    for process in &mut high {
        process.kill()?;
    }
    until("the rate to be removed", LONG, || Ok(rate()?.is_none()))?;
    low.kill()?;
    until("no session of low priority", SOON, || {
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
    until("the module to be throttled", LONG, || {
        Ok(one.stats()?["throttled"] > waits)
    })?;
    one.sh("rmmod kite_background")?;
    for process in &mut high {
        process.kill()?;
    }
    one.kite("free shared")?;
    Ok(())
}

/// Programs of both priorities check the data that they read and write by all interfaces, and all of them complete.
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

/// Returns the queue pairs of the traced requests to node 2.
fn traced_qps(node: &Node, line: &str) -> Result<String> {
    let trace = "cd /sys/kernel/tracing";
    node.sh(&format!(
        "set -e; {trace}; echo >trace; echo 1 >events/kite/kite_post/enable; \
         /kite/target/release/kite-workload requests {line}; \
         echo 0 >events/kite/kite_post/enable; \
         grep -o 'kite_post: node=2 conn=.* count=[0-9]*' trace | tr = ' ' | \
         awk '{{ all[$5] += $7 }} END {{ for (conn in all) if (all[conn] > 50) print \"conn=\" conn }}'"
    ))
}

#[test]
fn hw_policy_separates_qps_of_priorities() -> Result<()> {
    let pair = pair()?;
    let one = pair.node(1);
    one.kite("qos --policy hw")?;
    for kind in ["write", "read", "queue-write"] {
        // At first only the queue pair of this priority is connected.
        for _ in 0..2 {
            requests(one, "root", &format!("{kind} shared --low"))?;
        }
        let line = |low: &str| format!("{kind} shared --count 400 {low}");
        let tail = |out: String| out.lines().skip(2).collect::<Vec<_>>().join(" ");
        assert_eq!(tail(traced_qps(one, &line(""))?), "conn=0", "{kind}");
        assert_eq!(tail(traced_qps(one, &line("--low"))?), "conn=1", "{kind}");
    }
    one.kite("qos --policy sw")?;
    one.kite("free shared")?;
    Ok(())
}
