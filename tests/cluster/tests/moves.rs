// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Migration of regions in use: no write is lost, whichever process or node dies meanwhile.

use std::time::Duration;

use kite_cluster::{outputs, until, Cluster, Node, Process, Result, Setup, SharedCluster, Turn};

static TRIO: SharedCluster = SharedCluster::new(|| Cluster::builder().name("moves").nodes(3));

const SOON: Duration = Duration::from_secs(30);
const LONG: Duration = Duration::from_secs(300);

/// The gauges of a node on which nothing goes on: the sessions are kited's and the one that asks.
const IDLE: &str = "sessions=2 open_handles=0 inflight=0";

/// Frees what a test before left when it failed.
fn clear(trio: &Cluster) -> Result<()> {
    let free = "kite=/kite/target/release/kite; \
                for name in $($kite regions | awk 'NR > 1 { print $1 }'); do $kite free $name; done";
    trio.node(1).sh(free).map(drop)
}

/// Three nodes, of which none is removed for its silence.
fn trio() -> Result<Turn<'static>> {
    let trio = TRIO.take()?;
    trio.start_kite(&Setup::patient())?;
    clear(&trio)?;
    Ok(trio)
}

/// Returns a [`trio`] that detects dead nodes quickly.
fn mortals() -> Result<Turn<'static>> {
    let trio = TRIO.take()?;
    trio.start_kite(&Setup::default())?;
    clear(&trio)?;
    Ok(trio)
}

/// Nothing is left of what was lent.
fn assert_idle(node: &Node) -> Result<()> {
    node.await_gauges(&format!("lent_bytes=0 regions=0 {IDLE}"), SOON)?;
    Ok(())
}

/// Moves a region round and round, until killed.
fn roam(node: &Node, name: &str) -> Result<Process> {
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

/// Frees a region when the last move of it has ended.
fn end_moves(node: &Node, name: &str) -> Result<()> {
    until("the last move ends", LONG, || {
        Ok(node.kite(&format!("migrate {name}")).is_ok())
    })?;
    node.kite(&format!("free {name}"))?;
    Ok(())
}

/// Many programs use a region in many ways at once, on every node.
fn everything(trio: &Cluster, name: &str, operations: u32) -> Result<Vec<Process>> {
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
    // All of it to node 2 and in the end here; in between one chunk, all three, and one, of which the last is short.
    let moved = 3 * 9_000_001 + (4 << 20) + (4 << 20);
    assert_eq!(after["migrated_bytes"] - before["migrated_bytes"], moved);
    // A holder of the master right on any node can migrate the region, also to its own node.
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
    let mut roams = [roam(one, "used")?, roam(trio.node(2), "words")?];
    let mut writers = everything(&trio, "used", 60)?;
    let offset = (4 << 20) + 8;
    let tally = format!("atomics tally words {offset} --operations 150");
    let mut tallies = trio.everywhere(&tally)?;
    let mut turns = trio.everywhere("atomics take-turns words 0 --threads 2 --operations 20")?;
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
        end_moves(one, name)?;
    }
    for node in trio.nodes() {
        assert_idle(node)?;
    }
    Ok(())
}

/// A handle that is opened during the migration gets the new placement.
#[test]
fn region_mapped_during_migration_has_its_data() -> Result<()> {
    let trio = trio()?;
    let one = trio.node(1);
    one.kite("alloc there 20000003")?;
    let digest = one.workload("fill there --seed 5").sh()?;
    let mut roams = roam(one, "there")?;
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
    end_moves(one, "there")
}

/// More requests than a node may have under way at another, beside those that move a region.
#[test]
fn migration_completes_under_many_accesses() -> Result<()> {
    let trio = trio()?;
    let (one, two) = (trio.node(1), trio.node(2));
    one.kite("alloc crowded 4096 --node 2")?;
    one.kite("alloc moving 9M --node 2")?;
    let mut user = two.workload("hold moving").spawn()?;
    user.read_until("ops", SOON)?;
    let tally = "atomics tally crowded 0 --threads 200 --operations 30";
    let mut crowd = one.workload(tally).limit(LONG).spawn()?;
    let mut roams = roam(one, "moving")?;
    for _ in 0..5 {
        roams.read_until("moved", LONG)?;
    }
    assert!(crowd.wait(LONG)?.success());
    for process in [&mut roams, &mut user] {
        process.kill()?;
    }
    one.kite("free crowded")?;
    end_moves(one, "moving")
}

#[test]
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
fn migration_loses_no_write_despite_lost_packets_and_failed_qps() -> Result<()> {
    let trio = trio()?;
    let one = trio.node(1);
    one.kite("alloc lossy 6000051 --node 1 --node 2 --node 3")?;
    for node in trio.nodes() {
        node.loss(2.0)?;
    }
    let mut roams = roam(one, "lossy")?;
    let mut writers = everything(&trio, "lossy", 30)?;
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
    end_moves(one, "lossy")?;
    for node in trio.nodes() {
        assert_idle(node)?;
    }
    Ok(())
}

#[test]
fn lock_is_kept_during_migration() -> Result<()> {
    let trio = trio()?;
    let one = trio.node(1);
    one.kite("alloc locked 8M --node 2")?;
    let load = "insmod /run/kite/build/user/kite_lock.ko region=locked lock=9";
    trio.node(2).sh(load)?;
    one.kite("migrate locked --node 3")?;
    let mut waiting = one.spawn(load)?;
    until("one waits for it", SOON, || {
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
        .workload("register mine 9000001 --random --forget")
        .spawn()?;
    owner.read_until("registered", SOON)?;
    let digest = trio.node(3).workload("digest mine").sh()?;
    one.kite("migrate mine --node 2")?;
    assert_eq!(trio.node(3).workload("digest mine").sh()?, digest);
    until("nothing is pinned", SOON, || {
        let pinned = one.sh("awk '/foll_pin/ { n[$1] = $2 } END { print n[\"nr_foll_pin_acquired\"] - n[\"nr_foll_pin_released\"] }' /proc/vmstat")?;
        Ok(pinned.trim() == "0")
    })?;
    owner.kill()?;
    one.kite("free mine")?;
    Ok(())
}

#[test]
fn invalid_migration_requests_are_rejected() -> Result<()> {
    let trio = trio()?;
    let checks = trio.node(1).workload("errors moves").limit(LONG).sh()?;
    assert!(checks.ends_with(" checks"), "{checks}");
    for node in trio.nodes() {
        assert_idle(node)?;
    }
    Ok(())
}

/// A region that is so large that it takes some time to move.
fn large(node: &Node, place: &str) -> Result<()> {
    node.kite(&format!("alloc large 160M {place}"))?;
    node.workload("fill large --seed 1").limit(LONG).sh()?;
    Ok(())
}

/// Begins to move it, and waits until some of it has moved.
fn begin(node: &Node, home: &Node, goal: &str) -> Result<Process> {
    let before = home.stats()?["migrated_bytes"];
    let moving = node.spawn(&format!(
        "/kite/target/release/kite migrate large {goal} 2>&1"
    ))?;
    until("some of it has moved", SOON, || {
        Ok(home.stats()?["migrated_bytes"] > before)
    })?;
    Ok(moving)
}

#[test]
fn free_during_migration_succeeds() -> Result<()> {
    let trio = trio()?;
    let one = trio.node(1);
    large(one, "--node 2")?;
    // So that it takes its time.
    one.loss(10.0)?;
    let mut moving = begin(trio.node(2), one, "--node 3")?;
    let second = one.run("/kite/target/release/kite migrate large --node 1 2>&1")?;
    assert!(second.stdout.contains("in use"), "{second:#?}");
    one.kite("free large")?;
    let output = moving.wait(SOON)?;
    one.loss(0.0)?;
    assert!(output.stdout.contains("was freed"), "{output:#?}");
    for node in trio.nodes() {
        assert_idle(node)?;
    }
    Ok(())
}

#[test]
fn migration_of_a_killed_process_ends() -> Result<()> {
    let trio = trio()?;
    let (one, three) = (trio.node(1), trio.node(3));
    large(one, "--node 2")?;
    let digest = one.workload("digest large").limit(LONG).sh()?;
    let mut moving = begin(trio.node(2), one, "--node 3")?;
    moving.kill()?;
    three.await_gauges(&format!("lent_bytes={}", 160 << 20), LONG)?;
    trio.node(2).await_gauges("lent_bytes=0", LONG)?;
    assert_eq!(three.workload("digest large").limit(LONG).sh()?, digest);
    one.kite("free large")?;
    Ok(())
}

#[test]
fn migration_that_times_out_leaves_a_valid_placement() -> Result<()> {
    let trio = trio()?;
    let one = trio.node(1);
    large(one, "--node 2")?;
    let digest = one.workload("digest large").limit(LONG).sh()?;
    let mut ms = 5;
    let failed = loop {
        let line = format!(
            "/kite/target/release/kite migrate large --node 3 --timeout {} 2>&1",
            f64::from(ms) / 1000.0
        );
        let output = one.run(&line)?;
        if output.success() {
            break ms > 5;
        }
        assert!(output.stdout.contains("deadline passed"), "{output:#?}");
        ms *= 2;
    };
    assert!(failed, "it takes longer than 5 ms");
    trio.node(2).await_gauges("lent_bytes=0", LONG)?;
    trio.node(3)
        .await_gauges(&format!("lent_bytes={}", 160 << 20), LONG)?;
    assert_eq!(one.workload("digest large").limit(LONG).sh()?, digest);
    one.kite("free large")?;
    Ok(())
}

/// A user of a region that migrates from or to a node that dies gets an error only for chunks on that node.
#[test]
fn migration_survives_death_of_source_or_destination() -> Result<()> {
    for dies in [2, 3] {
        let trio = mortals()?;
        let one = trio.node(1);
        large(one, "--node 2")?;
        // So that it takes its time.
        one.loss(10.0)?;
        let mut moving = begin(one, one, "--node 3")?;
        trio.node(dies).reset()?;
        let output = moving.wait(LONG)?;
        one.loss(0.0)?;
        assert!(output.stdout.contains("not in the cluster"), "{output:#?}");
        one.await_view(1, 2)?;
        // Either way it may be freed.
        one.kite("free large")?;
        one.await_gauges(IDLE, SOON)?;
        trio.node(5 - dies).await_gauges("lent_bytes=0", LONG)?;
        trio.node(dies).wait_ready()?;
    }
    Ok(())
}

#[test]
fn migration_survives_death_of_a_mapping_node() -> Result<()> {
    let trio = mortals()?;
    let (one, three) = (trio.node(1), trio.node(3));
    large(one, "--node 2")?;
    let digest = one.workload("digest large").limit(LONG).sh()?;
    let mut user = three.workload("hold large --read-only").spawn()?;
    user.read_until("ops", SOON)?;
    let mut moving = begin(one, one, "--node 1")?;
    three.reset()?;
    assert!(moving.wait(LONG)?.success());
    assert_eq!(one.workload("digest large").limit(LONG).sh()?, digest);
    one.kite("free large")?;
    trio.node(2).await_gauges("lent_bytes=0", LONG)?;
    three.wait_ready()?;
    Ok(())
}

#[test]
fn migration_ends_when_the_home_dies() -> Result<()> {
    let trio = mortals()?;
    let (one, two) = (trio.node(1), trio.node(2));
    large(one, "--node 2")?;
    let mut user = two.workload("hold large --timeout-ms 60000").spawn()?;
    user.read_until("ops", SOON)?;
    let mut moving = begin(two, one, "--node 3")?;
    one.reset()?;
    let output = moving.wait(LONG)?;
    assert!(output.stdout.contains("not in the cluster"), "{output:#?}");
    user.read_until("error EHOSTDOWN", LONG)?;
    for node in [two, trio.node(3)] {
        node.await_gauges(&format!("lent_bytes=0 {IDLE}"), LONG)?;
    }
    one.wait_ready()?;
    Ok(())
}

#[test]
fn rnic_removal_during_migration_leaks_nothing() -> Result<()> {
    for goes in [1, 3] {
        let trio = mortals()?;
        let one = trio.node(1);
        large(one, "--node 2")?;
        // So that it takes its time.
        one.loss(10.0)?;
        let mut moving = begin(one, one, "--node 3")?;
        trio.node(goes).remove_rnic()?;
        let output = moving.wait(LONG)?;
        one.loss(0.0)?;
        assert!(!output.success(), "{output:#?}");
        if goes != 1 {
            one.kite("free large")?;
        }
        trio.node(2).await_gauges("lent_bytes=0", LONG)?;
    }
    Ok(())
}

#[test]
fn module_unload_during_migration_leaks_nothing() -> Result<()> {
    let trio = mortals()?;
    let one = trio.node(1);
    large(one, "--node 2")?;
    // So that it takes its time.
    one.loss(10.0)?;
    let mut moving = begin(trio.node(2), one, "--node 3")?;
    one.stop_kited()?;
    one.unload("kite")?;
    assert!(!moving.wait(LONG)?.success());
    one.loss(0.0)?;
    for n in [2, 3] {
        trio.node(n).await_gauges("lent_bytes=0", LONG)?;
    }
    Ok(())
}

/// The source pushes the data. They do not pass through the node that requests the migration.
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
