// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `requests`: a number of requests of one kind. Prints how many completed, and their time.

use std::time::{Duration, Instant};

use anyhow::Result;
use clap::{Args, ValueEnum};
use kite::{Cluster, IoQueue, Priority, Region, Rights};

/// Kind of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    Read,
    Write,
    /// Two parts in one request
    Vectored,
    Set,
    /// Within the region
    Copy,
    FetchAdd,
    /// Takes a lock and gives it back
    Lock,
    /// A message to a server of the region
    Send,
    /// By a queue pair, many at a time
    QueueWrite,
    QueueSend,
    QueueAdd,
    /// Needs no memory for its bytes
    QueueSet,
}

/// Makes requests of one kind; prints how many, in how many milliseconds, and the first error
#[derive(Args, Clone, Debug)]
pub(crate) struct Requests {
    #[arg(value_enum)]
    kind: Kind,
    /// A region that exists
    name: String,
    /// Number of requests
    #[arg(long, default_value_t = 100)]
    count: u64,
    /// Bytes of each
    #[arg(long, default_value_t = 64)]
    len: usize,
    /// Deadline of each
    #[arg(long, default_value_t = 120_000)]
    timeout_ms: u64,
    /// With low priority
    #[arg(long)]
    low: bool,
}

/// Requests at a time, by a queue pair.
const DEPTH: u32 = 32;

impl Requests {
    /// Makes them.
    pub(crate) fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        if self.low {
            cluster.set_priority(Priority::Low)?;
        }
        let region = cluster.map(&self.name, Rights::READ | Rights::WRITE)?;
        let region = region.with_timeout(Duration::from_millis(self.timeout_ms));
        let start = Instant::now();
        // Every queue has memory.
        let room = if self.kind == Kind::QueueSet {
            1
        } else {
            self.len
        };
        let (mut made, mut buffer) = (0, vec![1; room]);
        println!("begun");
        let result = match self.kind {
            Kind::QueueWrite | Kind::QueueSend | Kind::QueueAdd | Kind::QueueSet => {
                let queue = cluster.create_queue(DEPTH, DEPTH as usize * room)?;
                self.queue(queue, &region, &mut made)
            }
            _ => (0..self.count).try_for_each(|_| {
                self.one(&region, &mut buffer)?;
                made += 1;
                Ok(())
            }),
        };
        let error = result.err();
        let error = error.map_or(String::new(), |error| format!(", then {error:?}"));
        println!("{made} in {} ms{error}", start.elapsed().as_millis());
        Ok(())
    }

    fn one(&self, region: &Region, buffer: &mut [u8]) -> kite::Result<()> {
        let len = self.len as u64;
        match self.kind {
            Kind::Read => region.read_at(buffer, 0),
            Kind::Write => region.write_at(buffer, 0),
            Kind::Vectored => {
                let (front, back) = buffer.split_at(self.len / 2);
                region.write_vectored_at(&[(0, front), (len, back)])
            }
            Kind::Set => region.fill(7, 0, len),
            Kind::Copy => region.copy_to(0, region, len, len),
            Kind::FetchAdd => region.fetch_add(0, 1).map(drop),
            Kind::Lock => region.lock(1)?.unlock(),
            _ => region.send(0, buffer),
        }
    }

    fn queue(&self, mut queue: IoQueue, region: &Region, made: &mut u64) -> kite::Result<()> {
        let mut begun = 0;
        while *made < self.count {
            while begun < self.count && queue.in_flight() < queue.entries() {
                let at = queue.buffer_len() / queue.entries() * (begun as usize % queue.entries());
                let data = at..at + queue.buffer_len() / queue.entries();
                match self.kind {
                    Kind::QueueSet => queue.fill(begun, region, 7, 0, self.len as u64)?,
                    Kind::QueueWrite => queue.write(begun, region, at as u64, data)?,
                    Kind::QueueSend => queue.send(begun, region, 0, data)?,
                    _ => queue.fetch_add(begun, region, 0, 1)?,
                }
                begun += 1;
            }
            queue.wait()?.result?;
            *made += 1;
        }
        Ok(())
    }
}
