// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Upgrade of a cluster node by node, from a module without optional features (`make older-module`).

use kite_cluster::{outputs, Node, Process, Result, Setup, Turn};
use serde_json::Value;

use crate::{assert_progress, hold, LONG, TRIO};

/// Order of the upgrade: the followers, then the seed.
const ORDER: [usize; 3] = [2, 3, 1];

const KITE: &str = "/kite/target/release/kite";

fn region_of(home: usize) -> String {
    format!("upgrade-{home}")
}

/// Creates the region of a node in its own memory, and returns the digest of its bytes.
fn create_region(trio: &Turn<'_>, home: usize) -> Result<String> {
    let name = region_of(home);
    trio.node(home).kite(&format!("alloc {name} 3000000"))?;
    let fill = format!("fill {name} --seed {home}");
    trio.node(home).workload(&fill).sh()
}

/// Asserts that all nodes read the bytes of all regions.
fn assert_bytes(trio: &Turn<'_>, digests: &[String]) -> Result<()> {
    for node in trio.nodes() {
        for (home, digest) in (1..).zip(digests) {
            let found = node.workload(&format!("digest {}", region_of(home))).sh()?;
            assert_eq!(found, *digest, "region of node {home} at {}", node.name());
        }
    }
    Ok(())
}

/// Shell line that takes and releases locks until the file exists.
const LOCKS: &str = "rm -f /tmp/upgraded; until [ -e /tmp/upgraded ]; do \
     /kite/target/release/kite-workload locks count locked --threads 2 --operations 20 || exit 1; done";

/// Reads, writes and locks of two nodes that stay in the cluster while the third one is upgraded. All must succeed.
struct Load<'a> {
    nodes: [&'a Node; 2],
    transfers: Vec<Process>,
    locks: Vec<Process>,
}

impl<'a> Load<'a> {
    fn start(nodes: [&'a Node; 2]) -> Result<Self> {
        for name in ["busy", "locked"] {
            nodes[0].kite(&format!("alloc {name} 4M"))?;
        }
        let locks = nodes.iter().map(|node| node.spawn(LOCKS));
        let transfers = nodes.iter().map(|node| hold(node, "busy"));
        Ok(Self {
            nodes,
            locks: locks.collect::<Result<_>>()?,
            transfers: transfers.collect::<Result<_>>()?,
        })
    }

    fn finish(mut self) -> Result<()> {
        for transfers in &mut self.transfers {
            assert_progress(transfers)?;
            transfers.kill()?;
        }
        for node in self.nodes {
            node.sh("touch /tmp/upgraded")?;
        }
        outputs(&mut self.locks, LONG)?;
        for name in ["busy", "locked"] {
            self.nodes[0].kite(&format!("free {name}"))?;
        }
        Ok(())
    }
}

/// Upgrades a node: it leaves, loads the other module, and joins again. The two others are used meanwhile.
fn upgrade(trio: &Turn<'_>, number: usize) -> Result<()> {
    let staying = match number {
        1 => [2, 3],
        2 => [1, 3],
        _ => [1, 2],
    };
    let load = Load::start(staying.map(|other| trio.node(other)))?;
    trio.node(number).start_kite(number, &Setup::default())?;
    trio.await_members(3)?;
    load.finish()
}

/// Returns the numbers of the members that lack the feature, as a node lists them.
fn members_without_renames(node: &Node) -> Result<Vec<usize>> {
    let view: Value = serde_json::from_str(&node.kite("nodes --json")?).expect("JSON");
    let members = view["members"].as_array().expect("members").iter();
    let lacks = members.filter(|m| m["missing_features"][0] == "rename");
    let numbers = lacks.map(|m| m["node"].as_u64().expect("a number") as usize);
    Ok(numbers.collect())
}

/// Asserts that a node with the feature renames the regions of such nodes, and not those of older nodes, to which no
/// message is sent that they do not know.
fn assert_renames(trio: &Turn<'_>, from: usize, upgraded: &[usize], older: &[usize]) -> Result<()> {
    let node = trio.node(from);
    for &home in older {
        let name = region_of(home);
        let malformed = || -> Result<u64> { Ok(trio.node(home).stats()?["malformed_messages"]) };
        let before = malformed()?;
        let refused = node.run(&format!("{KITE} rename {name} other"))?;
        let error = "not supported by the module of a node";
        assert!(refused.stderr.contains(error), "{refused:?}");
        assert_eq!(malformed()?, before, "node {home}");
    }
    for &home in upgraded {
        let name = region_of(home);
        node.kite(&format!("rename {name} other"))?;
        node.kite(&format!("rename other {name}"))?;
    }
    Ok(())
}

#[test]
#[ignore = "long"]
fn cluster_upgraded_node_by_node_serves_all_requests_and_keeps_all_bytes() -> Result<()> {
    let trio = TRIO.take()?;
    trio.start_kite(&Setup::older())?;
    let mut digests = (1..=3)
        .map(|home| create_region(&trio, home))
        .collect::<Result<Vec<_>>>()?;
    for done in 1..=3 {
        let (upgraded, older) = ORDER.split_at(done);
        let number = ORDER[done - 1];
        upgrade(&trio, number)?;
        digests[number - 1] = create_region(&trio, number)?;
        assert_bytes(&trio, &digests)?;
        let mut lacking = older.to_vec();
        lacking.sort_unstable();
        for &from in upgraded {
            assert_eq!(members_without_renames(trio.node(from))?, lacking);
            assert_renames(&trio, from, upgraded, older)?;
        }
        for &from in older {
            assert!(members_without_renames(trio.node(from))?.is_empty());
        }
        assert_bytes(&trio, &digests)?;
    }
    for home in 1..=3 {
        trio.node(1).kite(&format!("free {}", region_of(home)))?;
    }
    Ok(())
}
