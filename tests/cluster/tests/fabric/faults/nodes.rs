// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Daemons that end or restart, nodes that leave or reset.

use std::thread;
use std::time::{Duration, Instant};

use kite_cluster::{Result, Setup};

use crate::{assert_progress, error, gauge, hold, trio, IDLE, SOON};

#[test]
fn killed_daemon_removes_the_node_and_others_continue() -> Result<()> {
    let trio = trio()?;
    let (one, two, three) = (trio.node(1), trio.node(2), trio.node(3));
    one.kite("alloc stays 4M --node 2")?;
    let mut others = hold(one, "stays")?;
    let mut leaver = hold(three, "stays")?;
    let mut watch = three.workload("watch stays --expect EHOSTDOWN").spawn()?;
    watch.read_until("watching", SOON)?;
    three.kill_kited()?;
    assert_eq!(error(&mut leaver)?, "EHOSTDOWN");
    let watched = watch.wait(SOON)?;
    assert!(watched.success(), "{watched:#?}");
    assert_eq!(three.attempt("root", "map stays r")?, "EHOSTUNREACH");
    one.await_view(1, 2)?;
    two.await_view(2, 2)?;
    assert_progress(&mut others)?;
    others.kill()?;
    trio.start_kite(&Setup::default())?;
    assert_eq!(three.attempt("root", "write stays")?, "OK");
    three.kite("free stays")?;
    Ok(())
}

#[test]
fn restarted_daemon_changes_no_view_and_fails_no_request() -> Result<()> {
    let trio = trio()?;
    let setup = Setup::default();
    let (one, two, three) = (trio.node(1), trio.node(2), trio.node(3));
    let mut seed = one.keep_kited(1, &setup)?;
    let mut follower = three.keep_kited(3, &setup)?;
    trio.await_members(3)?;
    let mut before = Vec::new();
    for (node, name) in [(one, "kept-1"), (three, "kept-3")] {
        node.kite(&format!("alloc {name} 3M"))?;
        before.push((name, two.workload(&format!("fill {name}")).sh()?));
    }
    two.kite("alloc busy 4M --node 1 --node 3")?;
    let mut busy = hold(two, "busy")?;
    let views = || -> Result<Vec<String>> {
        let nodes = trio.nodes().iter();
        nodes.map(|node| node.kite("nodes --json")).collect()
    };
    let view = views()?;
    for signal in ["KILL", "TERM"] {
        for (node, daemon) in [(one, &mut seed), (three, &mut follower)] {
            node.sh(&format!("pkill -{signal} -x kited"))?;
            daemon.read_until("ready: ", SOON)?;
            assert_progress(&mut busy)?;
        }
    }
    // Waits for the time after which a silent node is removed, to show that none is.
    thread::sleep(Duration::from_millis(
        (setup.dead_ms + setup.heartbeat_ms).into(),
    ));
    assert_progress(&mut busy)?;
    assert_eq!(views()?, view, "epoch or incarnations changed");
    for (name, digest) in before {
        assert_eq!(two.workload(&format!("digest {name}")).sh()?, digest);
        two.kite(&format!("free {name}"))?;
    }
    let refused = three.unload("kite").unwrap_err().to_string();
    assert!(refused.contains("in use"), "{refused}");
    busy.kill()?;
    two.kite("free busy")?;
    for (node, mut daemon) in [(three, follower), (one, seed)] {
        node.sh("pkill -INT -x kited")?;
        assert!(daemon.wait(SOON)?.success());
        assert_eq!(node.attempt("root", "alloc 1")?, "EHOSTUNREACH");
    }
    two.await_view(2, 1)?;
    Ok(())
}

#[test]
#[ignore = "long"]
fn others_continue_after_the_seed_stops() -> Result<()> {
    let trio = trio()?;
    let (one, two, three) = (trio.node(1), trio.node(2), trio.node(3));
    two.kite("alloc seedless 4M --node 3")?;
    let mut others = hold(two, "seedless")?;
    one.kill_kited()?;
    two.await_view(2, 2)?;
    three.await_view(3, 2)?;
    assert_progress(&mut others)?;
    assert_eq!(three.attempt("root", "map seedless rwm")?, "OK");
    others.kill()?;
    trio.start_kite(&Setup::default())?;
    assert_eq!(one.attempt("root", "write seedless")?, "OK");
    one.kite("free seedless")?;
    Ok(())
}

/// An unreachable node keeps its name and the memory that is lent to it, until an operator of the seed evicts the node.
#[test]
fn eviction_frees_names_and_lent_memory_of_an_unreachable_node() -> Result<()> {
    let trio = trio()?;
    let (one, two, three) = (trio.node(1), trio.node(2), trio.node(3));
    let lent = gauge(two, "lent_bytes")?;
    three.kite("alloc evicted 4M --node 2")?;
    three.kill_kited()?;
    one.await_view(1, 2)?;
    assert_eq!(one.attempt("root", "map evicted r")?, "EHOSTDOWN");
    let refused = two.run("/kite/target/release/kite evict 3 --yes")?;
    assert!(refused.stderr.contains("the seed alone"), "{refused:?}");
    assert_eq!(one.kite("evict 3 --yes")?, "node 3 was removed");
    assert_eq!(one.attempt("root", "map evicted r")?, "ENOENT");
    two.await_gauges(&format!("lent_bytes={lent}"), SOON)?;
    assert_eq!(one.kite("nodes")?.lines().count(), 3);
    trio.start_kite(&Setup::default())?;
    three.kite("alloc evicted 4M --node 2")?;
    three.kite("free evicted").map(drop)
}

/// Addresses of an old mapping are invalid in the node's next incarnation, where they may belong to any other memory.
#[test]
#[ignore = "long"]
fn memory_of_an_earlier_incarnation_is_never_accessed() -> Result<()> {
    let trio = trio()?;
    let (one, three) = (trio.node(1), trio.node(3));
    let regions = gauge(one, "regions")?;
    one.kite("alloc former 4M --node 3")?;
    let mut process = hold(one, "former --persist --size 8192")?;
    three.stop_kited()?;
    trio.start_kite(&Setup::default())?;
    assert_eq!(error(&mut process)?, "EHOSTDOWN");
    // A new region ensures that the two kernels are connected again.
    one.kite("alloc present 4M --node 3")?;
    assert_eq!(one.attempt("root", "write present")?, "OK");
    let write = one.attempt("root", "write former")?;
    assert!(
        ["EHOSTDOWN", "ESTALE", "ENOENT"].contains(&&*write),
        "{write}"
    );
    process.kill()?;
    let output = process.wait(SOON)?.stdout;
    assert!(!output.contains("recovered"), "{output}");
    one.kite("free present")?;
    let free = one.attempt("root", "free former")?;
    assert!(["OK", "EHOSTDOWN", "ENOENT"].contains(&&*free), "{free}");
    one.await_gauges(&format!("{IDLE} regions={regions}"), SOON)?;
    Ok(())
}

#[test]
#[ignore = "long"]
fn node_reset_during_transfer_is_detected_and_rejoins() -> Result<()> {
    let trio = trio()?;
    let (one, two, three) = (trio.node(1), trio.node(2), trio.node(3));
    let lent = gauge(two, "lent_bytes")?;
    let regions = gauge(one, "regions")?;
    three.kite("alloc homed 4M --node 2")?;
    one.kite("alloc borrowed 4M --node 3")?;
    two.kite("alloc apart 4M --node 1")?;
    assert_eq!(gauge(two, "lent_bytes")?, lent + (4 << 20));
    let mut homed = hold(one, "homed")?;
    let mut borrowed = hold(one, "borrowed")?;
    let mut apart = hold(two, "apart")?;
    three.reset()?;
    let start = Instant::now();
    assert_eq!(error(&mut homed)?, "EHOSTDOWN", "the home is down");
    assert_eq!(error(&mut borrowed)?, "EHOSTDOWN", "the lender is down");
    assert!(start.elapsed() < SOON);
    two.await_view(2, 2)?;
    assert_progress(&mut apart)?;
    apart.kill()?;
    assert_eq!(one.attempt("root", "alloc 5000 --nodes 3")?, "EHOSTDOWN");
    // The node may return in its incarnation, so its name stays taken, and memory stays lent to it.
    assert_eq!(one.attempt("root", "map homed r")?, "EHOSTDOWN");
    assert_eq!(gauge(two, "lent_bytes")?, lent + (4 << 20));
    three.wait_ready()?;
    trio.start_kite(&Setup::default())?;
    two.await_gauges(&format!("lent_bytes={lent}"), SOON)?;
    three.kite("alloc homed 4M --node 1 --node 2")?;
    let written = three.workload("fill homed").sh()?;
    assert_eq!(two.workload("digest homed").sh()?, written);
    for name in ["homed", "apart"] {
        one.kite(&format!("free {name}"))?;
    }
    let free = one.attempt("root", "free borrowed")?;
    assert!(["OK", "EHOSTDOWN", "ENOENT"].contains(&&*free), "{free}");
    one.await_gauges(&format!("{IDLE} regions={regions}"), SOON)?;
    Ok(())
}
