// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `locks`: concurrent use of locks and barriers of a region by threads, processes and nodes. Detects locks with two
//! owners, and barriers that open too early.

use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::time::Duration;

use anyhow::{ensure, Result};
use clap::{Args, Subcommand};
use kite::{Cluster, Error, LockGuard, Region, Rights};

use crate::support::signals;
use crate::support::threads::run_threads;

/// Generous timeout in seconds, since machines may be slow.
const TIMEOUT_S: u64 = 120;

/// Locks and barriers of a region
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Locks {
    /// Increments the first word non-atomically under a lock; each fourth operation reads the word under a shared lock
    Count(LockThreads),
    /// Increments the first word before a barrier, and checks the word after the barrier
    PassBarrier(LockThreads),
    /// Holds a lock until SIGTERM
    Hold(HoldLock),
    /// Waits at a barrier, and prints the generation
    WaitBarrier(WaitBarrier),
    /// Acquires locks up to the maximum of the region
    Exhaust {
        /// Existing region
        name: String,
    },
}

/// Threads, operations and region.
#[derive(Args, Clone, Debug)]
pub(crate) struct LockThreads {
    /// Existing region
    name: String,
    /// Number of the lock or barrier
    #[arg(long, default_value_t = 0)]
    number: u64,
    /// Threads
    #[arg(long, default_value_t = 4)]
    threads: u64,
    /// Operations of each thread
    #[arg(long, default_value_t = 100)]
    operations: u64,
    /// Participants of the barrier: threads of all processes
    #[arg(long, default_value_t = 1)]
    participants: u32,
}

/// Lock and mode.
#[derive(Args, Clone, Debug)]
pub(crate) struct HoldLock {
    /// Existing region
    name: String,
    /// Number of the lock
    number: u64,
    /// Shared mode
    #[arg(long)]
    shared: bool,
    /// Fails instead of waiting
    #[arg(long = "try")]
    try_lock: bool,
    /// Deadline in seconds
    #[arg(long, default_value_t = TIMEOUT_S)]
    seconds: u64,
}

/// Barrier and participants.
#[derive(Args, Clone, Debug)]
pub(crate) struct WaitBarrier {
    /// Existing region
    name: String,
    /// Number of the barrier
    number: u64,
    /// Participants
    count: u32,
    /// Number of waits, each interrupted by a signal
    #[arg(long)]
    interrupted: Option<u32>,
    /// Deadline in seconds
    #[arg(long, default_value_t = TIMEOUT_S)]
    seconds: u64,
}

fn map(name: &str, rights: Rights, seconds: u64) -> Result<Region> {
    let region = Cluster::open()?.map(name, rights)?;
    Ok(region.with_timeout(Duration::from_secs(seconds)))
}

fn load_word(region: &Region) -> Result<u64> {
    let mut bytes = [0; 8];
    region.read_at(&mut bytes, 0)?;
    Ok(u64::from_ne_bytes(bytes))
}

impl Locks {
    /// Runs the subcommand.
    pub(crate) fn run(&self) -> Result<()> {
        match self {
            Locks::Count(args) => args.count_locked(),
            Locks::PassBarrier(args) => args.pass_barrier(),
            Locks::Hold(hold) => hold.run(),
            Locks::WaitBarrier(wait) => wait.run(),
            Locks::Exhaust { name } => exhaust_locks(name),
        }
    }
}

impl LockThreads {
    fn map(&self) -> Result<Region> {
        map(&self.name, Rights::READ | Rights::WRITE, TIMEOUT_S)
    }

    fn count_locked(&self) -> Result<()> {
        let region = self.map()?;
        run_threads(self.threads, self.operations, |_, i| {
            if i % 4 == 3 {
                let lock = region.lock_shared(self.number)?;
                ensure!(
                    load_word(&region)? == load_word(&region)?,
                    "the word changed under a shared lock"
                );
                return Ok(lock.unlock()?);
            }
            let lock = region.lock(self.number)?;
            ensure!(!lock.owner_died(), "owner_died although no process died");
            let count = load_word(&region)?;
            region.write_at(&(count + 1).to_ne_bytes(), 0)?;
            Ok(lock.unlock()?)
        })
    }

    fn pass_barrier(&self) -> Result<()> {
        let region = self.map()?;
        run_threads(self.threads, self.operations, |_, i| {
            region.fetch_add(0, 1)?;
            let generation = region.barrier(self.number, self.participants)?;
            ensure!(generation == i + 1, "generation {generation} after {i}");
            let participants = u64::from(self.participants);
            let count = load_word(&region)?;
            let possible = generation * participants..=(generation + 1) * participants;
            ensure!(
                possible.contains(&count),
                "word is {count}, expected {possible:?}"
            );
            Ok(())
        })
    }
}

impl HoldLock {
    fn run(&self) -> Result<()> {
        let rights = if self.shared {
            Rights::READ
        } else {
            Rights::WRITE
        };
        let region = map(&self.name, rights, self.seconds)?;
        let term = TermSignal::block()?;
        println!("mapped");
        let lock = self.acquire(&region)?;
        println!(
            "held{}",
            if lock.owner_died() {
                ", owner died"
            } else {
                ""
            }
        );
        term.wait();
        lock.unlock()?;
        println!("unlocked");
        Ok(())
    }

    fn acquire(&self, region: &Region) -> kite::Result<LockGuard> {
        match (self.shared, self.try_lock) {
            (false, false) => region.lock(self.number),
            (false, true) => region.try_lock(self.number),
            (true, false) => region.lock_shared(self.number),
            (true, true) => region.try_lock_shared(self.number),
        }
    }
}

impl WaitBarrier {
    fn run(&self) -> Result<()> {
        let region = map(&self.name, Rights::WRITE, self.seconds)?;
        println!("mapped");
        let Some(times) = self.interrupted else {
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

fn exhaust_locks(name: &str) -> Result<()> {
    let region = map(name, Rights::WRITE, TIMEOUT_S)?;
    let mut locks = Vec::new();
    let refused = loop {
        match region.lock(locks.len() as u64) {
            Ok(lock) => locks.push(lock),
            Err(error) => break error,
        }
    };
    ensure!(refused == Error::OutOfMemory, "{refused}");
    // An unlock frees one slot.
    locks.pop();
    locks.push(region.lock(u64::MAX)?);
    println!("{}", locks.len());
    // The kernel releases the locks at exit.
    std::mem::forget(locks);
    Ok(())
}

/// Blocked SIGTERM, for [`Self::wait`].
pub(crate) struct TermSignal(libc::sigset_t);

impl TermSignal {
    pub(crate) fn block() -> Result<Self> {
        // SAFETY: `sigemptyset` initializes the set. All structures are borrowed for the calls.
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
