// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `torture`: writes, locks and calls that continue through faults of nodes and networks, and their verification.
//!
//! One process runs on each node. All use the regions torture-1 … torture-N: the process of node N serves the region
//! with its number, and all processes write to, lock and call each region. After SIGTERM each process verifies what
//! was acknowledged, and serves until the next SIGTERM.

mod caller;
mod holder;
mod server;
mod writer;

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail, Result};
use clap::Args;
use kite::{Cluster, Error, Region, Rights};

use self::caller::Caller;
use self::holder::Holder;
use self::writer::Writer;
use crate::sync::locks::TermSignal;

/// Timeout of each request. A node is unreachable for longer.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Timeout of the repetitions of a request after all faults have ended.
const HEALED: Duration = Duration::from_secs(60);

/// Pause between two requests of a thread, so that the processors of an emulated node are not the limit.
const PACE: Duration = Duration::from_millis(100);

/// Offset from which on a region is in the memory of its second node: the maximum size of a chunk.
const SECOND_NODE: u64 = 4 << 20;

/// Writes to, locks and calls the regions torture-1 … torture-N until SIGTERM, and verifies them
///
/// Prints "hold REGION FIRST LAST" for each time that a lock was held, with the numbers of its first and last event in
/// the region, then "verified WRITES HOLDS CALLS", the requests that were acknowledged.
#[derive(Args, Clone, Debug)]
pub(crate) struct Torture {
    /// Number of this node
    node: u64,
    /// Number of nodes and regions
    #[arg(long, default_value_t = 3)]
    nodes: u64,
}

impl Torture {
    /// Runs until the second SIGTERM.
    pub(crate) fn run(&self) -> Result<()> {
        let term = TermSignal::block()?;
        let cluster = Cluster::open()?;
        let regions = self.map_regions(&cluster)?;
        let service = server::start(&regions[self.node as usize - 1])?;
        std::thread::scope(|scope| {
            scope.spawn(|| exit_on_error(server::serve(&service)));
            // The server does not end, so an error must end the process.
            exit_on_error(self.run_workers(&cluster, &regions, &term));
            std::process::exit(0)
        })
    }

    fn run_workers(&self, cluster: &Cluster, regions: &[Region], term: &TermSignal) -> Result<()> {
        regions[0].barrier(0, self.nodes as u32)?;
        println!("running");
        let counts = self.run_until(cluster, regions, term)?;
        println!("verified {} {} {}", counts[0], counts[1], counts[2]);
        term.wait();
        Ok(())
    }

    fn map_regions(&self, cluster: &Cluster) -> Result<Vec<Region>> {
        let rights = Rights::READ | Rights::WRITE | Rights::MASTER;
        let regions = (1..=self.nodes).map(|i| Ok(cluster.map(&format!("torture-{i}"), rights)?));
        regions.collect()
    }

    /// Runs three threads on each region until `term`. Returns the numbers of acknowledged writes, holds and calls.
    fn run_until(
        &self,
        cluster: &Cluster,
        regions: &[Region],
        term: &TermSignal,
    ) -> Result<[u64; 3]> {
        let stopped = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let start = |(number, region): (usize, &Region)| {
                let region = region.clone().with_timeout(TIMEOUT);
                let holder = Holder::new(cluster.clone(), region.clone(), number);
                [
                    spawn(scope, Writer::new(region.clone(), self.node), &stopped),
                    spawn(scope, holder, &stopped),
                    spawn(scope, Caller::new(region), &stopped),
                ]
            };
            let threads: Vec<_> = (1..).zip(regions).map(start).collect();
            term.wait();
            stopped.store(true, Ordering::Relaxed);
            let mut counts = [0; 3];
            for (count, thread) in threads.into_iter().flat_map(|t| t.into_iter().enumerate()) {
                counts[count] += thread.join().map_err(|_| anyhow!("a thread panicked"))??;
            }
            Ok(counts)
        })
    }
}

/// Requests of one kind to one region.
trait Worker {
    /// Pause after each request.
    const PACE: Duration = PACE;

    /// Makes one request. Errors that faults cause are no failure.
    fn step(&mut self) -> Result<()>;

    /// Verifies the requests after all faults have ended. Returns the number of acknowledged ones.
    fn verify(&mut self) -> Result<u64>;
}

fn spawn<'scope, W: Worker + Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    mut worker: W,
    stopped: &'scope AtomicBool,
) -> ScopedJoinHandle<'scope, Result<u64>> {
    scope.spawn(move || {
        while !stopped.load(Ordering::Relaxed) {
            worker.step()?;
            std::thread::sleep(W::PACE);
        }
        worker.verify()
    })
}

/// Returns the result of a request, or `None` after an error that faults cause.
fn unless_fault<T>(result: kite::Result<T>) -> Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(Error::HostDown | Error::TimedOut) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Repeats a request until it succeeds, after all faults have ended.
fn until_healed<T>(mut request: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let start = Instant::now();
    loop {
        if let Some(value) = request()? {
            return Ok(value);
        }
        if start.elapsed() > HEALED {
            bail!("requests fail {HEALED:?} after the last fault");
        }
        std::thread::sleep(PACE);
    }
}

fn exit_on_error(result: Result<()>) {
    if let Err(error) = result {
        eprintln!("kite-workload: {error:#}");
        std::process::exit(1);
    }
}
