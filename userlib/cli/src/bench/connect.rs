// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `kite bench connect`: how long it takes to connect to a node by a virtual queue pair, so that requests may be
//! pushed.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use kite::Cluster;
use serde::Serialize;

use super::args::Connect;
use super::sample::Summary;
use crate::{say, say_json};

/// What was found.
#[derive(Serialize)]
struct Report {
    node: u32,
    iterations: u32,
    /// Of the first time, which is longer if this node has not looked that one up yet.
    first_us: f64,
    #[serde(flatten)]
    summary: Summary,
}

/// Connects, and closes that again, and prints how long the first took.
pub(super) fn run(cluster: &Cluster, plan: &Connect) -> Result<()> {
    let node = plan.node.number(cluster)?;
    let connect = || -> Result<Duration> {
        let start = Instant::now();
        let vqp = cluster.connect(node)?;
        let time = start.elapsed();
        drop(vqp);
        Ok(time)
    };
    let first = connect().with_context(|| format!("connecting to node {node}"))?;
    let times = (0..plan.iterations).map(|_| connect());
    let summary = Summary::of(times.collect::<Result<_>>()?).context("no times")?;
    let report = Report {
        node,
        iterations: plan.iterations,
        first_us: first.as_secs_f64() * 1e6,
        summary,
    };
    if plan.json {
        return say_json(&report);
    }
    let Summary {
        min_us,
        median_us,
        p99_us,
        ..
    } = report.summary;
    say(format_args!("   FIRST      MIN   MEDIAN      P99 µs"))?;
    let first = report.first_us;
    say(format_args!(
        "{first:8.1} {min_us:8.1} {median_us:8.1} {p99_us:8.1}"
    ))
}
