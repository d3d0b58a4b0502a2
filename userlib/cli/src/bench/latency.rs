// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `kite bench latency`.

use std::time::Instant;

use anyhow::{Context, Result};
use indicatif::BinaryBytes;
use kite::Cluster;
use serde::Serialize;

use super::args::Latency;
use super::buffer::Buffer;
use super::sample::Summary;
use super::{allocate, report, Effort, Line, Operation};

/// One line of the report.
#[derive(Serialize)]
struct Row {
    operation: Operation,
    size: u64,
    iterations: u32,
    #[serde(flatten)]
    summary: Summary,
    #[serde(flatten)]
    effort: Effort,
}

impl Line for Row {
    const HEADER: &'static str = "OPERATION        SIZE      MIN   MEDIAN      P99 µs  SLEEPS/OP";

    fn line(&self) -> String {
        let Summary {
            min_us,
            median_us,
            p99_us,
            ..
        } = self.summary;
        let (name, size) = (self.operation.name(), BinaryBytes(self.size).to_string());
        format!(
            "{name:9} {size:>11} {min_us:8.1} {median_us:8.1} {p99_us:8.1}    {:9.2}",
            self.effort.sleeps_per_op
        )
    }
}

/// Measures all operations and sizes.
pub(super) fn run(cluster: &Cluster, plan: &Latency) -> Result<()> {
    report(&plan.common, &plan.size, |operation, size| {
        measure(cluster, plan, operation, size)
    })
}

fn measure(cluster: &Cluster, plan: &Latency, operation: Operation, size: u64) -> Result<Row> {
    let region = allocate(cluster, &plan.common.node, size)?;
    let mut buffer = Buffer::new(&region, 0, size)?;
    buffer.prepare(operation)?;
    for _ in 0..(plan.iterations / 10).clamp(1, 1000) {
        buffer.transfer(operation)?;
    }
    buffer.prepare(operation)?;

    let before = cluster.stats()?;
    let mut times = Vec::with_capacity(plan.iterations as usize);
    for count in 0..plan.iterations {
        buffer.stamp(operation, count.into());
        let start = Instant::now();
        buffer.transfer(operation)?;
        times.push(start.elapsed());
    }
    let effort = Effort::between(&before, &cluster.stats()?);
    buffer.verify(operation)?;
    Ok(Row {
        operation,
        size,
        iterations: plan.iterations,
        summary: Summary::of(times).context("nothing was measured")?,
        effort,
    })
}
