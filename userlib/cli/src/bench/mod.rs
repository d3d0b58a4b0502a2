// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `kite bench`: how long reads, writes, calls and connections take, how many bytes they move, and how many there are.
//!
//! Reads and writes are of an anonymous region that ends with them, from buffers that are in memory before the
//! clock starts. What was moved is compared afterwards: times of wrong bytes are no result.

mod args;
mod bandwidth;
mod buffer;
mod calls;
mod connect;
mod latency;
mod rate;
mod sample;

use anyhow::{Context, Result};
use clap::ValueEnum;
use kite::{AllocOptions, Cluster, Priority, Region, Stats};
use serde::Serialize;

use crate::nodes::NodeArg;
use crate::{say, say_json};
use args::Common;

pub(crate) use args::Bench;

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Operation {
    /// From this node to the region
    Write,
    /// From the region to this node
    Read,
}

impl Operation {
    fn name(self) -> &'static str {
        match self {
            Self::Write => "write",
            Self::Read => "read",
        }
    }
}

/// What the RNIC did for each operation: where time went besides the wire. It counts for all of the
/// node, so it is this measurement's alone only while nobody else uses kite.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Effort {
    work_requests_per_op: f64,
    sleeps_per_op: f64,
    retries: u64,
}

impl Effort {
    fn between(before: &Stats, after: &Stats) -> Self {
        let operations = (after.reads - before.reads) + (after.writes - before.writes);
        let per_op = |count: u64| count as f64 / operations.max(1) as f64;
        Self {
            work_requests_per_op: per_op(after.work_requests - before.work_requests),
            sleeps_per_op: per_op(after.sleeps - before.sleeps),
            retries: after.retries - before.retries,
        }
    }
}

/// Runs a measurement and prints it.
pub(crate) fn run(cluster: &Cluster, bench: &Bench) -> Result<()> {
    if bench.is_low() {
        cluster.set_priority(Priority::Low)?;
    }
    match bench {
        Bench::Latency(plan) => latency::run(cluster, plan),
        Bench::Bandwidth(plan) => bandwidth::run(cluster, plan),
        Bench::Rate(plan) => rate::run(cluster, plan),
        Bench::Calls(plan) => calls::run(cluster, plan),
        Bench::Connect(plan) => connect::run(cluster, plan),
        Bench::Answer(plan) => calls::answer(cluster, plan),
    }
}

/// One line of a report.
trait Line: Serialize {
    /// What stands above the lines.
    const HEADER: &'static str;

    fn line(&self) -> String;
}

/// Measures all operations and sizes, and prints what was found; a line appears as soon as it is
/// known.
fn report<L: Line>(
    common: &Common,
    sizes: &[u64],
    measure: impl Fn(Operation, u64) -> Result<L>,
) -> Result<()> {
    let tell = |line: &str| match common.json {
        true => Ok(()),
        false => say(format_args!("{line}")),
    };
    tell(L::HEADER)?;
    let mut lines = Vec::new();
    for &operation in &common.operation {
        for &size in sizes {
            let line = measure(operation, size)
                .with_context(|| format!("{} of {size} bytes", operation.name()))?;
            tell(&line.line())?;
            lines.push(line);
        }
    }
    match common.json {
        true => say_json(&lines),
        false => Ok(()),
    }
}

fn allocate(cluster: &Cluster, node: &NodeArg, len: u64) -> Result<Region> {
    let node = node.number(cluster)?;
    cluster
        .alloc(&AllocOptions::new(len).nodes([node]))
        .with_context(|| format!("allocating {len} bytes on node {node}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn effort_is_the_difference_for_each_operation() {
        let before = Stats {
            reads: 5,
            sleeps: 7,
            work_requests: 100,
            ..Stats::default()
        };
        let after = Stats {
            reads: 7,
            writes: 2,
            sleeps: 9,
            work_requests: 108,
            retries: 1,
            ..Stats::default()
        };
        let effort = Effort::between(&before, &after);
        assert_eq!(effort.work_requests_per_op, 2.0);
        assert_eq!(effort.sleeps_per_op, 0.5);
        assert_eq!(effort.retries, 1);
        assert_eq!(Effort::between(&after, &after).sleeps_per_op, 0.0);
    }
}
