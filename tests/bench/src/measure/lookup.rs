// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Lookup of the address of a node by one READ of the directory, compared with an RPC (KRCORE, section 4.2).
//!
//! A node leaves first, since nodes then look up all addresses again. Nodes that store the directory read their own
//! memory, and are not measured.

use anyhow::{Context, Result};
use kite_bench::statistics::Spread;
use kite_cluster::{Cluster, Node};
use serde::{Deserialize, Serialize};

use crate::command::PROGRAM_DIR;
use crate::node_pair::{BASELINE_PORT, TIMEOUT};
use crate::parse::number;

/// Number of nodes that store the directory: the first ones.
const DIRECTORY_NODES: usize = 2;

/// Bytes of a reply with the address of a node.
const REPLY_BYTES: usize = 64;

/// RPCs, and connections by verbs, of each node.
const CALLS: usize = 200;
const CONNECTIONS: usize = 20;

/// Median times in µs, and READs of the directory.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Lookup {
    /// Connection to a node that is looked up.
    pub(crate) unknown_us: f64,
    /// Connection to a node whose address is cached.
    pub(crate) known_us: f64,
    /// READs of the directory per node that is looked up.
    pub(crate) reads: f64,
    /// RPC with a reply of 64 bytes.
    pub(crate) call_us: f64,
    /// Connection by verbs, from opening the device on.
    pub(crate) verbs_us: f64,
}

impl Lookup {
    /// Removes the last node from the cluster, and measures lookups of all others. RPCs use the region `rpc_region`.
    pub(crate) fn measure(cluster: &Cluster, rpc_region: &str) -> Result<Self> {
        let last = cluster.nodes().len();
        cluster.node(last).stop_kited()?;
        for number in 1..last {
            cluster.node(number).await_view(number, last - 1)?;
        }
        let others = |number: usize| (1..last).filter(move |other| *other != number);
        for number in 1..=DIRECTORY_NODES {
            // A connect waits until all nodes have updated the directory.
            connect(cluster.node(number), others(number))?;
        }
        let lookups = (DIRECTORY_NODES + 1..last).map(|number| {
            let node = cluster.node(number);
            let reads = || -> Result<u64> { Ok(node.stats()?["directory_reads"]) };
            let before = reads()?;
            let unknown_us = connect(node, others(number))?;
            let reads = (reads()? - before) as f64 / (last - 2) as f64;
            Ok(Self {
                unknown_us,
                known_us: connect(node, others(number))?,
                reads,
                call_us: call(node, rpc_region)?,
                verbs_us: connect_by_verbs(node, cluster.node(1))?,
            })
        });
        Self::median(&lookups.collect::<Result<Vec<_>>>()?)
    }

    fn median(lookups: &[Self]) -> Result<Self> {
        let median_of = |field: fn(&Self) -> f64| {
            let spread = Spread::from_values(lookups.iter().map(field));
            spread.map(|spread| spread.median).context("no lookups")
        };
        Ok(Self {
            unknown_us: median_of(|lookup| lookup.unknown_us)?,
            known_us: median_of(|lookup| lookup.known_us)?,
            reads: median_of(|lookup| lookup.reads)?,
            call_us: median_of(|lookup| lookup.call_us)?,
            verbs_us: median_of(|lookup| lookup.verbs_us)?,
        })
    }

    /// Returns the time of a lookup: the difference of both connection times.
    pub(crate) fn lookup_us(&self) -> f64 {
        self.unknown_us - self.known_us
    }
}

/// Returns the median time of a VQP connection to each of the nodes.
fn connect(node: &Node, others: impl Iterator<Item = usize>) -> Result<f64> {
    let others: Vec<_> = others.map(|other| other.to_string()).collect();
    let others = others.join(",");
    let line = format!("{PROGRAM_DIR}/kite-baseline connect --keep --kite {others}");
    number(&node.command(line).limit(TIMEOUT).sh()?, "/median_us")
}

/// Returns the median time to connect a QP, from opening the device on.
fn connect_by_verbs(node: &Node, other: &Node) -> Result<f64> {
    let address = format!("{}:{BASELINE_PORT}", other.address());
    let line = format!("{PROGRAM_DIR}/kite-baseline connect {address} --iterations {CONNECTIONS}");
    number(&node.command(line).limit(TIMEOUT).sh()?, "/median_us")
}

/// Returns the median time of an RPC.
fn call(node: &Node, rpc_region: &str) -> Result<f64> {
    let line =
        format!("{PROGRAM_DIR}/kite bench rpc {rpc_region} --json --size {REPLY_BYTES} --iterations {CALLS}");
    number(&node.command(line).limit(TIMEOUT).sh()?, "/0/median_us")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_is_taken_over_all_nodes() {
        let lookup = |us: f64| Lookup {
            unknown_us: 10.0 * us,
            known_us: us,
            reads: 1.0,
            call_us: 3.0 * us,
            verbs_us: 99.0 * us,
        };
        let median = Lookup::median(&[lookup(1.0), lookup(30.0), lookup(2.0)]).unwrap();
        assert_eq!((median, median.lookup_us()), (lookup(2.0), 18.0));
        assert!(Lookup::median(&[]).is_err());
    }
}
