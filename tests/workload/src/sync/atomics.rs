// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `atomics`: concurrent atomic operations on a region by threads, processes and nodes, whose results reveal lost or
//! duplicated operations.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{ensure, Result};
use clap::{Args, Subcommand};
use kite::{Cluster, Region, Rights};

use crate::support::threads::run_threads;

/// Generous timeout, since machines may be slow.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Atomic operations on a word of a region
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Atomics {
    /// Increments the word repeatedly, and prints the sum of the previous values
    FetchAdd(AtomicThreads),
    /// Acquires a spin lock (a word that is 1 while it is owned) to add 1 to the next word non-atomically
    SpinLock(AtomicThreads),
    /// Prints the value of the word
    Word(WordLocation),
}

/// Region and offset of a word.
#[derive(Args, Clone, Debug)]
pub(crate) struct WordLocation {
    /// Existing region
    name: String,
    /// Offset in the region
    offset: u64,
}

/// Threads, operations and word.
#[derive(Args, Clone, Debug)]
pub(crate) struct AtomicThreads {
    #[command(flatten)]
    location: WordLocation,
    /// Threads
    #[arg(long, default_value_t = 4)]
    threads: u64,
    /// Operations of each thread
    #[arg(long, default_value_t = 100)]
    operations: u64,
}

impl WordLocation {
    fn map(&self) -> Result<Region> {
        let region = Cluster::open()?.map(&self.name, Rights::READ | Rights::WRITE)?;
        Ok(region.with_timeout(TIMEOUT))
    }
}

impl Atomics {
    /// Runs the subcommand.
    pub(crate) fn run(&self) -> Result<()> {
        match self {
            Atomics::FetchAdd(args) => println!("{}", args.run_fetch_add()?),
            Atomics::SpinLock(args) => args.run_spin_lock()?,
            Atomics::Word(location) => {
                println!("{}", load_word(&location.map()?, location.offset)?)
            }
        }
        Ok(())
    }
}

impl AtomicThreads {
    fn run_fetch_add(&self) -> Result<u64> {
        let (region, sum) = (self.location.map()?, AtomicU64::new(0));
        run_threads(self.threads, self.operations, |_, _| {
            let before = region.fetch_add(self.location.offset, 1)?;
            sum.fetch_add(before, Ordering::Relaxed);
            Ok(())
        })?;
        Ok(sum.into_inner())
    }

    fn run_spin_lock(&self) -> Result<()> {
        let region = self.location.map()?;
        run_threads(self.threads, self.operations, |_, _| {
            self.increment_locked(&region)
        })
    }

    fn increment_locked(&self, region: &Region) -> Result<()> {
        let (lock, counter) = (self.location.offset, self.location.offset + 8);
        while !region.test_and_set(lock)? {
            std::thread::yield_now();
        }
        let count = load_word(region, counter)?;
        region.write_at(&(count + 1).to_ne_bytes(), counter)?;
        ensure!(
            region.swap(lock, 0)? == 1,
            "the spin lock was released by another thread"
        );
        Ok(())
    }
}

fn load_word(region: &Region, offset: u64) -> Result<u64> {
    let mut bytes = [0; 8];
    region.read_at(&mut bytes, offset)?;
    Ok(u64::from_ne_bytes(bytes))
}
