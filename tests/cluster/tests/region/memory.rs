// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Named memory: data written by any process on any node is read by all others, wherever the memory is.

use std::time::Duration;

use kite_cluster::{outputs, until, Cluster, Node, Process, Result, Setup, SharedCluster, Turn};

static TRIO: SharedCluster = SharedCluster::new(|| Cluster::builder().name("memory").nodes(3));

const SOON: Duration = Duration::from_secs(30);

/// Timeout of large transfers on slow machines.
const LONG: Duration = Duration::from_secs(300);

const SIZES: &str = "1 4095 4096 4097 4194303 4194304 4194305";

/// Maximum memory that a node lends.
const CAP: u64 = 96 << 20;

fn trio() -> Result<Turn<'static>> {
    let trio = TRIO.take()?;
    trio.start_kite(&Setup {
        parameters: format!("max_lent_mib={}", CAP >> 20),
        ..Setup::patient()
    })?;
    Ok(trio)
}

fn gauge(node: &Node, name: &str) -> Result<u64> {
    Ok(node.stats()?[name])
}

/// Tests regions of all sizes in one placement: node 1 writes, nodes 1 and 3 read.
fn sizes(prefix: &str, place: &str) -> Result<()> {
    let trio = trio()?;
    let programs = "kite=/kite/target/release/kite; workload=/kite/target/release/kite-workload";
    let for_each = |node: usize, line: &str| {
        let script = format!("set -e; {programs}; for size in {SIZES}; do {line}; done");
        trio.node(node).command(script).limit(LONG).sh()
    };
    let written = for_each(
        1,
        &format!(
            "$kite alloc {prefix}-$size $size {place}; $workload fill {prefix}-$size --seed $size"
        ),
    )?;
    let digest = format!("$workload digest {prefix}-$size");
    assert_eq!(written.lines().count(), SIZES.split(' ').count());
    assert_eq!(for_each(1, &digest)?, written, "read by the writer");
    assert_eq!(for_each(3, &digest)?, written, "read by node 3");
    for_each(2, &format!("$kite free {prefix}-$size"))?;
    Ok(())
}

#[test]
fn local_regions_of_all_sizes_keep_their_data() -> Result<()> {
    sizes("own", "")
}

#[test]
fn remote_regions_of_all_sizes_keep_their_data() -> Result<()> {
    sizes("other", "--node 2")
}

#[test]
fn striped_regions_of_all_sizes_keep_their_data() -> Result<()> {
    sizes("striped", "--node 1 --node 2 --node 3")
}

#[test]
fn region_of_64_mib_keeps_its_data() -> Result<()> {
    let trio = trio()?;
    trio.node(2)
        .kite("alloc large 64M --node 1 --node 2 --node 3")?;
    let on = |node: usize, line: &str| trio.node(node).workload(line).limit(LONG).sh();
    let written = on(1, "fill large")?;
    assert_eq!(on(3, "digest large")?, written);
    trio.node(1).kite("free large")?;
    Ok(())
}

/// Starts a process whose memory is a region.
fn registered(node: &Node, line: &str) -> Result<Process> {
    let mut process = node.workload(&format!("register {line}")).spawn()?;
    process.read_until("registered", SOON)?;
    Ok(process)
}

#[test]
fn registered_memory_is_accessible_from_all_nodes() -> Result<()> {
    let trio = trio()?;
    let (one, two) = (trio.node(1), trio.node(2));
    for how in ["", "--huge"] {
        let mut owner = registered(one, &format!("mine 9000001 {how}"))?;
        let crowd = |number: usize| {
            let line = format!(
                "integrity mine --writers 6 --unit 300017 --first {} --threads 2 --operations 40",
                2 * (number - 1)
            );
            trio.node(number).workload(&line).spawn()
        };
        let mut writers = (1..=3).map(crowd).collect::<Result<Vec<_>>>()?;
        outputs(&mut writers, LONG)?;
        two.workload("atomics fetch-add mine 0 --operations 10")
            .sh()?;
        owner.signal("TERM")?;
        let output = owner.wait(SOON)?;
        assert!(
            output.stdout.contains("9000001 bytes are the same"),
            "{output:#?}"
        );
    }
    for node in trio.nodes() {
        node.await_gauges("regions=0 open_handles=0 lent_bytes=0", SOON)?;
    }
    Ok(())
}

/// Returns the number of pinned pages of a node.
fn pinned(node: &Node) -> Result<String> {
    node.sh(
        "echo 1 >/proc/sys/vm/stat_refresh; awk '/^nr_foll_pin_acquired/ { pages += $2 } \
         /^nr_foll_pin_released/ { pages -= $2 } END { print pages }' /proc/vmstat",
    )
}

/// With a name, the memory lives as long as the region. Without one, it ends with the process.
#[test]
fn registered_memory_outlives_its_process() -> Result<()> {
    let trio = trio()?;
    let (one, two) = (trio.node(1), trio.node(2));
    let pinned_before = pinned(one)?;
    let mut owner = registered(one, "legacy 5000001 --random")?;
    let before = two.workload("digest legacy").sh()?;
    owner.kill()?;
    assert_eq!(two.workload("digest legacy").sh()?, before);
    let mut forgetful = registered(one, "forgotten 5000001 --random --unmap")?;
    assert_eq!(two.workload("digest forgotten").sh()?, before);
    forgetful.kill()?;
    for name in ["legacy", "forgotten"] {
        two.kite(&format!("free {name}"))?;
    }
    one.await_gauges("regions=0 open_handles=0 lent_bytes=0", SOON)?;
    until("all pages to be unpinned", SOON, || {
        Ok(pinned(one)? == pinned_before)
    })?;
    Ok(())
}

#[test]
fn concurrent_writers_of_three_nodes_lose_no_byte() -> Result<()> {
    let trio = trio()?;
    trio.node(1)
        .kite("alloc shared 36000217 --node 1 --node 2 --node 3")?;
    let start = |number: usize| {
        let first = (number - 1) * 4;
        let line = format!(
            "integrity shared --writers 12 --first {first} --processes 2 --threads 2 \
             --operations 60 --seed {}",
            std::process::id()
        );
        trio.node(number).workload(&line).spawn()
    };
    let mut writers = (1..=3).map(start).collect::<Result<Vec<_>>>()?;
    for writer in &mut writers {
        let output = writer.wait(LONG)?;
        assert!(output.success(), "{output:#?}");
        assert_eq!(output.stdout.matches(": 60 operations").count(), 4);
    }
    trio.node(2).kite("free shared")?;
    Ok(())
}

#[test]
fn rpcs_over_the_memlock_limit_complete() -> Result<()> {
    let trio = trio()?;
    let limited = |node: usize, line: &str| {
        let line = format!("ulimit -l 64; exec /kite/target/release/kite-workload rpc {line}");
        trio.node(node).command(line).user("alice").limit(LONG)
    };
    let mut server = limited(2, "serve confined --data-max 1000000").spawn()?;
    server.read_until("serving", SOON)?;
    limited(1, "invert confined --operations 10 --data-max 1000000").sh()?;
    server.kill()?;
    trio.node(2).kite("free confined")?;
    Ok(())
}

/// Despite lost packets and failed queue pairs each change is applied once, in order.
#[test]
fn fills_and_copies_match_a_model() -> Result<()> {
    let trio = trio()?;
    let two = trio.node(2);
    outputs(&mut trio.everywhere("copies check --operations 60")?, LONG)?;
    trio.with_loss(1.0, || {
        let line = "copies check --operations 1000 --len-max 65536 --seed 2";
        let mut all = trio.everywhere(line)?;
        for _ in 0..2 {
            let before = two.stats()?["copies"];
            until("more copies", SOON, || {
                Ok(two.stats()?["copies"] > before + 5)
            })?;
            trio.cut(2, SOON)?;
        }
        outputs(&mut all, LONG).map(drop)
    })
}

#[test]
fn copy_within_one_node_stays_on_that_node() -> Result<()> {
    let trio = trio()?;
    let one = trio.node(1);
    one.kite("alloc there 8M --node 2")?;
    let moved = || -> Result<[u64; 2]> {
        let stats = one.stats()?;
        Ok([stats["read_bytes"], stats["write_bytes"]])
    };
    let (before, copied) = (moved()?, one.stats()?["copies"]);
    let mut endless = one.workload("copies endless there there").spawn()?;
    until("more copies", SOON, || {
        Ok(one.stats()?["copies"] > copied + 2)
    })?;
    assert_eq!(moved()?, before);
    trio.node(3).kite("free there")?;
    let output = endless.wait(SOON)?;
    assert!(output.stderr.contains("was freed"), "{output:#?}");
    Ok(())
}

#[test]
fn copy_fails_when_source_or_destination_node_is_down() -> Result<()> {
    let trio = trio()?;
    let (one, two, three) = (trio.node(1), trio.node(2), trio.node(3));
    one.kite("alloc here 8M --node 2")?;
    one.kite("alloc there 8M --node 3")?;
    let before = one.stats()?["copies"];
    let mut copies = [
        one.workload("copies endless here there").spawn()?,
        two.workload("copies endless there here").spawn()?,
        one.workload("copies endless there there").spawn()?,
    ];
    until("the first copies", SOON, || {
        Ok(one.stats()?["copies"] > before + 2)
    })?;
    three.stop_kited()?;
    for copy in &mut copies {
        let output = copy.wait(SOON)?;
        assert!(
            output.stderr.contains("is not in the cluster"),
            "{output:#?}"
        );
    }
    for name in ["here", "there"] {
        one.kite(&format!("free {name}"))?;
    }
    Ok(())
}

#[test]
fn invalid_copy_requests_are_rejected() -> Result<()> {
    let trio = trio()?;
    let checks = trio.node(1).workload("errors copies").limit(LONG).sh()?;
    assert!(checks.ends_with(" checks"), "{checks}");
    Ok(())
}

#[test]
fn reused_memory_is_zeroed() -> Result<()> {
    let trio = trio()?;
    let node = trio.node(1);
    for (place, name) in [("", "dirt-here"), ("--node 2 --node 3", "dirt-there")] {
        for round in 0..3 {
            node.kite(&format!("alloc {name} 20M {place}"))?;
            node.workload(&format!("digest {name} --zero")).sh()?;
            node.workload(&format!("fill {name} --seed {round}")).sh()?;
            node.kite(&format!("free {name}"))?;
        }
    }
    Ok(())
}

#[test]
fn anonymous_region_ends_with_its_session() -> Result<()> {
    let trio = trio()?;
    let (one, two) = (trio.node(1), trio.node(2));
    let (lent, regions) = (gauge(two, "lent_bytes")?, gauge(one, "regions")?);
    let mut process = one.workload("anonymous 8388708 --nodes 2").spawn()?;
    process.read_until("holding", SOON)?;
    assert_eq!(
        gauge(two, "lent_bytes")?,
        lent + 8_388_708_u64.next_multiple_of(4096)
    );
    assert_eq!(gauge(one, "regions")?, regions + 1);
    process.kill()?;
    two.await_gauges(&format!("lent_bytes={lent}"), SOON)?;
    one.await_gauges(&format!("regions={regions} open_handles=0"), SOON)?;
    Ok(())
}

#[test]
fn named_region_outlives_its_creator() -> Result<()> {
    let trio = trio()?;
    let attempt = |node: usize, what: &str| trio.node(node).attempt("root", what);
    assert_eq!(attempt(1, "alloc 100 --name lasting --nodes 2")?, "OK");
    assert_eq!(attempt(2, "write lasting")?, "OK");
    assert_eq!(attempt(3, "map lasting rwm")?, "OK");
    assert_eq!(attempt(3, "free lasting")?, "OK");
    assert_eq!(attempt(1, "map lasting r")?, "ENOENT");
    Ok(())
}

#[test]
fn two_nodes_read_data_written_by_a_third() -> Result<()> {
    let trio = trio()?;
    trio.node(2)
        .kite("alloc letter 3000000 --node 1 --node 2")?;
    let fill = |seed: u32| {
        trio.node(3)
            .workload(&format!("fill letter --seed {seed}"))
            .sh()
    };
    for seed in [1, 2] {
        let written = fill(seed)?;
        for reader in [1, 2] {
            assert_eq!(trio.node(reader).workload("digest letter").sh()?, written);
        }
    }
    assert_ne!(fill(1)?, fill(2)?);
    trio.node(3).kite("free letter")?;
    Ok(())
}

#[test]
fn file_put_on_one_node_is_read_on_another() -> Result<()> {
    let trio = trio()?;
    let sum = |node: usize, file: &str| trio.node(node).sh(&format!("sha256sum <{file}"));
    trio.node(1).sh("head -c 9000001 /dev/urandom >/tmp/put")?;
    trio.node(1).kite("put /tmp/put file --node 2 --node 3")?;
    trio.node(3).kite("get file /tmp/got")?;
    assert_eq!(sum(1, "/tmp/put")?, sum(3, "/tmp/got")?);
    assert_eq!(sum(3, "/tmp/got")?.len(), 64 + 3);
    trio.node(2).kite("free file")?;
    Ok(())
}

#[test]
fn region_listing_has_all_attributes() -> Result<()> {
    let trio = trio()?;
    let made = trio
        .node(2)
        .attempt("alice", "alloc 12345 --name listed --nodes 1,3 --others r")?;
    assert_eq!(made, "OK");
    let mut mapper = trio
        .node(3)
        .workload("transfer listed --read-only")
        .user("bob")
        .spawn()?;
    mapper.read_until("holding", SOON)?;
    let json = trio.node(1).kite("regions --json")?;
    let listing: serde_json::Value = serde_json::from_str(&json).expect(&json);
    let regions = listing.as_array().expect(&json);
    let entry = regions.iter().find(|entry| entry["name"] == "listed");
    let entry = entry.unwrap_or_else(|| panic!("not listed: {json}"));
    for (field, value) in [
        ("len", 12345),
        ("owner", 1000),
        ("open_handles", 1),
        ("home", 2),
    ] {
        assert_eq!(entry[field], value, "{field} of {entry}");
    }
    assert_eq!(entry["other_rights"], "r", "{entry}");
    assert_eq!(entry["user_name"], "alice", "{entry}");
    for (option, owner) in [("", "alice"), ("-n", "1000"), ("--numeric", "1000")] {
        let text = trio.node(1).kite(&format!("regions {option}"))?;
        let row = text.lines().find(|row| row.starts_with("listed"));
        let row = row.unwrap_or_else(|| panic!("not listed: {text}"));
        assert!(row.split_whitespace().any(|cell| cell == owner), "{row}");
    }
    trio.node(1).kite("grant listed rw --user bob")?;
    assert_eq!(trio.node(1).attempt("root", "free listed")?, "OK");
    let json = trio.node(1).kite("regions --json")?;
    assert!(!json.contains("listed"), "{json}");
    Ok(())
}

#[test]
fn long_region_listing_has_each_region_once() -> Result<()> {
    let trio = trio()?;
    trio.node(2).workload("churn populate 150 many-").sh()?;
    let listing = trio.node(3).kite("regions --node 2")?;
    for i in 0..150 {
        let name = format!("many-{i}");
        let lines = listing
            .lines()
            .filter(|line| line.split_whitespace().any(|word| word == name));
        assert_eq!(lines.count(), 1, "{name} in {listing}");
    }
    trio.node(1).workload("churn clear 150 many-").sh()?;
    assert!(!trio.node(3).kite("regions")?.contains("many-"));
    Ok(())
}

#[test]
fn lending_is_limited_and_refusal_leaks_nothing() -> Result<()> {
    let trio = trio()?;
    let lent = |node: usize| gauge(trio.node(node), "lent_bytes");
    assert_eq!((lent(2)?, lent(3)?), (0, 0));
    let attempt = |len: u64, nodes: &str| {
        trio.node(1)
            .attempt("root", &format!("alloc {len} --nodes {nodes}"))
    };
    assert_eq!(attempt(CAP + 1, "2")?, "ENOMEM");
    assert_eq!(attempt(2 * CAP + 1, "2,3")?, "ENOMEM");
    let served = gauge(trio.node(3), "ctrl_requests_served")?;
    assert_eq!(attempt(3 * CAP, "3,2,2")?, "ENOMEM");
    // More requests, for each of the eleven chunks, would fail in the same way.
    let again = gauge(trio.node(3), "ctrl_requests_served")? - served;
    assert!(again < 11, "node 3 received {again} requests");
    for node in [2, 3] {
        trio.node(node).await_gauges("lent_bytes=0", SOON)?;
    }
    trio.node(1)
        .await_gauges("regions=0 open_handles=0", SOON)?;
    assert_eq!(attempt(CAP, "2")?, "OK");
    trio.node(2).await_gauges("lent_bytes=0", SOON)?;
    Ok(())
}
