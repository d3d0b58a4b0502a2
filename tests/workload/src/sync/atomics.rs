// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `atomics`: atomic operations on a region by many threads, processes and nodes at once, such that one
//! that is lost or done twice shows.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{ensure, Result};
use clap::{Args, Subcommand};
use kite::{Cluster, Region, Rights};

use crate::support::threads::run_threads;

/// Nothing here is about time, and machines may be slow.
const PATIENCE: Duration = Duration::from_secs(120);

/// Atomic operations on a word of a region
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Atomics {
    /// Adds 1 again and again, and prints the sum of all numbers before
    Tally(Crowd),
    /// Acquires a spin lock (a word that is 1 while it is owned) to add 1 to the next word non-atomically
    TakeTurns(Crowd),
    /// Prints the number
    Word(Place),
}

/// Where a word is.
#[derive(Args, Clone, Debug)]
pub(crate) struct Place {
    /// A region that exists
    name: String,
    /// Byte in the region
    offset: u64,
}

/// Threads, operations and word.
#[derive(Args, Clone, Debug)]
pub(crate) struct Crowd {
    #[command(flatten)]
    place: Place,
    /// Threads
    #[arg(long, default_value_t = 4)]
    threads: u64,
    /// Operations of each
    #[arg(long, default_value_t = 100)]
    operations: u64,
}

impl Place {
    fn map(&self) -> Result<Region> {
        let region = Cluster::open()?.map(&self.name, Rights::READ | Rights::WRITE)?;
        Ok(region.with_timeout(PATIENCE))
    }
}

impl Atomics {
    /// Does it.
    pub(crate) fn run(&self) -> Result<()> {
        match self {
            Atomics::Tally(crowd) => println!("{}", crowd.tally()?),
            Atomics::TakeTurns(crowd) => crowd.take_turns()?,
            Atomics::Word(place) => println!("{}", word(&place.map()?, place.offset)?),
        }
        Ok(())
    }
}

impl Crowd {
    fn tally(&self) -> Result<u64> {
        let (region, sum) = (self.place.map()?, AtomicU64::new(0));
        run_threads(self.threads, self.operations, |_, _| {
            let before = region.fetch_add(self.place.offset, 1)?;
            sum.fetch_add(before, Ordering::Relaxed);
            Ok(())
        })?;
        Ok(sum.into_inner())
    }

    fn take_turns(&self) -> Result<()> {
        let region = self.place.map()?;
        run_threads(self.threads, self.operations, |_, _| {
            self.take_turn(&region)
        })
    }

    fn take_turn(&self, region: &Region) -> Result<()> {
        let (lock, counter) = (self.place.offset, self.place.offset + 8);
        while !region.test_and_set(lock)? {
            std::thread::yield_now();
        }
        let count = word(region, counter)?;
        region.write_at(&(count + 1).to_ne_bytes(), counter)?;
        ensure!(
            region.swap(lock, 0)? == 1,
            "the spin lock was released by another thread"
        );
        Ok(())
    }
}

fn word(region: &Region, offset: u64) -> Result<u64> {
    let mut bytes = [0; 8];
    region.read_at(&mut bytes, offset)?;
    Ok(u64::from_ne_bytes(bytes))
}
