// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Lookup of the address of a node, by one READ of the directory, and by a call with that reply (KRCORE, section 4.2).
//! After a node has left, all addresses are looked up again. Nodes that store the directory read their own memory.

use anyhow::{Context, Result};
use kite_bench::statistics::Spread;
use kite_cluster::{Cluster, Node};
use serde::Serialize;

use crate::command::{number, PROGRAMS};
use crate::pair::{PATIENCE, PORT};

/// The nodes that keep the directory: the first ones.
const KEEPERS: usize = 2;

/// Bytes of a reply with the address of a node.
const REPLY: usize = 64;

/// Calls of each node, and connections by verbs.
const CALLS: usize = 200;
const CONNECTIONS: usize = 20;

/// Medians in µs, and how often the directory was read.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Lookup {
    /// Connections for which a node was looked up.
    pub(crate) first_us: f64,
    /// Those to the same nodes, when they are known.
    pub(crate) again_us: f64,
    /// READs for each of the former.
    pub(crate) reads: f64,
    pub(crate) call_us: f64,
    /// Connections by verbs, each of which opens its device.
    pub(crate) verbs_us: f64,
}

impl Lookup {
    /// Has the last node leave, and those that do not keep the directory look all others up, one after the other. They
    /// call by the region `called`.
    pub(crate) fn of(cluster: &Cluster, called: &str) -> Result<Self> {
        let last = cluster.nodes().len();
        cluster.node(last).stop_kited()?;
        for number in 1..last {
            cluster.node(number).await_view(number, last - 1)?;
        }
        let others = |number: usize| (1..last).filter(move |other| *other != number);
        for keeper in 1..=KEEPERS {
            // A connect waits until all nodes have updated the directory.
            connect(cluster.node(keeper), others(keeper))?;
        }
        let looks = (KEEPERS + 1..last).map(|number| {
            let node = cluster.node(number);
            let reads = || -> Result<u64> { Ok(node.stats()?["directory_reads"]) };
            let before = reads()?;
            let first_us = connect(node, others(number))?;
            let reads = (reads()? - before) as f64 / (last - 2) as f64;
            Ok(Self {
                first_us,
                again_us: connect(node, others(number))?,
                reads,
                call_us: call(node, called)?,
                verbs_us: connect_by_verbs(node, cluster.node(1))?,
            })
        });
        Self::median(&looks.collect::<Result<Vec<_>>>()?)
    }

    fn median(looks: &[Self]) -> Result<Self> {
        let of = |part: fn(&Self) -> f64| {
            let spread = Spread::of(looks.iter().map(part));
            spread
                .map(|spread| spread.median)
                .context("no lookup was measured")
        };
        Ok(Self {
            first_us: of(|look| look.first_us)?,
            again_us: of(|look| look.again_us)?,
            reads: of(|look| look.reads)?,
            call_us: of(|look| look.call_us)?,
            verbs_us: of(|look| look.verbs_us)?,
        })
    }

    /// Returns the time of a lookup.
    pub(crate) fn us(&self) -> f64 {
        self.first_us - self.again_us
    }
}

/// The median time to connect to each of some nodes once.
fn connect(node: &Node, others: impl Iterator<Item = usize>) -> Result<f64> {
    let others: Vec<_> = others.map(|other| other.to_string()).collect();
    let others = others.join(",");
    let line = format!("{PROGRAMS}/kite-baseline connect --keep --kite {others}");
    number(&node.command(line).limit(PATIENCE).sh()?, "/median_us")
}

/// The median time to connect a queue pair to another node, from opening the device on.
fn connect_by_verbs(node: &Node, other: &Node) -> Result<f64> {
    let place = format!("{}:{PORT}", other.address());
    let line = format!("{PROGRAMS}/kite-baseline connect {place} --iterations {CONNECTIONS}");
    number(&node.command(line).limit(PATIENCE).sh()?, "/median_us")
}

fn call(node: &Node, called: &str) -> Result<f64> {
    let line =
        format!("{PROGRAMS}/kite bench rpc {called} --json --size {REPLY} --iterations {CALLS}");
    number(&node.command(line).limit(PATIENCE).sh()?, "/0/median_us")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_of_all_who_looked() {
        let look = |us: f64| Lookup {
            first_us: 10.0 * us,
            again_us: us,
            reads: 1.0,
            call_us: 3.0 * us,
            verbs_us: 99.0 * us,
        };
        let median = Lookup::median(&[look(1.0), look(30.0), look(2.0)]).unwrap();
        assert_eq!((median, median.us()), (look(2.0), 18.0));
        assert!(Lookup::median(&[]).is_err());
    }
}
