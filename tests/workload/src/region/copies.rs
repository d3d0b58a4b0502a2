// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `copies`: random fills, writes and copies of regions, compared with a model.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{bail, ensure, Result};
use clap::{Args, Subcommand};
use kite::{AllocOptions, Cluster, Region, Rights};

use crate::support::random::Random;

/// Generous timeout, since machines may be slow.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Bytes and nodes of each region: several chunks on several nodes, or on one node.
const REGIONS: [(u64, &[u32]); 4] = [
    ((9 << 20) + 12_345, &[1, 2, 3]),
    ((5 << 20) + 1, &[2]),
    (3 << 20, &[3]),
    ((4 << 20) + 4097, &[0]),
];

/// Bytes around a change that are also compared.
const MARGIN: u64 = 100;

/// Fills and copies bytes of regions
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Copies {
    /// Changes own regions at random, and compares them with a model
    Check(CopyCheck),
    /// Copies the first half of one region to the second half of another until an error
    Endless {
        /// Existing region
        from: String,
        /// Existing region of the same length, or the same region
        to: String,
    },
    /// Copies all bytes of one region to another
    Once {
        /// Existing region
        from: String,
        /// Existing region of the same length
        to: String,
    },
}

/// Operations and seed.
#[derive(Args, Clone, Debug)]
pub(crate) struct CopyCheck {
    /// Operations
    #[arg(long, default_value_t = 100)]
    operations: u64,
    /// Maximum bytes of an operation
    #[arg(long, default_value_t = 3 << 20)]
    len_max: u64,
    /// Seed of all random numbers
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Migrates the regions between nodes 1 to 3 concurrently, and prints the number of migrations first
    #[arg(long = "move")]
    moves: bool,
}

impl Copies {
    /// Runs the subcommand.
    pub(crate) fn run(&self) -> Result<()> {
        match self {
            Copies::Check(check) => check.run(),
            Copies::Endless { from, to } => copy_endlessly(from, to),
            Copies::Once { from, to } => copy_once(from, to),
        }
    }
}

/// Maps a region to read, and one to write.
fn map_regions(from: &str, to: &str) -> Result<(Region, Region)> {
    let cluster = Cluster::open()?;
    let from = cluster.map(from, Rights::READ)?.with_timeout(TIMEOUT);
    let to = cluster.map(to, Rights::WRITE)?.with_timeout(TIMEOUT);
    Ok((from, to))
}

fn copy_once(from: &str, to: &str) -> Result<()> {
    let (from, to) = map_regions(from, to)?;
    Ok(from.copy_to(0, &to, 0, from.len())?)
}

/// Migrates the regions until `done` is set. Returns the number of migrations.
fn migrate_repeatedly(regions: &[Region], seed: u64, done: &AtomicBool) -> Result<u64> {
    let (mut random, mut moves) = (Random::new(seed, 9), 0);
    while !done.load(Ordering::Relaxed) {
        let region = &regions[random.below(regions.len() as u64) as usize];
        let count = 1 + random.below(3) as usize;
        let nodes: Vec<u32> = (0..count).map(|_| 1 + random.below(3) as u32).collect();
        region.migrate_to(&nodes)?;
        moves += 1;
    }
    Ok(moves)
}

/// Region with a model of its bytes.
struct ModeledRegion {
    region: Region,
    model: Vec<u8>,
}

impl ModeledRegion {
    /// Returns a random range, often at a border of chunks or at an end.
    fn random_range(&self, random: &mut Random, len_max: u64) -> Range<u64> {
        let whole = self.region.len();
        let len = random.size(len_max.min(whole));
        let chunk = self.region.chunk_size();
        let border = random.below(whole / chunk + 1) * chunk;
        let start = match random.below(4) {
            0 => border.saturating_sub(random.below(len + 1)),
            1 => border,
            2 => whole,
            _ => random.below(whole),
        };
        let start = start.min(whole - len);
        start..start + len
    }

    /// Compares the bytes, and [`MARGIN`] bytes around them, with the model.
    fn check(&self, bytes: &Range<u64>) -> Result<()> {
        let start = bytes.start.saturating_sub(MARGIN);
        let end = (bytes.end + MARGIN).min(self.region.len());
        let mut found = vec![0; (end - start) as usize];
        self.region.read_at(&mut found, start)?;
        let model = &self.model[start as usize..end as usize];
        let wrong = found
            .iter()
            .zip(model)
            .position(|(one, other)| one != other);
        let at = wrong.map(|wrong| start + wrong as u64);
        ensure!(
            at.is_none(),
            "CORRUPT: byte {at:?} after a change of {bytes:?}"
        );
        Ok(())
    }
}

fn to_usize(bytes: &Range<u64>) -> Range<usize> {
    bytes.start as usize..bytes.end as usize
}

impl CopyCheck {
    fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        let own = cluster.view()?.local_node;
        let mut random = Random::new(self.seed, own.into());
        let mut modeled = Vec::new();
        for (len, nodes) in REGIONS {
            let options = AllocOptions::new(len).nodes(nodes.to_vec());
            modeled.push(ModeledRegion {
                region: cluster.alloc(&options)?.with_timeout(TIMEOUT),
                model: vec![0; len as usize],
            });
        }
        let done = AtomicBool::new(!self.moves);
        let regions: Vec<Region> = modeled
            .iter()
            .map(|modeled| modeled.region.clone())
            .collect();
        let (stepped, moves) = std::thread::scope(|scope| {
            let mover = scope.spawn(|| migrate_repeatedly(&regions, self.seed, &done));
            let mut steps = 0..self.operations;
            let stepped = steps.try_for_each(|_| self.step(&mut random, &mut modeled));
            done.store(true, Ordering::Relaxed);
            (stepped, mover.join())
        });
        stepped?;
        if self.moves {
            let moves = moves.unwrap_or_else(|_| bail!("the mover panicked"))?;
            println!("{moves} moves");
        }
        for modeled in &modeled {
            modeled.check(&(0..modeled.region.len()))?;
        }
        println!("{} operations", self.operations);
        Ok(())
    }

    fn step(&self, random: &mut Random, modeled: &mut [ModeledRegion]) -> Result<()> {
        let to = random.below(modeled.len() as u64) as usize;
        let target = modeled[to].random_range(random, self.len_max);
        match random.below(4) {
            0 => check_fill(random, &mut modeled[to], &target)?,
            1 => check_write(random, &mut modeled[to], &target)?,
            _ => check_copy(random, modeled, to, &target)?,
        }
        modeled[to].check(&target)
    }
}

fn check_fill(random: &mut Random, modeled: &mut ModeledRegion, bytes: &Range<u64>) -> Result<()> {
    let byte = random.next() as u8;
    let len = bytes.end - bytes.start;
    modeled.region.fill(byte, bytes.start, len)?;
    modeled.model[to_usize(bytes)].fill(byte);
    Ok(())
}

fn check_write(random: &mut Random, modeled: &mut ModeledRegion, bytes: &Range<u64>) -> Result<()> {
    let model = &mut modeled.model[to_usize(bytes)];
    random.fill(model);
    Ok(modeled.region.write_at(model, bytes.start)?)
}

/// Copies from another region or from the same region, where the ranges often overlap.
fn check_copy(
    random: &mut Random,
    modeled: &mut [ModeledRegion],
    to: usize,
    target: &Range<u64>,
) -> Result<()> {
    let any = random.below(modeled.len() as u64) as usize;
    let from = random.pick(&[to, any]);
    let source = &modeled[from];
    let len = (target.end - target.start).min(source.region.len());
    let last = source.region.len() - len;
    let near = target.start.saturating_sub(len / 2) + random.below(len + 1);
    let far = random.below(last + 1);
    let start = random.pick(&[near.min(last), far]);
    let bytes = source.model[to_usize(&(start..start + len))].to_vec();
    let target = target.start..target.start + len;
    let there = &modeled[to].region;
    source.region.copy_to(start, there, target.start, len)?;
    modeled[to].model[to_usize(&target)].copy_from_slice(&bytes);
    Ok(())
}

fn copy_endlessly(from: &str, to: &str) -> Result<()> {
    let (source, target) = map_regions(from, to)?;
    let half = source.len() / 2;
    println!("copying");
    loop {
        target.fill(1, half, half)?;
        source.copy_to(0, &target, half, half)?;
    }
}
