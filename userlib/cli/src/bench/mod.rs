// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `kite bench`: latency, bandwidth and rate of reads and writes, latency of RPCs and connections.
//!
//! Reads and writes access an anonymous region, which is freed afterwards. Buffers are resident before the clock
//! starts. The data is compared after the last operation: times of wrong data are invalid.

mod args;
mod bandwidth;
mod buffer;
mod connect;
mod latency;
mod rate;
mod rpc;
mod summary;

use anyhow::{Context, Result};
use clap::ValueEnum;
use kite::{AllocOptions, Cluster, Priority, Region, Stats};
use serde::Serialize;

use crate::nodes::NodeArg;
use crate::output::{print_json, print_line};
use args::CommonArgs;

pub(crate) use args::Bench;

/// Measured operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Operation {
    /// Write from this node to the region
    Write,
    /// Read from the region to this node
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

/// Work requests and blocked waits per operation, and retries. The counters are those of the RNIC, so other programs
/// that use kite at the same time distort them.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct OpCost {
    work_requests_per_op: f64,
    blocked_waits_per_op: f64,
    retries: u64,
}

impl OpCost {
    fn between(before: &Stats, after: &Stats) -> Self {
        let operations = (after.reads - before.reads) + (after.writes - before.writes);
        let per_op = |count: u64| count as f64 / operations.max(1) as f64;
        Self {
            work_requests_per_op: per_op(after.work_requests - before.work_requests),
            blocked_waits_per_op: per_op(after.blocked_waits - before.blocked_waits),
            retries: after.retries - before.retries,
        }
    }
}

/// Runs a measurement and prints it.
pub(crate) fn run(cluster: &Cluster, bench: &Bench) -> Result<()> {
    if bench.is_low_priority() {
        cluster.set_priority(Priority::Low)?;
    }
    match bench {
        Bench::Latency(args) => latency::run(cluster, args),
        Bench::Bandwidth(args) => bandwidth::run(cluster, args),
        Bench::Rate(args) => rate::run(cluster, args),
        Bench::Rpc(args) => rpc::run(cluster, args),
        Bench::Connect(args) => connect::run(cluster, args),
        Bench::Serve(args) => rpc::serve_replies(cluster, args),
    }
}

/// Row of a report.
trait ReportRow: Serialize {
    /// Headings of the columns.
    const HEADER: &'static str;

    fn format_row(&self) -> String;
}

/// Measures all operations and sizes. Prints each row when it is complete.
fn measure_all<L: ReportRow>(
    common: &CommonArgs,
    sizes: &[u64],
    measure: impl Fn(Operation, u64) -> Result<L>,
) -> Result<()> {
    let print = |line: &str| match common.json {
        true => Ok(()),
        false => print_line(format_args!("{line}")),
    };
    print(L::HEADER)?;
    let mut lines = Vec::new();
    for &operation in &common.operation {
        for &size in sizes {
            let line = measure(operation, size)
                .with_context(|| format!("{} of {size} bytes", operation.name()))?;
            print(&line.format_row())?;
            lines.push(line);
        }
    }
    match common.json {
        true => print_json(&lines),
        false => Ok(()),
    }
}

fn allocate(cluster: &Cluster, node: &NodeArg, len: u64) -> Result<Region> {
    let node = node.resolve(cluster)?;
    cluster
        .alloc(&AllocOptions::new(len).nodes([node]))
        .with_context(|| format!("allocating {len} bytes on node {node}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn op_cost_is_the_counter_difference_per_operation() {
        let before = Stats {
            reads: 5,
            blocked_waits: 7,
            work_requests: 100,
            ..Stats::default()
        };
        let after = Stats {
            reads: 7,
            writes: 2,
            blocked_waits: 9,
            work_requests: 108,
            retries: 1,
            ..Stats::default()
        };
        let cost = OpCost::between(&before, &after);
        assert_eq!(cost.work_requests_per_op, 2.0);
        assert_eq!(cost.blocked_waits_per_op, 0.5);
        assert_eq!(cost.retries, 1);
        assert_eq!(OpCost::between(&after, &after).blocked_waits_per_op, 0.0);
    }
}
