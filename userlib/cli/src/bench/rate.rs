// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `kite bench rate`: rate of operations with many in flight, through an I/O queue.

use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use indicatif::BinaryBytes;
use kite::{Cluster, IoQueue, Region};
use serde::Serialize;

use super::args::RateArgs;
use super::{allocate, measure_all, Operation, ReportRow};

/// Row of the report.
#[derive(Serialize)]
struct RateRow {
    operation: Operation,
    size: u64,
    depth: u32,
    iterations: u64,
    operations_per_second: f64,
    system_calls_per_op: f64,
}

impl ReportRow for RateRow {
    const HEADER: &'static str = "OPERATION        SIZE    DEPTH       OP/s  SYSCALLS/OP";

    fn format_row(&self) -> String {
        let (name, size) = (self.operation.name(), BinaryBytes(self.size).to_string());
        format!(
            "{name:9} {size:>11} {:>8} {:>10.0} {:>16.4}",
            self.depth, self.operations_per_second, self.system_calls_per_op
        )
    }
}

/// Measures all operations and sizes.
pub(super) fn run(cluster: &Cluster, args: &RateArgs) -> Result<()> {
    measure_all(&args.common, &args.size, |operation, size| {
        measure(cluster, args, operation, size)
    })
}

fn measure(cluster: &Cluster, args: &RateArgs, operation: Operation, size: u64) -> Result<RateRow> {
    let len = size
        .checked_mul(args.depth.into())
        .context("size times depth exceeds the address space")?;
    let region = allocate(cluster, &args.common.node, len)?;
    let mut stream = RequestStream {
        queue: cluster.create_queue(args.depth, usize::try_from(len)?)?,
        region,
        operation,
        size: usize::try_from(size)?,
    };
    stream.prepare()?;
    stream.run((args.iterations / 10).min(1000) + u64::from(args.depth))?;
    let before = stream.queue.system_calls();
    let time = stream.run(args.iterations)?;
    let system_calls = stream.queue.system_calls() - before;
    stream.verify()?;
    Ok(RateRow {
        operation,
        size,
        depth: args.depth,
        iterations: args.iterations,
        operations_per_second: args.iterations as f64 / time.as_secs_f64(),
        system_calls_per_op: system_calls as f64 / args.iterations as f64,
    })
}

/// Continuous stream of operations. Each slot has a separate part of the region and of the queue's memory.
struct RequestStream {
    queue: IoQueue,
    region: Region,
    operation: Operation,
    size: usize,
}

impl RequestStream {
    /// Returns the data of a slot at its source.
    fn pattern(&self, slot: usize) -> Vec<u8> {
        (0..self.size).map(|i| (slot * 7 + i) as u8 | 1).collect()
    }

    fn slots(&self) -> usize {
        self.queue.entries()
    }

    fn prepare(&mut self) -> Result<()> {
        for slot in 0..self.slots() {
            let (bytes, at) = (self.pattern(slot), slot * self.size);
            match self.operation {
                Operation::Write => self.queue.store(at, &bytes)?,
                Operation::Read => self.region.write_at(&bytes, at as u64)?,
            }
        }
        Ok(())
    }

    fn verify(&self) -> Result<()> {
        for slot in 0..self.slots() {
            let (mut found, at) = (vec![0; self.size], slot * self.size);
            match self.operation {
                Operation::Write => self.region.read_at(&mut found, at as u64)?,
                Operation::Read => self.queue.load(at, &mut found)?,
            }
            let name = self.operation.name();
            ensure!(
                found == self.pattern(slot),
                "wrong data after the last {name}; the times are invalid"
            );
        }
        Ok(())
    }

    /// Runs `count` operations, with as many in flight as the queue has entries.
    fn run(&mut self, count: u64) -> Result<Duration> {
        let start = Instant::now();
        let mut submitted = 0;
        while submitted < count.min(self.slots() as u64) {
            self.submit(submitted)?;
            submitted += 1;
        }
        while self.queue.in_flight() > 0 {
            let mut next = Some(self.queue.wait()?);
            while let Some(done) = next {
                done.result?;
                if submitted < count {
                    self.submit(done.tag)?;
                    submitted += 1;
                }
                next = self.queue.try_next()?;
            }
        }
        Ok(start.elapsed())
    }

    fn submit(&mut self, slot: u64) -> kite::Result<()> {
        let at = slot as usize * self.size;
        let range = at..at + self.size;
        match self.operation {
            Operation::Write => self.queue.write(slot, &self.region, at as u64, range),
            Operation::Read => self.queue.read(slot, &self.region, at as u64, range),
        }
    }
}
