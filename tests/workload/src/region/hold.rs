// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `hold`: transfers in a loop until it is killed, for tests that cause faults meanwhile. `watch`: waits for the event
//! that a region was freed.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Result};
use clap::Args;
use kite::{Cluster, Event, Region, Rights};

use crate::support::abi::symbol;

/// Transfers in a loop, printing "ops N" a few times a second.
///
/// An error prints "error ERRNO after N ms", the time since the last success began; then it ends,
/// or with --persist goes on and prints "recovered" at the next success.
#[derive(Args, Clone, Debug)]
pub(crate) struct Hold {
    /// A region that exists
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
    /// Goes on after errors
    #[arg(long)]
    persist: bool,
}

impl Hold {
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
                scope.spawn(move || self.transfer(thread, &region, operations));
            }
        });
        println!("ended {}", operations.load(Ordering::Relaxed));
        Ok(())
    }

    fn transfer(&self, thread: usize, region: &Region, operations: &AtomicU64) {
        let mut bytes = vec![thread as u8; self.size.min(region.len() as usize)];
        let room = region.len() - bytes.len() as u64 + 1;
        let (mut said, mut offset, mut failing) = (Instant::now(), thread as u64 * 4097, false);
        loop {
            let start = Instant::now();
            offset = (offset + 1_000_003) % room;
            match self.once(region, &mut bytes, offset) {
                Ok(()) => {
                    let count = operations.fetch_add(1, Ordering::Relaxed) + 1;
                    if std::mem::take(&mut failing) {
                        println!("recovered {thread}");
                    }
                    if said.elapsed() > Duration::from_millis(200) {
                        println!("ops {count}");
                        said = Instant::now();
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

    fn once(&self, region: &Region, bytes: &mut [u8], offset: u64) -> kite::Result<()> {
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
    /// The errno that later reads have to get
    #[arg(long, default_value = "ESTALE")]
    expect: String,
    /// Maximum wait
    #[arg(long, default_value_t = 60)]
    seconds: u64,
}

impl Watch {
    /// Watches; succeeds if all came as it has to.
    pub(crate) fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        let regions = [
            cluster.map(&self.name, Rights::READ)?,
            cluster.map(&self.name, Rights::READ)?,
        ];
        ensure!(
            !readable(&cluster, 0)?,
            "readable although nothing happened"
        );
        ensure!(cluster.next_event()?.is_none(), "an event of nothing");
        println!("watching");
        let mut stale = [self.next(&cluster)?, self.next(&cluster)?];
        stale.sort_unstable();
        let mut ids = [regions[0].id(), regions[1].id()];
        ids.sort_unstable();
        ensure!(
            stale == ids,
            "events of the handles {stale:?}, not of {ids:?}"
        );
        ensure!(cluster.next_event()?.is_none(), "an event too many");
        ensure!(!readable(&cluster, 0)?, "readable after the last event");
        for region in &regions {
            let read = region.read_at(&mut [0], 0).map_err(|e| symbol(e.errno()));
            ensure!(
                read.as_ref().err() == Some(&self.expect),
                "a read of a stale region: {read:?}"
            );
        }
        println!("stale");
        Ok(())
    }

    fn next(&self, cluster: &Cluster) -> Result<u64> {
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
