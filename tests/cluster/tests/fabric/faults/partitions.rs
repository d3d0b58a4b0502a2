// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Cut networks: of TCP, of RDMA, of both, of the seed and of followers. No incarnation ends, and no byte is lost.

use std::thread;
use std::time::Duration;

use kite_cluster::{until, Node, Process, Result, Turn};
use serde_json::Value;

use crate::{
    assert_continues, await_bytes, epoch, incarnations, start_readers, trio, write_regions, LONG,
    SOON,
};

/// Networks of a node that are cut.
#[derive(Clone, Copy, Debug)]
enum Cut {
    Tcp,
    Rdma,
    Both,
}

impl Cut {
    fn begin(self, node: &Node) -> Result<()> {
        match self {
            Cut::Tcp => node.disconnect_network(),
            Cut::Rdma => node.disconnect_rnic(),
            Cut::Both => node.disconnect(),
        }
    }
}

/// Cuts networks of a node for some time. Afterwards all nodes have the incarnations and regions of before, and read all
/// bytes. Returns the epochs before and after the cut.
fn cut(trio: &Turn<'_>, number: usize, networks: Cut, seconds: u64) -> Result<[u64; 2]> {
    let before = incarnations(trio.node(2))?;
    let before_cut = epoch(trio.node(2))?;
    let regions = write_regions(trio)?;
    // Mappings that exist meanwhile.
    let mut readers = start_readers(trio.node(2), &regions)?;
    networks.begin(trio.node(number))?;
    // The duration of the fault, which this test is about.
    thread::sleep(Duration::from_secs(seconds));
    trio.node(number).reconnect()?;
    trio.await_members(3)?;
    for node in trio.nodes() {
        assert_eq!(incarnations(node)?, before, "{networks:?} of {number}");
        await_bytes(node, &regions)?;
    }
    for reader in &mut readers {
        assert_continues(reader)?;
        reader.kill()?;
    }
    for (name, _) in &regions {
        trio.node(2).kite(&format!("free {name}"))?;
    }
    Ok([before_cut, epoch(trio.node(2))?])
}

#[test]
#[ignore = "long"]
fn cut_of_tcp_alone_changes_no_view() -> Result<()> {
    let trio = trio()?;
    for (number, seconds) in [(1, 6), (2, 15)] {
        let [before, after] = cut(&trio, number, Cut::Tcp, seconds)?;
        assert_eq!(before, after, "node {number}");
    }
    Ok(())
}

#[test]
#[ignore = "long"]
fn cut_of_rdma_ends_no_incarnation() -> Result<()> {
    cut(&trio()?, 3, Cut::Rdma, 10).map(drop)
}

#[test]
#[ignore = "long"]
fn cut_of_both_networks_ends_no_incarnation() -> Result<()> {
    let trio = trio()?;
    for number in [1, 3] {
        let [before, after] = cut(&trio, number, Cut::Both, 15)?;
        assert!(after > before, "node {number} was never unreachable");
    }
    Ok(())
}

/// Creates a region with the number of its home as content, once the view permits a new name.
fn create(trio: &Turn<'_>, home: usize, name: &str) -> Result<()> {
    let line = format!("echo {home} | /kite/target/release/kite put - {name}");
    let put = || Ok(trio.node(home).run(&line)?.success());
    until("a new name", LONG, put).map(drop)
}

/// Returns the regions of this name, the oldest first. Waits until one of two is in conflict.
fn await_conflict(node: &Node, name: &str) -> Result<[Value; 2]> {
    let mut found = Vec::new();
    until("a region in conflict", SOON, || {
        let listed = node.run("/kite/target/release/kite regions --json")?.stdout;
        let listed: Vec<Value> = serde_json::from_str(&listed).unwrap_or_default();
        found = listed
            .into_iter()
            .filter(|region| region["name"] == name)
            .collect();
        Ok(found.len() == 2 && found.iter().any(|region| region["in_conflict"] == true))
    })?;
    found.sort_by_key(|region| ["created_at", "home", "id"].map(|key| region[key].as_u64()));
    Ok(found.try_into().expect("two regions"))
}

/// Returns a shell line that runs a command for the numbers 0 … 3 and fails if one of them fails.
fn for_each(command: &str) -> String {
    format!("s=0; for i in 0 1 2 3; do /kite/target/release/kite {command} || s=1; done; exit $s")
}

/// Asserts that each region has one name after a rename, the new one if the rename succeeded.
fn assert_one_name(node: &Node, renames: &mut [Process]) -> Result<()> {
    for (i, rename) in renames.iter_mut().enumerate() {
        let renamed = rename.wait(LONG)?;
        let read = |name: &str| node.run(&format!("/kite/target/release/kite get {name}-{i} -"));
        let (old, new) = (read("old")?, read("new")?);
        assert_ne!(old.success(), new.success(), "{old:?} {new:?}");
        assert!(new.success() || !renamed.success(), "{renamed:?}");
        assert_eq!(old.stdout + &new.stdout, "2\n");
    }
    Ok(())
}

/// The regions whose names belong to another region, and those that are renamed when the partition begins, keep their
/// bytes.
#[test]
fn name_created_in_both_halves_belongs_to_the_older_region() -> Result<()> {
    let trio = trio()?;
    (0..4).try_for_each(|i| create(&trio, 2, &format!("old-{i}")))?;
    (0..4).try_for_each(|i| create(&trio, 1, &format!("freed-{i}")))?;
    trio.node(1).disconnect()?;
    let rename = |i| format!("exec /kite/target/release/kite rename old-{i} new-{i}");
    let renames = (0..4).map(|i| trio.node(2).spawn(&rename(i)));
    let mut renames = renames.collect::<Result<Vec<_>>>()?;
    [2, 1]
        .into_iter()
        .try_for_each(|half| create(&trio, half, "halves"))?;
    trio.node(1).sh(&for_each("free freed-$i"))?;
    trio.node(1).reconnect()?;
    trio.await_members(3)?;
    let three = trio.node(3);
    three.sh(&for_each("alloc freed-$i 1"))?;
    assert_one_name(three, &mut renames)?;
    let [older, younger] = await_conflict(three, "halves")?;
    let (owner, home) = (older["home"].to_string(), younger["home"].to_string());
    assert_eq!(
        (&older["in_conflict"], &younger["in_conflict"]),
        (&false.into(), &true.into())
    );
    assert_eq!(three.kite("get halves -")?, owner);
    let id = format!("{:#x}", younger["id"].as_u64().expect("a number"));
    assert!(three
        .kite("regions")?
        .contains(&format!("in conflict: ID {id}")));
    assert_eq!(three.kite(&format!("get {id} - --home {home}"))?, home);
    let again = three.run("/kite/target/release/kite alloc halves 1")?;
    assert!(again.stderr.contains("the name is taken"), "{again:?}");
    three.kite(&format!("rename halves halves-2 --home {home}"))?;
    assert!(!three.kite("regions")?.contains("in conflict"));
    for (name, content) in [("halves", owner), ("halves-2", home)] {
        assert_eq!(three.kite(&format!("get {name} -"))?, content);
        three.kite(&format!("free {name}"))?;
    }
    three.sh(&for_each("free freed-$i"))?;
    three.run(&for_each("free old-$i"))?;
    three.run(&for_each("free new-$i"))?;
    Ok(())
}
