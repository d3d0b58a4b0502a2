// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `alloc-scaling`: time of an allocation and a free against the number of regions.

use std::time::{Duration, Instant};

use anyhow::{ensure, Result};
use clap::Args;
use kite::{AllocOptions, Cluster, Region};

/// Prints each number of regions with the time in ns of an allocation and a free
///
/// The time is the mean of the middle half, since a wait for a free lengthens some cycles in steps.
#[derive(Args, Clone, Debug)]
pub(crate) struct AllocScaling {
    /// Numbers of existing regions, in ascending order
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

impl AllocScaling {
    /// Measures, and frees all regions.
    pub(crate) fn run(&self) -> Result<()> {
        ensure!(
            self.counts.is_sorted(),
            "numbers of regions must be in ascending order"
        );
        let cluster = Cluster::open_rnic(&self.rnic)?;
        let mut regions = Vec::new();
        for &count in &self.counts {
            while regions.len() < count {
                regions.push(self.alloc(&cluster, "existing", regions.len())?);
            }
            println!(
                "{count} {}",
                self.measure_cycle(&cluster, count)?.as_nanos()
            );
        }
        regions
            .into_iter()
            .try_for_each(Region::free)
            .map_err(Into::into)
    }

    /// Allocates a region with a name, so that all tables grow.
    fn alloc(&self, cluster: &Cluster, prefix: &str, number: usize) -> kite::Result<Region> {
        let options = AllocOptions::new(64).nodes([self.node]);
        cluster.alloc(&options.name(format!("{prefix}-{number}")))
    }

    fn measure_cycle(&self, cluster: &Cluster, count: usize) -> Result<Duration> {
        let prefix = format!("cycle-{count}");
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
