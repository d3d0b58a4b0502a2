// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `fuzz`: random requests by several threads that share sessions. No request may harm the kernel. Results are only
//! counted: the test checks the state that remains.
//!
//! # Operation
//!
//! A seed repeats the requests of each thread. An [`RequestFuzzer`] makes the requests of one thread: random words, or
//! structures with mostly valid fields. Pointers lead to a [`scratch`] mapping or to unmapped memory, never to memory
//! of this program, since requests write there. The program runs as an ordinary user: requests of the daemon must
//! fail. Lengths of regions are short, or larger than the memory of all nodes.

mod fuzzer;
mod plausible;
mod scratch;

use std::sync::Mutex;
use std::time::Instant;

use anyhow::{bail, ensure, Result};
use clap::Args;

use crate::support::abi::*;
use fuzzer::RequestFuzzer;

/// Makes random requests.
#[derive(Args, Clone, Debug)]
pub(crate) struct Fuzz {
    /// Requests of all threads together
    #[arg(long, default_value_t = 200_000)]
    requests: u64,
    /// Threads
    #[arg(long, default_value_t = 4)]
    threads: u64,
    /// Seed of all random numbers
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Does not free the named regions
    #[arg(long)]
    no_sweep: bool,
}

impl Fuzz {
    /// Makes the requests, and prints the number of each errno.
    pub(crate) fn run(&self) -> Result<()> {
        println!("seed {}", self.seed);
        let start = Instant::now();
        let shared = [
            Device::open_bound()?,
            Device::open_bound()?,
            Device::open()?,
        ];
        let outcomes = Mutex::new(vec![0_u64; 134]);
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..self.threads)
                .map(|thread| {
                    let (shared, outcomes) = (&shared, &outcomes);
                    scope.spawn(move || self.run_thread(thread, shared, outcomes))
                })
                .collect();
            threads
                .into_iter()
                .try_for_each(|thread| thread.join().unwrap_or_else(|_| bail!("a thread panicked")))
        })?;
        drop(shared);
        if !self.no_sweep {
            free_all_regions()?;
        }
        let mut total = 0;
        for (errno, count) in outcomes.into_inner()?.into_iter().enumerate() {
            if count != 0 {
                println!("{:8} {}", count, symbol(errno as Errno));
            }
            total += count;
        }
        println!("{total} requests in {:.1} s", start.elapsed().as_secs_f32());
        ensure!(total >= self.requests, "too few requests");
        Ok(())
    }

    fn run_thread(&self, thread: u64, shared: &[Device], outcomes: &Mutex<Vec<u64>>) -> Result<()> {
        let mut fuzzer = RequestFuzzer::new(self.seed, thread)?;
        let mut own = Device::open()?;
        for done in 0..self.requests.div_ceil(self.threads) {
            if done == 500 && thread == 0 {
                println!("2000 requests or so");
            }
            if fuzzer.random.below(2000) == 0 {
                own = Device::open()?;
            }
            fuzzer.session = fuzzer.random.below(4) as usize;
            let device = match fuzzer.session {
                0 => &own,
                n => &shared[n - 1],
            };
            let errno = fuzzer.make_request(device) as usize;
            let mut outcomes = outcomes.lock().unwrap_or_else(|e| e.into_inner());
            let last = outcomes.len() - 1;
            outcomes[errno.min(last)] += 1;
        }
        Ok(())
    }
}

/// Frees the named regions of all nodes, which may have any bytes as names.
fn free_all_regions() -> Result<()> {
    let device = Device::open_bound()?;
    for node in kite::Cluster::open()?.view()?.members {
        let mut entry = kite_region_entry::default();
        let mut list = kite_list_regions {
            node: node.node,
            count: 1,
            ..Default::default()
        };
        loop {
            list.entries = &raw mut entry as u64;
            list.count = 1;
            let errno = device.ioctl(KITE_IOC_LIST_REGIONS_NR, &mut list);
            ensure!(errno == 0, "cannot list regions: {}", symbol(errno));
            if list.count == 0 {
                break;
            }
            let mut map = kite_map {
                name: entry.name,
                rights: KITE_MASTER,
                ..Default::default()
            };
            let errno = device.ioctl(KITE_IOC_MAP_NR, &mut map);
            ensure!(errno == 0, "cannot map a listed region: {}", symbol(errno));
            let mut handle = kite_handle { handle: map.handle };
            let errno = device.ioctl(KITE_IOC_FREE_NR, &mut handle);
            ensure!(errno == 0, "cannot free a listed region: {}", symbol(errno));
        }
    }
    Ok(())
}
