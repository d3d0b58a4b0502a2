// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `transfer`: transfers in a loop until the process is killed, for tests of faults. `watch`: waits for the event that
//! a region was freed.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Result};
use clap::Args;
use kite::{Cluster, Event, Region, Rights};

use crate::support::abi::symbol;

/// Transfers in a loop, and prints "ops N" five times per second.
///
/// At an error prints "error ERRNO after N ms", the duration of the failed transfer, and stops. With --persist
/// continues, and prints "recovered" at the next success.
#[derive(Args, Clone, Debug)]
pub(crate) struct Transfer {
    /// Existing region
    name: String,
    /// Bytes of each transfer
    #[arg(long, default_value_t = 262_144)]
    size: usize,
    /// Threads
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Reads only
    #[arg(long)]
    read_only: bool,
    /// Deadline of each transfer
    #[arg(long, default_value_t = 10_000)]
    timeout_ms: u64,
    /// Continues after errors
    #[arg(long)]
    persist: bool,
}

impl Transfer {
    /// Transfers until killed, or until all threads had an error.
    pub(crate) fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        let rights = match self.read_only {
            true => Rights::READ,
            false => Rights::READ | Rights::WRITE,
        };
        let region = cluster.map(&self.name, rights)?;
        let region = region.with_timeout(Duration::from_millis(self.timeout_ms));
        println!("holding {}", region.id());
        let operations = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for thread in 0..self.threads {
                let (region, operations) = (region.clone(), &operations);
                scope.spawn(move || self.run_thread(thread, &region, operations));
            }
        });
        println!("ended {}", operations.load(Ordering::Relaxed));
        Ok(())
    }

    fn run_thread(&self, thread: usize, region: &Region, operations: &AtomicU64) {
        let mut bytes = vec![thread as u8; self.size.min(region.len() as usize)];
        let room = region.len() - bytes.len() as u64 + 1;
        let (mut printed, mut offset, mut failing) = (Instant::now(), thread as u64 * 4097, false);
        loop {
            let start = Instant::now();
            offset = (offset + 1_000_003) % room;
            match self.transfer(region, &mut bytes, offset) {
                Ok(()) => {
                    let count = operations.fetch_add(1, Ordering::Relaxed) + 1;
                    if std::mem::take(&mut failing) {
                        println!("recovered {thread}");
                    }
                    if printed.elapsed() > Duration::from_millis(200) {
                        println!("ops {count}");
                        printed = Instant::now();
                    }
                }
                Err(error) => {
                    if !failing {
                        let ms = start.elapsed().as_millis();
                        println!("error {} after {ms} ms", symbol(error.errno()));
                    }
                    failing = true;
                    if !self.persist {
                        return;
                    }
                    std::thread::sleep(Duration::from_millis(20));
                }
            }
        }
    }

    fn transfer(&self, region: &Region, bytes: &mut [u8], offset: u64) -> kite::Result<()> {
        if !self.read_only {
            region.write_at(bytes, offset)?;
        }
        region.read_at(bytes, offset)
    }
}

/// Maps a region twice, and waits by poll until both handles are stale.
#[derive(Args, Clone, Debug)]
pub(crate) struct Watch {
    /// The region
    name: String,
    /// Expected errno of reads after the event
    #[arg(long, default_value = "ESTALE")]
    expect: String,
    /// Maximum wait
    #[arg(long, default_value_t = 60)]
    seconds: u64,
}

impl Watch {
    /// Checks the events, and the errno of reads after them.
    pub(crate) fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        let regions = [
            cluster.map(&self.name, Rights::READ)?,
            cluster.map(&self.name, Rights::READ)?,
        ];
        ensure!(!readable(&cluster, 0)?, "readable without an event");
        ensure!(
            cluster.next_event()?.is_none(),
            "unexpected event before the free"
        );
        println!("watching");
        let mut stale = [self.next_event(&cluster)?, self.next_event(&cluster)?];
        stale.sort_unstable();
        let mut ids = [regions[0].id(), regions[1].id()];
        ids.sort_unstable();
        ensure!(
            stale == ids,
            "events of the handles {stale:?}, expected {ids:?}"
        );
        ensure!(cluster.next_event()?.is_none(), "unexpected third event");
        ensure!(!readable(&cluster, 0)?, "readable after the last event");
        for region in &regions {
            let read = region.read_at(&mut [0], 0).map_err(|e| symbol(e.errno()));
            ensure!(
                read.as_ref().err() == Some(&self.expect),
                "read of a stale region: {read:?}"
            );
        }
        println!("stale");
        Ok(())
    }

    fn next_event(&self, cluster: &Cluster) -> Result<u64> {
        let ms = i32::try_from(self.seconds * 1000)?;
        ensure!(readable(cluster, ms)?, "no event in {} s", self.seconds);
        match cluster.next_event()? {
            Some(Event::Stale(id)) => Ok(id),
            other => bail!("readable, but the event is {other:?}"),
        }
    }
}

fn readable(cluster: &Cluster, timeout_ms: i32) -> Result<bool> {
    let mut poll = libc::pollfd {
        fd: cluster.as_fd().as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one descriptor, borrowed for the call.
    let count = unsafe { libc::poll(&mut poll, 1, timeout_ms) };
    ensure!(count >= 0, "poll: {}", std::io::Error::last_os_error());
    Ok(count == 1 && poll.revents & libc::POLLIN != 0)
}
