// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `crowd`: how long it takes to allocate and free a region while ever more of them exist.

use std::time::{Duration, Instant};

use anyhow::{ensure, Result};
use clap::Args;
use kite::{AllocOptions, Cluster, Region};

/// Prints, for each number of regions, that number and the time in ns of an allocation and the free that
/// follows: the mean of the middle half, since it comes in steps where a free is waited for.
#[derive(Args, Clone, Debug)]
pub(crate) struct Crowd {
    /// Numbers of regions that exist, in ascending order
    #[arg(required = true)]
    counts: Vec<usize>,
    /// RNIC [default: the first]
    #[arg(long, default_value = "")]
    rnic: String,
    /// Node that lends the memory
    #[arg(long)]
    node: u32,
    /// Allocations and frees at each number
    #[arg(long, default_value_t = 400, value_parser = clap::value_parser!(u32).range(1..))]
    cycles: u32,
}

impl Crowd {
    /// Measures, and frees what it allocated.
    pub(crate) fn run(&self) -> Result<()> {
        ensure!(self.counts.is_sorted(), "the numbers have to ascend");
        let cluster = Cluster::open_rnic(&self.rnic)?;
        let mut crowd = Vec::new();
        for &count in &self.counts {
            while crowd.len() < count {
                crowd.push(self.alloc(&cluster, "crowd", crowd.len())?);
            }
            println!("{count} {}", self.typical(&cluster, count)?.as_nanos());
        }
        crowd
            .into_iter()
            .try_for_each(Region::free)
            .map_err(Into::into)
    }

    /// With a name, so that all tables grow.
    fn alloc(&self, cluster: &Cluster, prefix: &str, number: usize) -> kite::Result<Region> {
        let options = AllocOptions::new(64).nodes([self.node]);
        cluster.alloc(&options.name(format!("{prefix}-{number}")))
    }

    fn typical(&self, cluster: &Cluster, count: usize) -> Result<Duration> {
        let prefix = format!("beside-{count}");
        let mut times = Vec::new();
        for number in 0..self.cycles as usize {
            let start = Instant::now();
            self.alloc(cluster, &prefix, number)?.free()?;
            times.push(start.elapsed());
        }
        times.sort_unstable();
        let quarter = times.len() / 4;
        let middle = &times[quarter..times.len() - quarter];
        Ok(middle.iter().sum::<Duration>() / middle.len() as u32)
    }
}
