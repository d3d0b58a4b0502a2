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

use super::args::Bandwidth;
use super::buffer::Buffer;
use super::{allocate, report, Effort, Line, Operation};

/// One line of the report.
#[derive(Serialize)]
struct Row {
    operation: Operation,
    size: u64,
    threads: u32,
    bytes: u64,
    seconds: f64,
    mib_per_second: f64,
    #[serde(flatten)]
    effort: Effort,
}

impl Line for Row {
    const HEADER: &'static str =
        "OPERATION        SIZE  THREADS        MiB/s       OP/s  SLEEPS/OP";

    fn line(&self) -> String {
        let (name, size) = (self.operation.name(), BinaryBytes(self.size).to_string());
        let per_second = self.bytes as f64 / self.size as f64 / self.seconds;
        format!(
            "{name:9} {size:>11} {:>8} {:>12.1} {per_second:>10.0} {:>10.2}",
            self.threads, self.mib_per_second, self.effort.sleeps_per_op
        )
    }
}

/// When a thread has done enough.
#[derive(Clone, Copy, Debug)]
enum Goal {
    Time(Duration),
    Operations(u64),
}

impl Goal {
    fn of(plan: &Bandwidth, size: u64) -> Self {
        match plan.bytes {
            None => Self::Time(Duration::from_secs_f64(plan.seconds)),
            Some(bytes) => {
                Self::Operations(bytes.div_ceil(size).div_ceil(plan.threads.into()).max(1))
            }
        }
    }

    fn reached(self, start: Instant, done: u64) -> bool {
        match self {
            Self::Time(time) => start.elapsed() >= time,
            Self::Operations(count) => done >= count,
        }
    }
}

/// Measures all operations and sizes.
pub(super) fn run(cluster: &Cluster, plan: &Bandwidth) -> Result<()> {
    report(&plan.common, &plan.size, |operation, size| {
        measure(cluster, plan, operation, size)
    })
}

fn measure(cluster: &Cluster, plan: &Bandwidth, operation: Operation, size: u64) -> Result<Row> {
    let threads = u64::from(plan.threads);
    let len = size
        .checked_mul(threads)
        .context("more bytes than there are addresses")?;
    let region = allocate(cluster, &plan.common.node, len)?;
    let mut buffers = (0..threads)
        .map(|i| Buffer::new(&region, i * size, size))
        .collect::<Result<Vec<_>>>()?;
    for buffer in &mut buffers {
        buffer.prepare(operation)?;
        buffer.transfer(operation)?;
        buffer.prepare(operation)?;
    }
    let before = cluster.stats()?;
    let (operations, time) = at_once(&mut buffers, operation, Goal::of(plan, size))?;
    let effort = Effort::between(&before, &cluster.stats()?);
    for buffer in &mut buffers {
        buffer.verify(operation)?;
    }
    let (bytes, seconds) = (operations * size, time.as_secs_f64());
    Ok(Row {
        operation,
        size,
        threads: plan.threads,
        bytes,
        seconds,
        mib_per_second: bytes as f64 / seconds / f64::from(1 << 20),
        effort,
    })
}

/// Gives each buffer a thread. Returns how many operations there were, and from the first thread's
/// start to the last one's end.
fn at_once(
    buffers: &mut [Buffer<'_>],
    operation: Operation,
    goal: Goal,
) -> Result<(u64, Duration)> {
    let (together, stop) = (Barrier::new(buffers.len()), AtomicBool::new(false));
    let (together, stop) = (&together, &stop);
    let spans = thread::scope(|scope| {
        let run = |buffer| scope.spawn(move || repeat(buffer, operation, goal, together, stop));
        let runs: Vec<_> = buffers.iter_mut().map(run).collect();
        let panicked = |_| Err(anyhow!("a thread panicked"));
        runs.into_iter()
            .map(|run| run.join().unwrap_or_else(panicked))
            .collect::<Result<Vec<Span>>>()
    })?;
    let start = spans.iter().map(|span| span.start).min();
    let end = spans.iter().map(|span| span.end).max();
    let (start, end) = start.zip(end).context("nothing was measured")?;
    let operations = spans.iter().map(|span| span.operations).sum();
    Ok((operations, end - start))
}

/// What one thread did.
struct Span {
    start: Instant,
    end: Instant,
    operations: u64,
}

/// Moves a buffer until the goal is reached, or another thread failed.
fn repeat(
    buffer: &mut Buffer<'_>,
    operation: Operation,
    goal: Goal,
    together: &Barrier,
    stop: &AtomicBool,
) -> Result<Span> {
    together.wait();
    let start = Instant::now();
    let mut operations = 0;
    while operations == 0 || !(goal.reached(start, operations) || stop.load(Ordering::Relaxed)) {
        buffer.stamp(operation, operations);
        let moved = buffer.transfer(operation);
        if moved.is_err() {
            stop.store(true, Ordering::Relaxed);
        }
        moved?;
        operations += 1;
    }
    Ok(Span {
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
    struct Line {
        #[command(flatten)]
        plan: Bandwidth,
    }

    fn goal(words: &str, size: u64) -> Goal {
        let words = ["bandwidth", "--node", "1"]
            .into_iter()
            .chain(words.split(' '));
        Goal::of(&Line::parse_from(words).plan, size)
    }

    #[test]
    fn bytes_are_shared_by_the_threads() {
        let operations = |words, size| match goal(words, size) {
            Goal::Operations(count) => count,
            Goal::Time(_) => panic!("a time"),
        };
        assert_eq!(operations("--bytes 1M", 4096), 256);
        assert_eq!(operations("--bytes 1M --threads 4", 4096), 64);
        assert_eq!(operations("--bytes 1M --threads 3", 4096), 86);
        assert_eq!(operations("--bytes 1", 4096), 1);
    }

    #[test]
    fn a_time_ends_when_it_has_passed() {
        let now = Instant::now();
        let goal = goal("--seconds 1000", 1);
        assert!(!goal.reached(now, u64::MAX));
        let long_ago = now.checked_sub(Duration::from_secs(1000));
        assert!(long_ago.is_none_or(|then| goal.reached(then, 0)));
    }
}
