// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Isolation of processes with virtual queue pairs: none exceeds its limits or ends objects of another one.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use kite_cluster::vqp::expose_memory;
use kite_cluster::{until, Cluster, Fabric, Node, Result, Setup, SharedCluster, Turn};
use serde_json::Value;

static PAIR: SharedCluster = SharedCluster::new(|| {
    let builder = Cluster::builder().name("tenants").nodes(2);
    // Soft-RoCE has no DC.
    builder.fabric(Fabric::Connectx)
});

const SOON: Duration = Duration::from_secs(30);
const LONG: Duration = Duration::from_secs(300);

fn pair() -> Result<Turn<'static>> {
    let pair = PAIR.take()?;
    pair.start_kite(&Setup::patient())?;
    Ok(pair)
}

/// Returns nodes with fewer slots than one queue pair can fill, and without promotion.
fn few_slots() -> Result<Turn<'static>> {
    let pair = PAIR.take()?;
    pair.start_kite(&Setup {
        parameters: "max_inflight=16 max_promoted=0".into(),
        ..Setup::patient()
    })?;
    Ok(pair)
}

/// Returns the requests that the only limit has counted, and how often a request waited for it.
fn used(node: &Node) -> Result<(u64, u64)> {
    let text = node.kite("limit --json")?;
    let limits: serde_json::Value = serde_json::from_str(&text).expect(&text);
    let used = &limits[0]["used"];
    let number = |name: &str| used[name].as_u64().expect(&text);
    Ok((number("requests"), number("throttled")))
}

/// Requests wait for the limit, whether they use system calls or an I/O queue.
#[test]
fn vqp_limit_applies_to_every_request() -> Result<()> {
    let pair = pair()?;
    let (_memory, name) = expose_memory(pair.node(2), 2, "")?;
    let one = pair.node(1);
    for way in ["", "--queue"] {
        one.kite("limit --user 0 --requests 200")?;
        let (start, before) = (Instant::now(), one.stats()?["vqp_requests"]);
        let line = format!("vqp check {name} --operations 40 {way}");
        one.workload(&line).limit(LONG).sh()?;
        let (requests, waits) = used(one)?;
        assert_eq!(requests, one.stats()?["vqp_requests"] - before, "{way}");
        assert!(requests >= 40 && waits != 0, "{way}: {requests}, {waits}");
        // The last push, of up to 32 requests, passes at once, and a burst of 10 ms is allowed.
        let least = Duration::from_millis((5 * requests).saturating_sub(5 * 32 + 10));
        assert!(start.elapsed() >= least, "{way}: {requests} requests");
        one.kite("limit --user 0 --remove")?;
    }
    Ok(())
}

/// Low priority yields to users of regions, and is not throttled without them.
#[test]
fn vqp_of_low_priority_yields() -> Result<()> {
    let pair = pair()?;
    let (_memory, name) = expose_memory(pair.node(2), 2, "")?;
    let one = pair.node(1);
    one.kite("alloc shared 1M --node 2")?;
    let mut low = one
        .workload(&format!("vqp stream {name} --len 65536 --low"))
        .spawn()?;
    let high = |kind: &str| {
        let line = format!("requests {kind} shared --len 65536 --count 1000000000");
        one.workload(&line).spawn()
    };
    let waits = || -> Result<u64> { Ok(one.stats()?["throttled"]) };
    let before = waits()?;
    let mut high = [high("write")?, high("read")?];
    until("low priority to be throttled", LONG, || {
        assert!(low.is_running(), "{:?}", low.wait(SOON)?);
        Ok(waits()? > before + 100)
    })?;
    high.iter_mut().try_for_each(|process| process.kill())?;
    until("low priority to be unthrottled", LONG, || {
        let before = (waits()?, one.stats()?["vqp_requests"]);
        let goes_on = || Ok(one.stats()?["vqp_requests"] > before.1 + 100);
        until("requests to continue", SOON, goes_on)?;
        Ok(waits()? == before.0)
    })?;
    low.kill()?;
    one.kite("free shared").map(drop)
}

/// Processes with the maximum of requests in flight leave slots to others.
#[test]
#[ignore = "long"]
fn busy_vqp_leaves_capacity_to_others() -> Result<()> {
    let pair = few_slots()?;
    let (_memory, name) = expose_memory(pair.node(2), 2, "")?;
    let one = pair.node(1);
    let stream = || one.workload(&format!("vqp stream {name}")).spawn();
    let mut streams = [stream()?, stream()?, stream()?];
    let count = |counter: &str| -> Result<u64> { Ok(one.stats()?[counter]) };
    let begun = count("vqp_requests")?;
    until("requests to be in flight", SOON, || {
        for stream in &mut streams {
            assert!(stream.is_running(), "{:?}", stream.wait(SOON)?);
        }
        Ok(count("vqp_requests")? > begun + 1000)
    })?;
    let (waits, pushed) = (count("slot_waits")?, count("vqp_requests")?);
    one.kite("bench latency --node 2 --operation write --size 64 --iterations 100")?;
    assert!(count("vqp_requests")? > pushed, "the streams stopped");
    assert_eq!(count("slot_waits")?, waits);
    streams.iter_mut().try_for_each(|stream| stream.kill())
}

/// Returns the requests that each virtual queue pair of a node has pushed, by its process.
fn pushed(node: &Node) -> Result<BTreeMap<u64, u64>> {
    let all: Vec<Value> = serde_json::from_str(&node.kite("vqps --json")?).unwrap();
    let of = |vqp: &Value| {
        (
            vqp["pid"].as_u64().unwrap(),
            vqp["requests"].as_u64().unwrap(),
        )
    };
    Ok(all.iter().map(of).collect())
}

/// One of the processes transfers many more bytes with each request.
#[test]
fn busy_vqps_get_equal_shares() -> Result<()> {
    let pair = few_slots()?;
    let (_memory, name) = expose_memory(pair.node(2), 2, "--mib 1")?;
    let one = pair.node(1);
    let stream = |len| {
        one.workload(&format!("vqp stream {name} --len {len}"))
            .spawn()
    };
    let mut streams = [stream(8)?, stream(8)?, stream(8)?, stream(32 << 10)?];
    until("pushes of all processes", SOON, || {
        let pushed = pushed(one)?;
        Ok(pushed.len() == streams.len() && pushed.values().all(|&count| count > 200))
    })?;
    let before = pushed(one)?;
    let more = || -> Result<Vec<u64>> {
        let after = pushed(one)?;
        Ok(before
            .iter()
            .map(|(pid, count)| after[pid] - count)
            .collect())
    };
    until("8000 pushes", LONG, || {
        Ok(more()?.iter().sum::<u64>() > 8000)
    })?;
    let more = more()?;
    let fair = more.iter().sum::<u64>() / streams.len() as u64;
    assert!(more.iter().all(|&count| count > fair / 3), "{more:?}");
    streams.iter_mut().try_for_each(|stream| stream.kill())
}

/// A child closes the objects that it inherited, and the parent continues with all of them.
#[test]
fn forked_child_ends_no_object_of_its_parent() -> Result<()> {
    let pair = pair()?;
    let (_memory, name) = expose_memory(pair.node(2), 2, "")?;
    let line = format!("vqp fork {name}");
    pair.node(1).workload(&line).limit(LONG).sh().map(drop)
}
