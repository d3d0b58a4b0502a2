// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `kite bench latency`.

use std::time::Instant;

use anyhow::{Context, Result};
use indicatif::BinaryBytes;
use kite::Cluster;
use serde::Serialize;

use super::args::LatencyArgs;
use super::buffer::BenchBuffer;
use super::summary::LatencySummary;
use super::{allocate, measure_all, OpCost, Operation, ReportRow};

/// Row of the report.
#[derive(Serialize)]
struct LatencyRow {
    operation: Operation,
    size: u64,
    iterations: u32,
    #[serde(flatten)]
    summary: LatencySummary,
    #[serde(flatten)]
    op_cost: OpCost,
}

impl ReportRow for LatencyRow {
    const HEADER: &'static str = "OPERATION        SIZE      MIN   MEDIAN      P99 µs  BLOCKED/OP";

    fn format_row(&self) -> String {
        let LatencySummary {
            min_us,
            median_us,
            p99_us,
            ..
        } = self.summary;
        let (name, size) = (self.operation.name(), BinaryBytes(self.size).to_string());
        format!(
            "{name:9} {size:>11} {min_us:8.1} {median_us:8.1} {p99_us:8.1}    {:9.2}",
            self.op_cost.blocked_waits_per_op
        )
    }
}

/// Measures all operations and sizes.
pub(super) fn run(cluster: &Cluster, args: &LatencyArgs) -> Result<()> {
    measure_all(&args.common, &args.size, |operation, size| {
        measure(cluster, args, operation, size)
    })
}

fn measure(
    cluster: &Cluster,
    args: &LatencyArgs,
    operation: Operation,
    size: u64,
) -> Result<LatencyRow> {
    let region = allocate(cluster, &args.common.node, size)?;
    let mut buffer = BenchBuffer::new(&region, 0, size)?;
    buffer.prepare(operation)?;
    for _ in 0..(args.iterations / 10).clamp(1, 1000) {
        buffer.transfer(operation)?;
    }
    buffer.prepare(operation)?;

    let before = cluster.stats()?;
    let mut times = Vec::with_capacity(args.iterations as usize);
    for count in 0..args.iterations {
        buffer.stamp(operation, count.into());
        let start = Instant::now();
        buffer.transfer(operation)?;
        times.push(start.elapsed());
    }
    let op_cost = OpCost::between(&before, &cluster.stats()?);
    buffer.verify(operation)?;
    Ok(LatencyRow {
        operation,
        size,
        iterations: args.iterations,
        summary: LatencySummary::from_times(times).context("no operation was measured")?,
        op_cost,
    })
}
