// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Promotion of peers to RC, and the order of requests across transports.

use kite_cluster::vqp::{endless, expose_memory, failures};
use kite_cluster::{outputs, until, Result, Setup};

use crate::{trio, without_promotion, LONG, SOON, TRIO};

/// A peer with many requests is promoted to RC. Requests that RC cannot carry switch back to DC. Each request sees
/// the effects of the one before.
#[test]
fn vqp_order_is_kept_across_transport_switches() -> Result<()> {
    let trio = trio()?;
    let (_memory, name) = expose_memory(trio.node(3), 3, "")?;
    let one = trio.node(1);
    let (before, failed) = (one.stats()?, failures(&trio)?);
    let order = |rounds| {
        let line = format!("vqp order {name} --rounds {rounds}");
        one.workload(&line).limit(LONG).spawn()
    };
    outputs(&mut [order(60)?], LONG)?;
    let after = one.stats()?;
    let switches = after["transport_switches"] - before["transport_switches"];
    assert!(switches >= 40, "{switches}");
    assert!(after["vqp_rc_requests"] > before["vqp_rc_requests"] + 1000);
    assert_eq!(failures(&trio)?, failed);
    Ok(())
}

/// WRITEs by RC complete before a message about them, which uses DC.
#[test]
fn immediate_data_arrives_after_the_written_bytes() -> Result<()> {
    let trio = trio()?;
    let (one, three) = (trio.node(1), trio.node(3));
    let mut written = three.workload("vqp verify-writes 11").limit(LONG).spawn()?;
    let memory = written.read_until("", SOON)?;
    let before = one.stats()?;
    let line = format!("vqp notify-writes 3 {memory} --port 11 --rounds 1000");
    let tell = one.workload(&line).limit(LONG).spawn()?;
    outputs(&mut [tell, written], LONG)?;
    let after = one.stats()?;
    let more = |name: &str| after[name] - before[name];
    assert!(
        more("transport_switches") >= 100,
        "{}",
        more("transport_switches")
    );
    assert!(more("vqp_rc_requests") > 1000);
    Ok(())
}

/// With max_promoted=0 no request uses RC, however many there are.
#[test]
fn max_promoted_of_zero_promotes_no_peer() -> Result<()> {
    let trio = TRIO.take()?;
    trio.start_kite(&without_promotion())?;
    let (_memory, name) = expose_memory(trio.node(3), 3, "")?;
    let one = trio.node(1);
    let before = one.stats()?;
    let line = format!("vqp order {name} --rounds 60");
    outputs(&mut [one.workload(&line).limit(LONG).spawn()?], LONG)?;
    let after = one.stats()?;
    let more = |name: &str| after[name] - before[name];
    assert!(more("vqp_requests") > 10_000, "{}", more("vqp_requests"));
    assert_eq!(more("vqp_rc_requests") + more("promotions"), 0);
    Ok(())
}

/// With max_promoted=1 a peer with more requests replaces the promoted one.
#[test]
fn promoted_peers_are_limited() -> Result<()> {
    let trio = TRIO.take()?;
    trio.start_kite(&Setup {
        parameters: "max_promoted=1".into(),
        ..Setup::patient()
    })?;
    let one = trio.node(1);
    for number in [2, 3, 2] {
        let (_memory, name) = expose_memory(trio.node(number), number, "")?;
        let before = one.stats()?["promotions"];
        let line = format!("vqp order {name} --pairs 1000000000");
        let mut order = one.workload(&line).limit(LONG).spawn()?;
        until("the peer to be promoted", LONG, || {
            assert!(order.is_running(), "{:?}", order.wait(SOON)?);
            let after = one.stats()?;
            assert!(after["promoted_peers"] <= 1);
            Ok(after["promotions"] > before)
        })?;
        order.kill()?;
    }
    assert_eq!(one.stats()?["promoted_peers"], 1);
    Ok(())
}

/// `kite status` shows a promoted peer while it gets many requests, and no longer after it has left.
#[test]
fn stats_show_the_dci_pool() -> Result<()> {
    let trio = trio()?;
    let (_memory, name) = expose_memory(trio.node(3), 3, "")?;
    let one = trio.node(1);
    let _requests = endless(one, &name)?;
    let connected = one.stats()?["vqp_rc_requests"];
    until("requests by RC", SOON, || {
        Ok(one.stats()?["vqp_rc_requests"] > connected + 100)
    })?;
    let promoted = one.stats()?["promoted_peers"];
    let shown = one.kite("status")?;
    let line = shown.lines().find(|line| line.starts_with("transport:"));
    let line = line.unwrap_or_else(|| panic!("{shown}"));
    assert!(
        line.ends_with(&format!(" RC connections, {promoted} promoted peers")),
        "{line}"
    );
    let dcis = one.stats()?["dcis"];
    assert!(
        dcis > 0 && line.contains(&format!(" {dcis} DCIs,")),
        "{line}"
    );
    trio.node(3).stop_kited()?;
    let left = format!("promoted_peers={}", promoted - 1);
    one.await_gauges(&left, SOON)?;
    Ok(())
}
