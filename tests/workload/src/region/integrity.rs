// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `integrity`: random reads and writes of one region by many threads, processes and nodes, each
//! byte checked against a model.
//!
//! The region is divided into units, which are assigned to the writers round-robin. The size of a unit is odd and
//! nearly that of a chunk, so most units span two chunks, and two nodes if the region is striped. Neighbours share
//! pages and cache lines. A writer writes its own units only, so it can verify every byte of them.

use std::process::{Child, Command};
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use clap::Args;
use kite::{Cluster, Priority, Region, Rights};

use crate::support::random::Random;

/// Generous timeout, since machines may be slow.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Random reads and writes against a model.
#[derive(Args, Clone, Debug)]
pub(crate) struct Integrity {
    /// Name of an existing region
    name: String,
    /// Writers in the whole cluster
    #[arg(long, default_value_t = 4)]
    writers: u64,
    /// First writer of this process
    #[arg(long, default_value_t = 0)]
    first: u64,
    /// Processes to start
    #[arg(long, default_value_t = 1)]
    processes: u64,
    /// Threads, each a writer, in each process
    #[arg(long, default_value_t = 4)]
    threads: u64,
    /// Bytes of a unit
    #[arg(long, default_value_t = 3_000_017)]
    unit: u64,
    /// Maximum duration in seconds
    #[arg(long, default_value_t = 600)]
    seconds: u64,
    /// Operations of each writer
    #[arg(long, default_value_t = u64::MAX)]
    operations: u64,
    /// Seed of all random numbers
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Uses low priority, in one process
    #[arg(long, conflicts_with = "processes")]
    low: bool,
}

impl Integrity {
    /// Runs the writers of this process and its children.
    pub(crate) fn run(&self) -> Result<()> {
        if self.processes <= 1 {
            return self.run_threads();
        }
        let children = (0..self.processes)
            .map(|process| self.spawn(process))
            .collect::<Result<Vec<_>>>()?;
        let mut failed = 0;
        for mut child in children {
            failed += u32::from(!child.wait()?.success());
        }
        ensure!(failed == 0, "{failed} processes failed");
        Ok(())
    }

    fn spawn(&self, process: u64) -> Result<Child> {
        let first = self.first + process * self.threads;
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["integrity", &self.name]);
        let options = [
            ("--writers", self.writers),
            ("--first", first),
            ("--threads", self.threads),
            ("--unit", self.unit),
            ("--seconds", self.seconds),
            ("--operations", self.operations),
            ("--seed", self.seed),
        ];
        for (option, value) in options {
            command.args([option, &value.to_string()]);
        }
        command.spawn().context("cannot start a process")
    }

    fn run_threads(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        if self.low {
            cluster.set_priority(Priority::Low)?;
        }
        let region = cluster.map(&self.name, Rights::READ | Rights::WRITE)?;
        let region = region.with_timeout(TIMEOUT);
        std::thread::scope(|scope| {
            let threads: Vec<_> = (self.first..self.first + self.threads)
                .map(|writer| (writer, region.clone()))
                .map(|(writer, region)| {
                    scope.spawn(move || {
                        self.run_writer(writer, region).with_context(|| {
                            format!("writer {writer} of {}, seed {}", self.writers, self.seed)
                        })
                    })
                })
                .collect();
            let mut result = Ok(());
            for thread in threads {
                let ended = thread.join().unwrap_or_else(|_| bail!("a writer panicked"));
                if let Err(error) = ended {
                    eprintln!("integrity: {error:#}");
                    result = Err(error);
                }
            }
            result
        })
    }

    fn run_writer(&self, writer: u64, region: Region) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(self.seconds);
        let mut random = Random::new(self.seed, writer);
        let mut units = self.units(writer, &region)?;
        let mut done = 0;
        while done < self.operations && Instant::now() < deadline {
            let index = random.below(units.len() as u64) as usize;
            units[index]
                .step(&region, &mut random)
                .with_context(|| format!("operation {done}"))?;
            done += 1;
        }
        for unit in &units {
            unit.check(&region, 0, unit.model.len())
                .context("final check")?;
        }
        println!("writer {writer}: {done} operations, seed {}", self.seed);
        Ok(())
    }

    /// Returns the units of a writer with their initial content.
    fn units(&self, writer: u64, region: &Region) -> Result<Vec<Unit>> {
        let starts = (0..).map(|round| (round * self.writers + writer) * self.unit);
        let units: Vec<Unit> = starts
            .take_while(|start| *start < region.len())
            .map(|start| Unit {
                start,
                model: vec![0; self.unit.min(region.len() - start) as usize],
            })
            .collect();
        ensure!(!units.is_empty(), "region too short for this writer");
        Ok(units)
    }
}

/// A part of the region that one writer owns.
struct Unit {
    start: u64,
    model: Vec<u8>,
}

impl Unit {
    /// Writes or reads a random part.
    fn step(&mut self, region: &Region, random: &mut Random) -> Result<()> {
        let len = random.size(self.model.len() as u64) as usize;
        let at = random.below((self.model.len() - len + 1) as u64) as usize;
        match random.below(4) {
            0 => return self.check(region, at, len),
            1 => return self.step_many(region, random),
            _ => {}
        }
        let part = &mut self.model[at..at + len];
        random.fill(part);
        region
            .write_at(part, self.start + at as u64)
            .with_context(|| format!("writing {len} bytes at {}", self.start + at as u64))
    }

    /// Writes random parts with one vectored request, and reads the whole unit with another.
    fn step_many(&mut self, region: &Region, random: &mut Random) -> Result<()> {
        let count = 1 + random.below(40) as usize;
        let slot = self.model.len() / count;
        let mut segments = Vec::new();
        for (i, part) in self.model.chunks_mut(slot.max(1)).enumerate() {
            let len = random.size(part.len() as u64) as usize;
            let at = random.below((part.len() - len + 1) as u64) as usize;
            random.fill(&mut part[at..at + len]);
            let offset = self.start + (i * slot.max(1) + at) as u64;
            segments.push((offset, &part[at..at + len]));
        }
        segments.reverse();
        region
            .write_vectored_at(&segments)
            .with_context(|| format!("writing {} segments", segments.len()))?;
        let mut read: Vec<u8> = self.model.iter().map(|byte| !byte).collect();
        let mut parts: Vec<(u64, &mut [u8])> = Vec::new();
        let mut offset = self.start;
        for part in read.chunks_mut(slot.max(1)) {
            let len = part.len() as u64;
            parts.push((offset, part));
            offset += len;
        }
        region
            .read_vectored_at(&mut parts)
            .with_context(|| format!("reading {count} segments"))?;
        ensure!(read == self.model, "CORRUPT: segments differ");
        Ok(())
    }

    /// Reads a part and compares it with the model.
    fn check(&self, region: &Region, at: usize, len: usize) -> Result<()> {
        let offset = self.start + at as u64;
        // The buffer starts with wrong bytes, so that a missing read is detected.
        let model = &self.model[at..at + len];
        let mut read: Vec<u8> = model.iter().map(|byte| !byte).collect();
        region
            .read_at(&mut read, offset)
            .with_context(|| format!("reading {len} bytes at {offset}"))?;
        match read.iter().zip(model).position(|(a, b)| a != b) {
            None => Ok(()),
            Some(i) => bail!(
                "CORRUPT: byte {} of a read of {len} at {offset} is {:#04x}, expected {:#04x}; {} bytes differ",
                offset + i as u64,
                read[i],
                model[i],
                read.iter().zip(model).filter(|(a, b)| a != b).count()
            ),
        }
    }
}
