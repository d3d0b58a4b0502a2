// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `kite bench connect`: time to connect a virtual queue pair to a node, after which requests may be posted.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use kite::Cluster;
use serde::Serialize;

use super::args::ConnectArgs;
use super::summary::LatencySummary;
use crate::output::{print_json, print_line};

/// Report of the measurement.
#[derive(Serialize)]
struct ConnectReport {
    node: u32,
    iterations: u32,
    /// Time of the first connection, which includes the lookup of the node unless its address is cached.
    first_us: f64,
    #[serde(flatten)]
    summary: LatencySummary,
}

/// Connects and closes repeatedly, and prints the times.
pub(super) fn run(cluster: &Cluster, args: &ConnectArgs) -> Result<()> {
    let node = args.node.resolve(cluster)?;
    let connect = || -> Result<Duration> {
        let start = Instant::now();
        let vqp = cluster.connect(node)?;
        let time = start.elapsed();
        drop(vqp);
        Ok(time)
    };
    let first = connect().with_context(|| format!("connecting to node {node}"))?;
    let times = (0..args.iterations).map(|_| connect());
    let summary = LatencySummary::from_times(times.collect::<Result<_>>()?)
        .context("no connection was measured")?;
    let report = ConnectReport {
        node,
        iterations: args.iterations,
        first_us: first.as_secs_f64() * 1e6,
        summary,
    };
    if args.json {
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
