// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `kite bench bandwidth`.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{anyhow, Context, Result};
use indicatif::BinaryBytes;
use kite::Cluster;
use serde::Serialize;

use super::args::BandwidthArgs;
use super::buffer::BenchBuffer;
use super::{allocate, measure_all, OpCost, Operation, ReportRow};

/// Row of the report.
#[derive(Serialize)]
struct BandwidthRow {
    operation: Operation,
    size: u64,
    threads: u32,
    bytes: u64,
    seconds: f64,
    mib_per_second: f64,
    #[serde(flatten)]
    op_cost: OpCost,
}

impl ReportRow for BandwidthRow {
    const HEADER: &'static str =
        "OPERATION        SIZE  THREADS        MiB/s       OP/s  BLOCKED/OP";

    fn format_row(&self) -> String {
        let (name, size) = (self.operation.name(), BinaryBytes(self.size).to_string());
        let per_second = self.bytes as f64 / self.size as f64 / self.seconds;
        format!(
            "{name:9} {size:>11} {:>8} {:>12.1} {per_second:>10.0} {:>10.2}",
            self.threads, self.mib_per_second, self.op_cost.blocked_waits_per_op
        )
    }
}

/// Condition at which a thread stops.
#[derive(Clone, Copy, Debug)]
enum StopCondition {
    Time(Duration),
    Operations(u64),
}

impl StopCondition {
    fn from_args(args: &BandwidthArgs, size: u64) -> Self {
        match args.bytes {
            None => Self::Time(Duration::from_secs_f64(args.duration)),
            Some(bytes) => {
                Self::Operations(bytes.div_ceil(size).div_ceil(args.threads.into()).max(1))
            }
        }
    }

    fn is_reached(self, start: Instant, done: u64) -> bool {
        match self {
            Self::Time(time) => start.elapsed() >= time,
            Self::Operations(count) => done >= count,
        }
    }
}

/// Measures all operations and sizes.
pub(super) fn run(cluster: &Cluster, args: &BandwidthArgs) -> Result<()> {
    measure_all(&args.common, &args.size, |operation, size| {
        measure(cluster, args, operation, size)
    })
}

fn measure(
    cluster: &Cluster,
    args: &BandwidthArgs,
    operation: Operation,
    size: u64,
) -> Result<BandwidthRow> {
    let threads = u64::from(args.threads);
    let len = size
        .checked_mul(threads)
        .context("size times threads exceeds the address space")?;
    let region = allocate(cluster, &args.common.node, len)?;
    let mut buffers = (0..threads)
        .map(|i| BenchBuffer::new(&region, i * size, size))
        .collect::<Result<Vec<_>>>()?;
    for buffer in &mut buffers {
        buffer.prepare(operation)?;
        buffer.transfer(operation)?;
        buffer.prepare(operation)?;
    }
    let before = cluster.stats()?;
    let (operations, time) = run_threads(
        &mut buffers,
        operation,
        StopCondition::from_args(args, size),
    )?;
    let op_cost = OpCost::between(&before, &cluster.stats()?);
    for buffer in &mut buffers {
        buffer.verify(operation)?;
    }
    let (bytes, seconds) = (operations * size, time.as_secs_f64());
    Ok(BandwidthRow {
        operation,
        size,
        threads: args.threads,
        bytes,
        seconds,
        mib_per_second: bytes as f64 / seconds / f64::from(1 << 20),
        op_cost,
    })
}

/// Runs one thread per buffer. Returns the number of operations, and the time from the first start to the last end.
fn run_threads(
    buffers: &mut [BenchBuffer<'_>],
    operation: Operation,
    goal: StopCondition,
) -> Result<(u64, Duration)> {
    let (start_barrier, stop) = (Barrier::new(buffers.len()), AtomicBool::new(false));
    let (start_barrier, stop) = (&start_barrier, &stop);
    let spans = thread::scope(|scope| {
        let run = |buffer| {
            scope.spawn(move || run_until_goal(buffer, operation, goal, start_barrier, stop))
        };
        let runs: Vec<_> = buffers.iter_mut().map(run).collect();
        let panicked = |_| Err(anyhow!("a thread panicked"));
        runs.into_iter()
            .map(|run| run.join().unwrap_or_else(panicked))
            .collect::<Result<Vec<ThreadResult>>>()
    })?;
    let start = spans.iter().map(|span| span.start).min();
    let end = spans.iter().map(|span| span.end).max();
    let (start, end) = start.zip(end).context("no operation was measured")?;
    let operations = spans.iter().map(|span| span.operations).sum();
    Ok((operations, end - start))
}

/// Result of one thread.
struct ThreadResult {
    start: Instant,
    end: Instant,
    operations: u64,
}

/// Transfers a buffer until the goal is reached or another thread fails.
fn run_until_goal(
    buffer: &mut BenchBuffer<'_>,
    operation: Operation,
    goal: StopCondition,
    start_barrier: &Barrier,
    stop: &AtomicBool,
) -> Result<ThreadResult> {
    start_barrier.wait();
    let start = Instant::now();
    let mut operations = 0;
    while operations == 0 || !(goal.is_reached(start, operations) || stop.load(Ordering::Relaxed)) {
        buffer.stamp(operation, operations);
        let moved = buffer.transfer(operation);
        if moved.is_err() {
            stop.store(true, Ordering::Relaxed);
        }
        moved?;
        operations += 1;
    }
    Ok(ThreadResult {
        start,
        end: Instant::now(),
        operations,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct BandwidthCommandLine {
        #[command(flatten)]
        args: BandwidthArgs,
    }

    fn goal(words: &str, size: u64) -> StopCondition {
        let words = ["bandwidth", "--node", "1"]
            .into_iter()
            .chain(words.split(' '));
        StopCondition::from_args(&BandwidthCommandLine::parse_from(words).args, size)
    }

    #[test]
    fn byte_goal_is_divided_among_threads() {
        let operations = |words, size| match goal(words, size) {
            StopCondition::Operations(count) => count,
            StopCondition::Time(_) => panic!("a time"),
        };
        assert_eq!(operations("--bytes 1M", 4096), 256);
        assert_eq!(operations("--bytes 1M --threads 4", 4096), 64);
        assert_eq!(operations("--bytes 1M --threads 3", 4096), 86);
        assert_eq!(operations("--bytes 1", 4096), 1);
    }

    #[test]
    fn time_goal_is_reached_after_the_time() {
        let now = Instant::now();
        let goal = goal("--duration 1000", 1);
        assert!(!goal.is_reached(now, u64::MAX));
        let long_ago = now.checked_sub(Duration::from_secs(1000));
        assert!(long_ago.is_none_or(|then| goal.is_reached(then, 0)));
    }
}
