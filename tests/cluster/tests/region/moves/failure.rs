// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Migrations that fail, time out, or meet the end of a process, node or RNIC.

use kite_cluster::{until, Node, Process, Result, Setup, Turn};

use crate::{assert_idle, free_all_regions, trio, IDLE, LONG, SOON, TRIO};

/// Returns the nodes as [`trio`] does, with timeouts that remove dead nodes.
fn trio_with_failures() -> Result<Turn<'static>> {
    let trio = TRIO.take()?;
    trio.start_kite(&Setup::default())?;
    free_all_regions(&trio)?;
    Ok(trio)
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

/// Allocates a region whose migration takes long enough to be interrupted.
fn alloc_large(node: &Node, place: &str) -> Result<()> {
    node.kite(&format!("alloc large 160M {place}"))?;
    node.workload("fill large --seed 1").limit(LONG).sh()?;
    Ok(())
}

/// Begins a migration, and waits until some of it is done.
fn begin_migration(node: &Node, home: &Node, goal: &str) -> Result<Process> {
    let before = home.stats()?["migrated_bytes"];
    let moving = node.spawn(&format!(
        "/kite/target/release/kite migrate large {goal} 2>&1"
    ))?;
    until("some bytes to be migrated", SOON, || {
        Ok(home.stats()?["migrated_bytes"] > before)
    })?;
    Ok(moving)
}

#[test]
fn free_during_migration_succeeds() -> Result<()> {
    let trio = trio()?;
    let one = trio.node(1);
    alloc_large(one, "--node 2")?;
    // Slows the migration.
    one.loss(10.0)?;
    let mut moving = begin_migration(trio.node(2), one, "--node 3")?;
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
#[ignore = "long"]
fn migration_of_a_killed_process_ends() -> Result<()> {
    let trio = trio()?;
    let (one, three) = (trio.node(1), trio.node(3));
    alloc_large(one, "--node 2")?;
    let digest = one.workload("digest large").limit(LONG).sh()?;
    let mut moving = begin_migration(trio.node(2), one, "--node 3")?;
    moving.kill()?;
    three.await_gauges(&format!("lent_bytes={}", 160 << 20), LONG)?;
    trio.node(2).await_gauges("lent_bytes=0", LONG)?;
    assert_eq!(three.workload("digest large").limit(LONG).sh()?, digest);
    one.kite("free large")?;
    Ok(())
}

#[test]
#[ignore = "long"]
fn migration_that_times_out_leaves_a_valid_placement() -> Result<()> {
    let trio = trio()?;
    let one = trio.node(1);
    alloc_large(one, "--node 2")?;
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
    assert!(failed, "the migration took less than 5 ms");
    trio.node(2).await_gauges("lent_bytes=0", LONG)?;
    trio.node(3)
        .await_gauges(&format!("lent_bytes={}", 160 << 20), LONG)?;
    assert_eq!(one.workload("digest large").limit(LONG).sh()?, digest);
    one.kite("free large")?;
    Ok(())
}

/// Processes that use the region get an error only for accesses to memory of the dead node.
#[test]
#[ignore = "long"]
fn migration_survives_death_of_source_or_destination() -> Result<()> {
    for dies in [2, 3] {
        let trio = trio_with_failures()?;
        let one = trio.node(1);
        alloc_large(one, "--node 2")?;
        // Slows the migration.
        one.loss(10.0)?;
        let mut moving = begin_migration(one, one, "--node 3")?;
        trio.node(dies).reset()?;
        let output = moving.wait(LONG)?;
        one.loss(0.0)?;
        assert!(output.stdout.contains("not in the cluster"), "{output:#?}");
        one.await_view(1, 2)?;
        // The region can be freed wherever it is.
        one.kite("free large")?;
        one.await_gauges(IDLE, SOON)?;
        trio.node(5 - dies).await_gauges("lent_bytes=0", LONG)?;
        trio.node(dies).wait_ready()?;
    }
    Ok(())
}

#[test]
#[ignore = "long"]
fn migration_survives_death_of_a_mapping_node() -> Result<()> {
    let trio = trio_with_failures()?;
    let (one, three) = (trio.node(1), trio.node(3));
    alloc_large(one, "--node 2")?;
    let digest = one.workload("digest large").limit(LONG).sh()?;
    let mut user = three.workload("transfer large --read-only").spawn()?;
    user.read_until("ops", SOON)?;
    let mut moving = begin_migration(one, one, "--node 1")?;
    three.reset()?;
    assert!(moving.wait(LONG)?.success());
    assert_eq!(one.workload("digest large").limit(LONG).sh()?, digest);
    one.kite("free large")?;
    trio.node(2).await_gauges("lent_bytes=0", LONG)?;
    three.wait_ready()?;
    Ok(())
}

#[test]
#[ignore = "long"]
fn migration_ends_when_the_home_dies() -> Result<()> {
    let trio = trio_with_failures()?;
    let (one, two) = (trio.node(1), trio.node(2));
    alloc_large(one, "--node 2")?;
    let mut user = two.workload("transfer large --timeout-ms 60000").spawn()?;
    user.read_until("ops", SOON)?;
    let mut moving = begin_migration(two, one, "--node 3")?;
    one.reset()?;
    let output = moving.wait(LONG)?;
    assert!(output.stdout.contains("not in the cluster"), "{output:#?}");
    user.read_until("error EHOSTDOWN", LONG)?;
    one.wait_ready()?;
    // The memory stays lent until the home joins again.
    trio.start_kite(&Setup::default())?;
    for node in [two, trio.node(3)] {
        node.await_gauges(&format!("lent_bytes=0 {IDLE}"), LONG)?;
    }
    Ok(())
}

#[test]
#[ignore = "long"]
fn rnic_removal_during_migration_leaks_nothing() -> Result<()> {
    for goes in [1, 3] {
        let trio = trio_with_failures()?;
        let one = trio.node(1);
        alloc_large(one, "--node 2")?;
        // Slows the migration.
        one.loss(10.0)?;
        let mut moving = begin_migration(one, one, "--node 3")?;
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
#[ignore = "long"]
fn module_unload_during_migration_leaks_nothing() -> Result<()> {
    let trio = trio_with_failures()?;
    let one = trio.node(1);
    alloc_large(one, "--node 2")?;
    // Slows the migration.
    one.loss(10.0)?;
    let mut moving = begin_migration(trio.node(2), one, "--node 3")?;
    one.stop_kited()?;
    one.unload("kite")?;
    assert!(!moving.wait(LONG)?.success());
    one.loss(0.0)?;
    for n in [2, 3] {
        trio.node(n).await_gauges("lent_bytes=0", LONG)?;
    }
    Ok(())
}
