// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Processes that are killed, regions that are freed, RNICs that are removed.

use std::time::Instant;

use kite_cluster::{until, Result, Setup};

use crate::{assert_progress, error, gauge, hold, trio, IDLE, LONG, SOON};

#[test]
fn killed_process_leaks_nothing_and_disturbs_no_other() -> Result<()> {
    let trio = trio()?;
    let node = trio.node(1);
    node.kite("alloc victim 16M --node 2 --node 3")?;
    let mut survivor = hold(node, "victim --size 300000")?;
    for round in 0..5 {
        let mut killed = hold(
            node,
            &format!("victim --size {} --threads 4", 1 << (12 + 2 * round)),
        )?;
        killed.kill()?;
        node.await_gauges("sessions=3 open_handles=1", SOON)?;
        assert_progress(&mut survivor)?;
    }
    survivor.kill()?;
    node.await_gauges(IDLE, SOON)?;
    node.kite("free victim")?;
    Ok(())
}

#[test]
fn free_by_a_master_ends_accesses_of_others() -> Result<()> {
    let trio = trio()?;
    let lent: Vec<u64> = (1..=3)
        .map(|n| gauge(trio.node(n), "lent_bytes"))
        .collect::<Result<_>>()?;
    trio.node(1)
        .kite("alloc busy 20M --node 1 --node 2 --node 3")?;
    let mut users = (1..=3)
        .map(|n| hold(trio.node(n), "busy --size 500000"))
        .collect::<Result<Vec<_>>>()?;
    let start = Instant::now();
    trio.node(1).kite("free busy")?;
    assert!(start.elapsed() < SOON, "freed after {:?}", start.elapsed());
    for user in &mut users {
        assert_eq!(error(user)?, "ESTALE");
        assert!(user.wait(SOON)?.success());
    }
    for (node, lent) in trio.nodes().iter().zip(lent) {
        node.await_gauges(&format!("lent_bytes={lent} {IDLE}"), SOON)?;
    }
    assert_eq!(trio.node(2).attempt("root", "map busy r")?, "ENOENT");
    Ok(())
}

#[test]
#[ignore = "long"]
fn rnic_removal_under_load_ends_sessions_and_rnic_returns() -> Result<()> {
    let trio = trio()?;
    let (one, two) = (trio.node(1), trio.node(2));
    two.kite("alloc removed 8M --node 2 --node 3")?;
    let mut users = ["removed --size 4096", "removed --size 700000 --threads 4"]
        .map(|arguments| hold(two, arguments));
    let mut peer = hold(one, "removed")?;
    two.remove_rnic()?;
    for user in &mut users {
        let user = user.as_mut().map_err(|error| panic!("{error}")).unwrap();
        let errno = error(user)?;
        assert!(["ENODEV", "EHOSTDOWN"].contains(&&*errno), "{errno}");
        assert!(user.wait(SOON)?.success());
    }
    assert_eq!(error(&mut peer)?, "EHOSTDOWN", "the home is down");
    assert_eq!(two.attempt("root", "open")?, "ENODEV");
    one.await_view(1, 2)?;
    two.stop_kited()?;
    trio.start_kite(&Setup::default())?;
    two.await_gauges(&format!("{IDLE} regions=0 lent_bytes=0"), SOON)?;
    two.kite("alloc again 100000 --node 1 --node 2 --node 3")?;
    assert_eq!(one.attempt("root", "write again")?, "OK");
    two.kite("free again")?;
    Ok(())
}

/// Resources of an ended program are released while no other request waits for them.
#[test]
#[ignore = "long"]
fn free_does_not_wait_for_cleanup_of_another_program() -> Result<()> {
    let trio = trio()?;
    let (one, two) = (trio.node(1), trio.node(2));
    two.kite("alloc popular 4096")?;
    one.kite("alloc quick 4096 --node 2")?;
    let mut many = one.workload("open-handles popular 5000").spawn()?;
    many.read_until("holding", LONG)?;
    let open = "kite regions | awk '$1 == \"popular\" { print $NF }'";
    let left = one.sh(&format!(
        "set -e; PATH=/kite/target/release:$PATH; pkill -KILL -x kite-workload
        while pgrep -x kite-workload >/dev/null; do :; done
        kite free quick; {open}"
    ))?;
    assert_ne!(left, "0", "all resources were released before");
    let cleared = || Ok(two.sh(&format!("PATH=/kite/target/release:$PATH; {open}"))? == "0");
    until("all resources to be released", LONG, cleared)?;
    two.kite("free popular")?;
    Ok(())
}

/// A request whose own memory is not faulted in waits alone.
#[test]
fn rnic_removal_succeeds_while_requests_wait_for_user_pages() -> Result<()> {
    let trio = trio()?;
    let two = trio.node(2);
    two.kite("alloc near 1M --node 2")?;
    two.kite("alloc far 1M --node 3")?;
    let mut waiting = Vec::new();
    for line in [
        "near --len 64",
        "near --len 1000000",
        "far --len 64",
        "far --len 1000000",
    ] {
        for direction in ["", "--write"] {
            waiting.push(
                two.workload(&format!("unserved-fault {line} {direction}"))
                    .spawn()?,
            );
        }
    }
    let stacks = "cat /proc/[0-9]*/stack 2>/dev/null | grep -c handle_userfault || true";
    let all = || Ok(two.sh(stacks)?.trim() == waiting.len().to_string());
    until("all processes to wait for their pages", SOON, all)?;
    two.remove_rnic()?;
    for process in &mut waiting {
        assert!(process.is_running(), "the page fault ended");
        process.kill()?;
    }
    two.stop_kited()?;
    trio.start_kite(&Setup::default())?;
    two.await_gauges(&format!("{IDLE} regions=0 lent_bytes=0"), SOON)?;
    Ok(())
}
