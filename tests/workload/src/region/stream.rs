// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `stream`: writes to a region until the process is killed, and prints the bytes of each 250 ms.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::Args;
use kite::{Cluster, Priority, Rights};

/// Time between two lines.
const INTERVAL: Duration = Duration::from_millis(250);

/// Writes until the process is killed, and prints an interval in ms and its bytes four times per second
#[derive(Args, Clone, Debug)]
pub(crate) struct WriteStream {
    /// Existing region
    name: String,
    /// Bytes of each write
    #[arg(long, default_value_t = 65_536)]
    size: usize,
    /// Threads
    #[arg(long, default_value_t = 4)]
    threads: u64,
    /// Uses low priority
    #[arg(long)]
    low: bool,
}

impl WriteStream {
    /// Runs the writers.
    pub(crate) fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        if self.low {
            cluster.set_priority(Priority::Low)?;
        }
        let region = cluster.map(&self.name, Rights::WRITE)?;
        let (bytes, data) = (AtomicU64::new(0), vec![7; self.size]);
        thread::scope(|scope| {
            for thread in 0..self.threads {
                let (region, bytes, data) = (region.clone(), &bytes, &data);
                scope.spawn(move || loop {
                    if let Err(error) = region.write_at(data, thread * self.size as u64) {
                        eprintln!("stream: {error}");
                        std::process::exit(1);
                    }
                    bytes.fetch_add(self.size as u64, Ordering::Relaxed);
                });
            }
            loop {
                let start = Instant::now();
                thread::sleep(INTERVAL);
                let written = bytes.swap(0, Ordering::Relaxed);
                println!("{} {written}", start.elapsed().as_millis());
            }
        })
    }
}
