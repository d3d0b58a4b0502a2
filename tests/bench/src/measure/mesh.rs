// SPDX-License-Identifier: GPL-2.0 OR MIT
//! All nodes connect to all others at the same time (KRCORE, figure 8): for the first time, when each has to look up
//! by what name the others are reached; again; and by verbs.

use anyhow::{Context, Result};
use kite_cluster::{Cluster, Process};
use serde::Serialize;

use crate::command::{number, PROGRAMS};
use crate::pair::{PATIENCE, PORT};

/// Times in µs until the last node is connected to all others.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Mesh {
    pub(crate) nodes: usize,
    pub(crate) first_us: f64,
    pub(crate) again_us: f64,
    pub(crate) verbs_us: f64,
}

impl Mesh {
    /// Connects nodes among which nothing was connected before.
    pub(crate) fn of(cluster: &Cluster) -> Result<Self> {
        let nodes = cluster.nodes().len();
        let by_kite = |others: &[usize]| {
            let others: Vec<_> = others.iter().map(usize::to_string).collect();
            format!("--keep --kite {}", others.join(","))
        };
        let by_verbs = |others: &[usize]| {
            let address = |other: &usize| format!("{}:{PORT}", cluster.node(*other).address());
            others.iter().map(address).collect::<Vec<_>>().join(" ")
        };
        Ok(Self {
            nodes,
            first_us: time(cluster, by_kite)?,
            again_us: time(cluster, by_kite)?,
            verbs_us: time(cluster, by_verbs)?,
        })
    }
}

fn time(cluster: &Cluster, how: impl Fn(&[usize]) -> String) -> Result<f64> {
    let nodes = cluster.nodes().len();
    let start = |number: usize| {
        let others: Vec<_> = (1..=nodes).filter(|other| *other != number).collect();
        let line = format!("{PROGRAMS}/kite-baseline connect {}", how(&others));
        Ok(cluster.node(number).spawn(&line)?)
    };
    let processes = (1..=nodes).map(start).collect::<Result<Vec<Process>>>()?;
    processes.into_iter().try_fold(0.0, |most, mut process| {
        let output = process.wait(PATIENCE)?;
        let mean = number(&output.stdout, "/mean_us").with_context(|| output.stderr.clone())?;
        Ok(f64::max(most, mean * (nodes - 1) as f64))
    })
}
