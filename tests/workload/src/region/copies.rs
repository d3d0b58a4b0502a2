// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `copies`: sets and copies bytes of regions at random, and does the same to a model of them.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{bail, ensure, Result};
use clap::{Args, Subcommand};
use kite::{AllocOptions, Cluster, Region, Rights};

use crate::support::random::Random;

/// Nothing here is about time, and machines may be slow.
const PATIENCE: Duration = Duration::from_secs(120);

/// Bytes of the regions, and the nodes of each: several chunks on several nodes, or one.
const REGIONS: [(u64, &[u32]); 4] = [
    ((9 << 20) + 12_345, &[1, 2, 3]),
    ((5 << 20) + 1, &[2]),
    (3 << 20, &[3]),
    ((4 << 20) + 4097, &[0]),
];

/// Bytes around a change that are looked at too.
const MARGIN: u64 = 100;

/// Sets and copies bytes of regions
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Copies {
    /// At random, in regions of its own and in a model of them, which have to agree
    Check(Check),
    /// From the first half of one region to the second of another until that fails
    Endless {
        /// A region that exists
        from: String,
        /// Another of the same length, or the same
        to: String,
    },
    /// All of one region to another
    Once {
        /// A region that exists
        from: String,
        /// Another of the same length
        to: String,
    },
}

/// Operations and seed.
#[derive(Args, Clone, Debug)]
pub(crate) struct Check {
    /// Operations
    #[arg(long, default_value_t = 100)]
    operations: u64,
    /// Bytes of each, at most
    #[arg(long, default_value_t = 3 << 20)]
    most: u64,
    /// Seed of all random numbers
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Meanwhile the regions move to and fro between nodes 1 to 3; prints how often first
    #[arg(long = "move")]
    moves: bool,
}

impl Copies {
    /// Does it.
    pub(crate) fn run(&self) -> Result<()> {
        match self {
            Copies::Check(check) => check.run(),
            Copies::Endless { from, to } => endless(from, to),
            Copies::Once { from, to } => once(from, to),
        }
    }
}

/// A region to read, and one to write.
fn pair(from: &str, to: &str) -> Result<(Region, Region)> {
    let cluster = Cluster::open()?;
    let from = cluster.map(from, Rights::READ)?.with_timeout(PATIENCE);
    let to = cluster.map(to, Rights::WRITE)?.with_timeout(PATIENCE);
    Ok((from, to))
}

fn once(from: &str, to: &str) -> Result<()> {
    let (from, to) = pair(from, to)?;
    Ok(from.copy_to(0, &to, 0, from.len())?)
}

/// Moves the regions to and fro until all is done; returns how often.
fn roam(regions: &[Region], seed: u64, done: &AtomicBool) -> Result<u64> {
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

/// A region, and what is in it.
struct Twin {
    region: Region,
    model: Vec<u8>,
}

impl Twin {
    /// Some bytes, often beside a border of chunks or an end.
    fn some(&self, random: &mut Random, most: u64) -> Range<u64> {
        let whole = self.region.len();
        let len = random.size(most.min(whole));
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

    /// Looks at bytes and what is around them.
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
        ensure!(at.is_none(), "byte {at:?} is wrong after {bytes:?}");
        Ok(())
    }
}

fn range(bytes: &Range<u64>) -> Range<usize> {
    bytes.start as usize..bytes.end as usize
}

impl Check {
    fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        let own = cluster.view()?.local_node;
        let mut random = Random::new(self.seed, own.into());
        let mut twins = Vec::new();
        for (len, nodes) in REGIONS {
            let options = AllocOptions::new(len).nodes(nodes.to_vec());
            twins.push(Twin {
                region: cluster.alloc(&options)?.with_timeout(PATIENCE),
                model: vec![0; len as usize],
            });
        }
        let done = AtomicBool::new(!self.moves);
        let regions: Vec<Region> = twins.iter().map(|twin| twin.region.clone()).collect();
        let (stepped, moves) = std::thread::scope(|scope| {
            let mover = scope.spawn(|| roam(&regions, self.seed, &done));
            let mut steps = 0..self.operations;
            let stepped = steps.try_for_each(|_| self.step(&mut random, &mut twins));
            done.store(true, Ordering::Relaxed);
            (stepped, mover.join())
        });
        stepped?;
        if self.moves {
            let moves = moves.unwrap_or_else(|_| bail!("the mover panicked"))?;
            println!("{moves} moves");
        }
        for twin in &twins {
            twin.check(&(0..twin.region.len()))?;
        }
        println!("{} operations", self.operations);
        Ok(())
    }

    fn step(&self, random: &mut Random, twins: &mut [Twin]) -> Result<()> {
        let to = random.below(twins.len() as u64) as usize;
        let target = twins[to].some(random, self.most);
        match random.below(4) {
            0 => fill(random, &mut twins[to], &target)?,
            1 => write(random, &mut twins[to], &target)?,
            _ => copy(random, twins, to, &target)?,
        }
        twins[to].check(&target)
    }
}

fn fill(random: &mut Random, twin: &mut Twin, bytes: &Range<u64>) -> Result<()> {
    let byte = random.next() as u8;
    let len = bytes.end - bytes.start;
    twin.region.fill(byte, bytes.start, len)?;
    twin.model[range(bytes)].fill(byte);
    Ok(())
}

fn write(random: &mut Random, twin: &mut Twin, bytes: &Range<u64>) -> Result<()> {
    let model = &mut twin.model[range(bytes)];
    random.fill(model);
    Ok(twin.region.write_at(model, bytes.start)?)
}

/// From another region, or the same: then more often than not the two overlap.
fn copy(random: &mut Random, twins: &mut [Twin], to: usize, target: &Range<u64>) -> Result<()> {
    let any = random.below(twins.len() as u64) as usize;
    let from = random.pick(&[to, any]);
    let source = &twins[from];
    let len = (target.end - target.start).min(source.region.len());
    let last = source.region.len() - len;
    let near = target.start.saturating_sub(len / 2) + random.below(len + 1);
    let far = random.below(last + 1);
    let start = random.pick(&[near.min(last), far]);
    let bytes = source.model[range(&(start..start + len))].to_vec();
    let target = target.start..target.start + len;
    let there = &twins[to].region;
    source.region.copy_to(start, there, target.start, len)?;
    twins[to].model[range(&target)].copy_from_slice(&bytes);
    Ok(())
}

fn endless(from: &str, to: &str) -> Result<()> {
    let (source, target) = pair(from, to)?;
    let half = source.len() / 2;
    println!("copying");
    loop {
        target.fill(1, half, half)?;
        source.copy_to(0, &target, half, half)?;
    }
}
