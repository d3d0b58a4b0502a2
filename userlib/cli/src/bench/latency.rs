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
use super::{allocate, Effort, Operation};
use crate::{say, say_json};

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

/// Measures all operations and sizes; a line appears as soon as it is known.
pub(super) fn run(cluster: &Cluster, plan: &Latency) -> Result<()> {
    if !plan.common.json {
        say(format_args!(
            "OPERATION        SIZE      MIN   MEDIAN      P99 µs  SLEEPS/OP"
        ))?;
    }
    let mut rows = Vec::new();
    for &operation in &plan.common.operation {
        for &size in &plan.size {
            let row = measure(cluster, plan, operation, size)
                .with_context(|| format!("{} of {size} bytes", operation.name()))?;
            if !plan.common.json {
                print(&row)?;
            }
            rows.push(row);
        }
    }
    match plan.common.json {
        true => say_json(&rows),
        false => Ok(()),
    }
}

fn measure(cluster: &Cluster, plan: &Latency, operation: Operation, size: u64) -> Result<Row> {
    let region = allocate(cluster, plan.common.node, size)?;
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

fn print(row: &Row) -> Result<()> {
    let Summary {
        min_us,
        median_us,
        p99_us,
        ..
    } = row.summary;
    let (name, size) = (row.operation.name(), BinaryBytes(row.size).to_string());
    say(format_args!(
        "{name:9} {size:>11} {min_us:8.1} {median_us:8.1} {p99_us:8.1}    {:9.2}",
        row.effort.sleeps_per_op
    ))
}
