// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `locks`: locks and barriers of a region, taken by many threads, processes and nodes at once, such that
//! a lock that two have, or a barrier that is passed too early, shows.

use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::time::Duration;

use anyhow::{ensure, Result};
use clap::{Args, Subcommand};
use kite::{Cluster, Error, LockGuard, Region, Rights};

use crate::support::signals;
use crate::support::threads::run_threads;

/// Nothing here is about time, and machines may be slow.
const PATIENCE_S: u64 = 120;

/// Locks and barriers of a region
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Locks {
    /// Adds 1 to the first word under a lock, but not atomically; each fourth time looks at it, shared
    Count(Crowd),
    /// Adds 1 to the first word before a barrier, and looks at it after it
    Pass(Crowd),
    /// Takes a lock, until SIGTERM comes
    Hold(Hold),
    /// Comes to a barrier, and prints the generation
    Come(Come),
    /// Takes locks until there is no room for more
    Hoard {
        /// A region that exists
        name: String,
    },
}

/// Threads, operations and region.
#[derive(Args, Clone, Debug)]
pub(crate) struct Crowd {
    /// A region that exists
    name: String,
    /// Number of the lock or barrier
    #[arg(long, default_value_t = 0)]
    number: u64,
    /// Threads
    #[arg(long, default_value_t = 4)]
    threads: u64,
    /// Operations of each
    #[arg(long, default_value_t = 100)]
    operations: u64,
    /// Threads of all processes, for a barrier
    #[arg(long, default_value_t = 1)]
    all: u32,
}

/// Which lock, and how.
#[derive(Args, Clone, Debug)]
pub(crate) struct Hold {
    /// A region that exists
    name: String,
    /// Number of the lock
    number: u64,
    /// Shares it
    #[arg(long)]
    shared: bool,
    /// Does not wait
    #[arg(long = "try")]
    tries: bool,
    /// Deadline
    #[arg(long, default_value_t = PATIENCE_S)]
    seconds: u64,
}

/// Which barrier, and how.
#[derive(Args, Clone, Debug)]
pub(crate) struct Come {
    /// A region that exists
    name: String,
    /// Number of the barrier
    number: u64,
    /// Participants
    count: u32,
    /// Comes again and again, so many times, and is sent away by signals
    #[arg(long)]
    again: Option<u32>,
    /// Deadline
    #[arg(long, default_value_t = PATIENCE_S)]
    seconds: u64,
}

fn map(name: &str, rights: Rights, seconds: u64) -> Result<Region> {
    let region = Cluster::open()?.map(name, rights)?;
    Ok(region.with_timeout(Duration::from_secs(seconds)))
}

fn word(region: &Region) -> Result<u64> {
    let mut bytes = [0; 8];
    region.read_at(&mut bytes, 0)?;
    Ok(u64::from_ne_bytes(bytes))
}

impl Locks {
    /// Does it.
    pub(crate) fn run(&self) -> Result<()> {
        match self {
            Locks::Count(crowd) => crowd.count(),
            Locks::Pass(crowd) => crowd.pass(),
            Locks::Hold(hold) => hold.run(),
            Locks::Come(come) => come.run(),
            Locks::Hoard { name } => hoard(name),
        }
    }
}

impl Crowd {
    fn map(&self) -> Result<Region> {
        map(&self.name, Rights::READ | Rights::WRITE, PATIENCE_S)
    }

    fn count(&self) -> Result<()> {
        let region = self.map()?;
        run_threads(self.threads, self.operations, |_, i| {
            if i % 4 == 3 {
                let lock = region.lock_shared(self.number)?;
                ensure!(word(&region)? == word(&region)?, "written meanwhile");
                return Ok(lock.unlock()?);
            }
            let lock = region.lock(self.number)?;
            ensure!(!lock.owner_died(), "owner_died although no process died");
            let count = word(&region)?;
            region.write_at(&(count + 1).to_ne_bytes(), 0)?;
            Ok(lock.unlock()?)
        })
    }

    fn pass(&self) -> Result<()> {
        let region = self.map()?;
        run_threads(self.threads, self.operations, |_, i| {
            region.fetch_add(0, 1)?;
            let generation = region.barrier(self.number, self.all)?;
            ensure!(generation == i + 1, "generation {generation} after {i}");
            let all = u64::from(self.all);
            let count = word(&region)?;
            let possible = generation * all..=(generation + 1) * all;
            ensure!(possible.contains(&count), "{count} of {possible:?}");
            Ok(())
        })
    }
}

impl Hold {
    fn run(&self) -> Result<()> {
        let rights = if self.shared {
            Rights::READ
        } else {
            Rights::WRITE
        };
        let region = map(&self.name, rights, self.seconds)?;
        let end = End::block()?;
        println!("mapped");
        let lock = self.take(&region)?;
        println!("held{}", if lock.owner_died() { ", warned" } else { "" });
        end.wait();
        lock.unlock()?;
        println!("unlocked");
        Ok(())
    }

    fn take(&self, region: &Region) -> kite::Result<LockGuard> {
        match (self.shared, self.tries) {
            (false, false) => region.lock(self.number),
            (false, true) => region.try_lock(self.number),
            (true, false) => region.lock_shared(self.number),
            (true, true) => region.try_lock_shared(self.number),
        }
    }
}

impl Come {
    fn run(&self) -> Result<()> {
        let region = map(&self.name, Rights::WRITE, self.seconds)?;
        println!("mapped");
        let Some(times) = self.again else {
            println!("{}", region.barrier(self.number, self.count)?);
            return Ok(());
        };
        signals::start_timer(Duration::from_millis(7))?;
        for _ in 0..times {
            let came = region.barrier(self.number, self.count);
            ensure!(came == Err(Error::Interrupted), "{came:?}");
        }
        Ok(())
    }
}

fn hoard(name: &str) -> Result<()> {
    let region = map(name, Rights::WRITE, PATIENCE_S)?;
    let mut locks = Vec::new();
    let refused = loop {
        match region.lock(locks.len() as u64) {
            Ok(lock) => locks.push(lock),
            Err(error) => break error,
        }
    };
    ensure!(refused == Error::OutOfMemory, "{refused}");
    // One that is given back makes room for another.
    locks.pop();
    locks.push(region.lock(u64::MAX)?);
    println!("{}", locks.len());
    // The kernel gives them back.
    std::mem::forget(locks);
    Ok(())
}

/// SIGTERM, which is waited for and does nothing else.
pub(crate) struct End(libc::sigset_t);

impl End {
    pub(crate) fn block() -> Result<Self> {
        // SAFETY: an empty set is made of whatever it was, and all are borrowed for the calls.
        let (set, blocked) = unsafe {
            let mut set: libc::sigset_t = MaybeUninit::zeroed().assume_init();
            libc::sigemptyset(&mut set);
            libc::sigaddset(&mut set, libc::SIGTERM);
            (set, libc::sigprocmask(libc::SIG_BLOCK, &set, null_mut()))
        };
        ensure!(blocked == 0, "sigprocmask");
        Ok(Self(set))
    }

    pub(crate) fn wait(&self) {
        let mut signal = 0;
        // SAFETY: both are borrowed for the call.
        unsafe { libc::sigwait(&self.0, &mut signal) };
    }
}
