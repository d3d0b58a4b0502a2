// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `kite bench rate`: many operations at a time, by a queue pair.

use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use indicatif::BinaryBytes;
use kite::{Cluster, IoQueue, Region};
use serde::Serialize;

use super::args::RateArgs;
use super::{allocate, measure_all, Operation, ReportRow};

/// One line of the report.
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
pub(super) fn run(cluster: &Cluster, plan: &RateArgs) -> Result<()> {
    measure_all(&plan.common, &plan.size, |operation, size| {
        measure(cluster, plan, operation, size)
    })
}

fn measure(cluster: &Cluster, plan: &RateArgs, operation: Operation, size: u64) -> Result<RateRow> {
    let len = size
        .checked_mul(plan.depth.into())
        .context("more bytes than there are addresses")?;
    let region = allocate(cluster, &plan.common.node, len)?;
    let mut stream = RequestStream {
        queue: cluster.create_queue(plan.depth, usize::try_from(len)?)?,
        region,
        operation,
        size: usize::try_from(size)?,
    };
    stream.prepare()?;
    stream.run((plan.iterations / 10).min(1000) + u64::from(plan.depth))?;
    let before = stream.queue.system_calls();
    let time = stream.run(plan.iterations)?;
    let system_calls = stream.queue.system_calls() - before;
    stream.verify()?;
    Ok(RateRow {
        operation,
        size,
        depth: plan.depth,
        iterations: plan.iterations,
        operations_per_second: plan.iterations as f64 / time.as_secs_f64(),
        system_calls_per_op: system_calls as f64 / plan.iterations as f64,
    })
}

/// Operations that go on without pause, each in a part of the region and of the memory of its own.
struct RequestStream {
    queue: IoQueue,
    region: Region,
    operation: Operation,
    size: usize,
}

impl RequestStream {
    /// What part `slot` of the side holds that the bytes come from.
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
                "wrong bytes after the last {name}: the times are void"
            );
        }
        Ok(())
    }

    /// Does `count` operations, as many at a time as the queue takes.
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
