// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `kite bench connect`: how long it takes to connect to a node by a virtual queue pair, so that requests may be
//! pushed.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use kite::Cluster;
use serde::Serialize;

use super::args::ConnectArgs;
use super::sample::LatencySummary;
use crate::{print_json, print_line};

/// What was found.
#[derive(Serialize)]
struct ConnectReport {
    node: u32,
    iterations: u32,
    /// Of the first time, which is longer if this node has not looked that one up yet.
    first_us: f64,
    #[serde(flatten)]
    summary: LatencySummary,
}

/// Connects, and closes that again, and prints how long the first took.
pub(super) fn run(cluster: &Cluster, plan: &ConnectArgs) -> Result<()> {
    let node = plan.node.resolve(cluster)?;
    let connect = || -> Result<Duration> {
        let start = Instant::now();
        let vqp = cluster.connect(node)?;
        let time = start.elapsed();
        drop(vqp);
        Ok(time)
    };
    let first = connect().with_context(|| format!("connecting to node {node}"))?;
    let times = (0..plan.iterations).map(|_| connect());
    let summary = LatencySummary::from_times(times.collect::<Result<_>>()?).context("no times")?;
    let report = ConnectReport {
        node,
        iterations: plan.iterations,
        first_us: first.as_secs_f64() * 1e6,
        summary,
    };
    if plan.json {
        return print_json(&report);
    }
    let LatencySummary {
        min_us,
        median_us,
        p99_us,
        ..
    } = report.summary;
    print_line(format_args!("   FIRST      MIN   MEDIAN      P99 µs"))?;
    let first = report.first_us;
    print_line(format_args!(
        "{first:8.1} {min_us:8.1} {median_us:8.1} {p99_us:8.1}"
    ))
}
