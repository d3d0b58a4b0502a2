// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Contents, locks and placement of a region during migration.

use kite_cluster::{outputs, until, Cluster, Node, Process, Result};

use crate::{assert_idle, trio, LONG, SOON};

/// Migrates a region to other nodes until the process is killed.
fn migrate_in_loop(node: &Node, name: &str) -> Result<Process> {
    let goals = [
        "--node 1",
        "--node 2",
        "--node 3",
        "--node 3 --node 1",
        "--node 1 --node 2 --node 3",
    ];
    let moves = goals.map(|goal| format!("$move {goal} && echo moved"));
    let line = format!(
        "move='/kite/target/release/kite migrate {name}'; while {}; do :; done",
        moves.join(" && ")
    );
    node.command(line).limit(LONG).spawn()
}

/// Frees a region after its last migration has ended.
fn free_after_migration(node: &Node, name: &str) -> Result<()> {
    until("the last migration to end", LONG, || {
        Ok(node.kite(&format!("migrate {name}")).is_ok())
    })?;
    node.kite(&format!("free {name}"))?;
    Ok(())
}

/// Starts programs on every node that use a region by all kinds of requests.
fn start_writers(trio: &Cluster, name: &str, operations: u32) -> Result<Vec<Process>> {
    let start = |n: usize| {
        let line = format!(
            "integrity {name} --unit 1000003 --writers 6 --first {} --threads 2 --operations {operations}",
            (n - 1) * 2
        );
        trio.node(n).workload(&line).limit(LONG).spawn()
    };
    (1..=3).map(start).collect()
}

#[test]
fn migrated_region_is_on_its_new_nodes() -> Result<()> {
    let trio = trio()?;
    let (one, two, three) = (trio.node(1), trio.node(2), trio.node(3));
    one.kite("alloc there 9000001")?;
    let digest = one.workload("fill there --seed 7").sh()?;
    let before = one.stats()?;
    let whole: u64 = 9_000_001_u64.next_multiple_of(4096);
    for (goal, lent) in [
        ("--node 2", [whole, 0]),
        ("--node 2 --node 3", [whole - (4 << 20), 4 << 20]),
        ("--node 3 --node 2", [4 << 20, whole - (4 << 20)]),
        ("--node 3", [0, whole]),
        ("", [0, 0]),
    ] {
        one.kite(&format!("migrate there {goal}"))?;
        for (node, lent) in [two, three].into_iter().zip(lent) {
            assert_eq!(node.stats()?["lent_bytes"], lent, "{goal}");
        }
        for node in trio.nodes() {
            assert_eq!(node.workload("digest there").sh()?, digest, "{goal}");
        }
    }
    let after = one.stats()?;
    assert_eq!(after["migrations"] - before["migrations"], 5);
    // The first and the last migration move all bytes. The others move one chunk, all three, and one chunk, the last
    // of which is short.
    let moved = 3 * 9_000_001 + (4 << 20) + (4 << 20);
    assert_eq!(after["migrated_bytes"] - before["migrated_bytes"], moved);
    // Every master can migrate the region, from any node, also to its own node.
    two.kite("migrate there")?;
    assert_eq!(two.stats()?["lent_bytes"], whole);
    assert_eq!(three.workload("digest there").sh()?, digest);
    one.kite("free there")?;
    for node in trio.nodes() {
        assert_idle(node)?;
    }
    Ok(())
}

#[test]
fn migration_loses_no_write() -> Result<()> {
    let trio = trio()?;
    let one = trio.node(1);
    one.kite("alloc used 12000051 --node 1 --node 2 --node 3")?;
    one.kite("alloc words 9M --node 2 --node 3")?;
    let mut roams = [
        migrate_in_loop(one, "used")?,
        migrate_in_loop(trio.node(2), "words")?,
    ];
    let mut writers = start_writers(&trio, "used", 60)?;
    let offset = (4 << 20) + 8;
    let tally = format!("atomics fetch-add words {offset} --operations 150");
    let mut tallies = trio.everywhere(&tally)?;
    let mut turns = trio.everywhere("atomics spin-lock words 0 --threads 2 --operations 20")?;
    for process in &mut roams {
        for _ in 0..5 {
            process.read_until("moved", LONG)?;
        }
    }
    outputs(&mut writers, LONG)?;
    let sum: u64 = outputs(&mut tallies, LONG)?
        .iter()
        .map(|sum| sum.trim().parse::<u64>().unwrap_or_default())
        .sum();
    let all = 2 * 3 * 4 * 150;
    assert_eq!(sum, all * (all - 1) / 2, "each has seen another number");
    outputs(&mut turns, LONG)?;
    let word = |offset| one.workload(&format!("atomics word words {offset}")).sh();
    assert_eq!(word(offset)?.trim(), all.to_string());
    assert_eq!(word(8)?.trim(), (2 * 3 * 2 * 20).to_string());
    for process in &mut roams {
        process.kill()?;
    }
    for name in ["used", "words"] {
        free_after_migration(one, name)?;
    }
    for node in trio.nodes() {
        assert_idle(node)?;
    }
    Ok(())
}

/// A process that maps the region during a migration gets its present placement.
#[test]
#[ignore = "long"]
fn region_mapped_during_migration_has_its_data() -> Result<()> {
    let trio = trio()?;
    let one = trio.node(1);
    one.kite("alloc there 20000003")?;
    let digest = one.workload("fill there --seed 5").sh()?;
    let mut roams = migrate_in_loop(one, "there")?;
    let program = "/kite/target/release/kite-workload digest there";
    let line = format!("for i in $(seq 25); do {program}; done");
    let look = |node: &Node| node.command(line.clone()).limit(LONG).spawn();
    let mut looks = trio.nodes().iter().map(look).collect::<Result<Vec<_>>>()?;
    for output in outputs(&mut looks, LONG)? {
        assert_eq!(output.lines().count(), 25);
        assert!(output.lines().all(|line| line == digest), "{output}");
    }
    roams.read_until("moved", LONG)?;
    roams.kill()?;
    free_after_migration(one, "there")
}

/// More requests than a node may have in flight to another, beside those of a migration.
#[test]
#[ignore = "long"]
fn migration_completes_under_many_accesses() -> Result<()> {
    let trio = trio()?;
    let (one, two) = (trio.node(1), trio.node(2));
    one.kite("alloc crowded 4096 --node 2")?;
    one.kite("alloc moving 9M --node 2")?;
    let mut user = two.workload("transfer moving").spawn()?;
    user.read_until("ops", SOON)?;
    let tally = "atomics fetch-add crowded 0 --threads 200 --operations 30";
    let mut crowd = one.workload(tally).limit(LONG).spawn()?;
    let mut roams = migrate_in_loop(one, "moving")?;
    for _ in 0..5 {
        roams.read_until("moved", LONG)?;
    }
    assert!(crowd.wait(LONG)?.success());
    for process in [&mut roams, &mut user] {
        process.kill()?;
    }
    one.kite("free crowded")?;
    free_after_migration(one, "moving")
}

#[test]
#[ignore = "long"]
fn fills_and_copies_match_a_model_during_migration() -> Result<()> {
    let trio = trio()?;
    let mut copies = trio.everywhere("copies check --operations 80 --move")?;
    let outputs = outputs(&mut copies, LONG)?;
    let moves = outputs
        .iter()
        .map(|output| output.split_whitespace().next());
    let moved: u64 = moves.flatten().flat_map(str::parse::<u64>).sum();
    assert!(moved > 3, "{moved} moves");
    for node in trio.nodes() {
        assert_idle(node)?;
    }
    Ok(())
}

#[test]
#[ignore = "long"]
fn migration_loses_no_write_despite_lost_packets_and_failed_qps() -> Result<()> {
    let trio = trio()?;
    let one = trio.node(1);
    one.kite("alloc lossy 6000051 --node 1 --node 2 --node 3")?;
    for node in trio.nodes() {
        node.loss(2.0)?;
    }
    let mut roams = migrate_in_loop(one, "lossy")?;
    let mut writers = start_writers(&trio, "lossy", 30)?;
    for _ in 0..2 {
        trio.cut(2, LONG)?;
        roams.read_until("moved", LONG)?;
    }
    let done = outputs(&mut writers, LONG);
    for node in trio.nodes() {
        node.loss(0.0)?;
    }
    roams.kill()?;
    done?;
    free_after_migration(one, "lossy")?;
    for node in trio.nodes() {
        assert_idle(node)?;
    }
    Ok(())
}

#[test]
#[ignore = "long"]
fn lock_is_kept_during_migration() -> Result<()> {
    let trio = trio()?;
    let one = trio.node(1);
    one.kite("alloc locked 8M --node 2")?;
    let load = "insmod /run/kite/build/user/kite_lock.ko region=locked lock=9";
    trio.node(2).sh(load)?;
    one.kite("migrate locked --node 3")?;
    let mut waiting = one.spawn(load)?;
    until("a process to wait for the lock", SOON, || {
        Ok(one.stats()?["lock_waits"] != 0)
    })?;
    one.kite("migrate locked --node 2 --node 1")?;
    assert!(waiting.is_running());
    trio.node(2).sh("rmmod kite_lock")?;
    assert!(waiting.wait(SOON)?.success());
    one.sh("rmmod kite_lock")?;
    one.kite("free locked")?;
    Ok(())
}

#[test]
fn migration_releases_registered_memory() -> Result<()> {
    let trio = trio()?;
    let one = trio.node(1);
    let mut owner = one
        .workload("register mine 9000001 --random --unmap")
        .spawn()?;
    owner.read_until("registered", SOON)?;
    let digest = trio.node(3).workload("digest mine").sh()?;
    one.kite("migrate mine --node 2")?;
    assert_eq!(trio.node(3).workload("digest mine").sh()?, digest);
    until("all pages to be unpinned", SOON, || {
        let pinned = one.sh("awk '/foll_pin/ { n[$1] = $2 } END { print n[\"nr_foll_pin_acquired\"] - n[\"nr_foll_pin_released\"] }' /proc/vmstat")?;
        Ok(pinned.trim() == "0")
    })?;
    owner.kill()?;
    one.kite("free mine")?;
    Ok(())
}

/// The source sends data directly to the destination, and not through the node that requests the copy.
#[test]
fn migration_between_two_other_nodes_is_direct() -> Result<()> {
    let trio = trio()?;
    let one = trio.node(1);
    one.kite("alloc from 9000001 --node 2 --other-rights rw")?;
    one.kite("alloc to 9000001 --node 3 --other-rights rw")?;
    let digest = one.workload("fill from --seed 3").sh()?;
    let moved = || -> Result<[u64; 2]> {
        let stats = one.stats()?;
        Ok([stats["read_bytes"], stats["write_bytes"]])
    };
    let before = moved()?;
    one.workload("copies once from to").limit(LONG).sh()?;
    assert_eq!(moved()?, before);
    assert_eq!(trio.node(2).workload("digest to").sh()?, digest);
    for name in ["from", "to"] {
        one.kite(&format!("free {name}"))?;
    }
    Ok(())
}
