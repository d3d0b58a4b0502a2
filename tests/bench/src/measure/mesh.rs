// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Full mesh: all nodes connect to all others at the same time (KRCORE, figure 8). Measured by kite with directory
//! lookups, by kite with cached addresses, and by verbs.

use anyhow::{Context, Result};
use kite_cluster::{Cluster, Process};
use serde::{Deserialize, Serialize};

use crate::command::PROGRAM_DIR;
use crate::node_pair::{BASELINE_PORT, TIMEOUT};
use crate::parse::number;

/// Times in µs until the last node has connected to all others.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Mesh {
    pub(crate) nodes: usize,
    /// By kite, with lookups.
    pub(crate) unknown_us: f64,
    /// By kite, with cached addresses.
    pub(crate) known_us: f64,
    pub(crate) verbs_us: f64,
}

impl Mesh {
    /// Measures nodes that have not connected before.
    pub(crate) fn measure(cluster: &Cluster) -> Result<Self> {
        let nodes = cluster.nodes().len();
        let by_kite = |others: &[usize]| {
            let others: Vec<_> = others.iter().map(usize::to_string).collect();
            format!("--keep --kite {}", others.join(","))
        };
        let by_verbs = |others: &[usize]| {
            let address =
                |other: &usize| format!("{}:{BASELINE_PORT}", cluster.node(*other).address());
            others.iter().map(address).collect::<Vec<_>>().join(" ")
        };
        Ok(Self {
            nodes,
            unknown_us: time(cluster, by_kite)?,
            known_us: time(cluster, by_kite)?,
            verbs_us: time(cluster, by_verbs)?,
        })
    }
}

/// Returns the time of a mesh. `arguments` returns those of `kite-baseline connect` for a list of nodes.
fn time(cluster: &Cluster, arguments: impl Fn(&[usize]) -> String) -> Result<f64> {
    let nodes = cluster.nodes().len();
    let start = |number: usize| {
        let others: Vec<_> = (1..=nodes).filter(|other| *other != number).collect();
        let line = format!("{PROGRAM_DIR}/kite-baseline connect {}", arguments(&others));
        Ok(cluster.node(number).spawn(&line)?)
    };
    let processes = (1..=nodes).map(start).collect::<Result<Vec<Process>>>()?;
    processes.into_iter().try_fold(0.0, |max, mut process| {
        let output = process.wait(TIMEOUT)?;
        let mean = number(&output.stdout, "/mean_us").with_context(|| output.stderr.clone())?;
        Ok(f64::max(max, mean * (nodes - 1) as f64))
    })
}
