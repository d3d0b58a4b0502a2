// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `requests`: a number of requests of one kind. Prints how many completed, and their time.

use std::time::{Duration, Instant};

use anyhow::Result;
use clap::{Args, ValueEnum};
use kite::{Cluster, IoQueue, Priority, Region, Rights};

/// Kind of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum RequestKind {
    Read,
    Write,
    /// Two segments in one request
    Vectored,
    Fill,
    /// Within the region
    Copy,
    FetchAdd,
    /// Locks and unlocks
    Lock,
    /// A message to a server of the region
    Send,
    /// Through an I/O queue, several requests in flight
    QueueWrite,
    QueueSend,
    QueueAdd,
    /// Needs no memory for its bytes
    QueueFill,
}

/// Makes requests of one kind, and prints their number, the time in ms and the first error
#[derive(Args, Clone, Debug)]
pub(crate) struct Requests {
    #[arg(value_enum)]
    kind: RequestKind,
    /// Existing region
    name: String,
    /// Number of requests
    #[arg(long, default_value_t = 100)]
    count: u64,
    /// Bytes of each request
    #[arg(long, default_value_t = 64)]
    len: usize,
    /// Deadline of each request in ms
    #[arg(long, default_value_t = 120_000)]
    timeout_ms: u64,
    /// Uses low priority
    #[arg(long)]
    low: bool,
}

/// Requests in flight in an I/O queue.
const DEPTH: u32 = 32;

impl Requests {
    /// Makes the requests.
    pub(crate) fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        if self.low {
            cluster.set_priority(Priority::Low)?;
        }
        let region = cluster.map(&self.name, Rights::READ | Rights::WRITE)?;
        let region = region.with_timeout(Duration::from_millis(self.timeout_ms));
        let start = Instant::now();
        // A queue needs at least one byte of memory.
        let room = if self.kind == RequestKind::QueueFill {
            1
        } else {
            self.len
        };
        let (mut made, mut buffer) = (0, vec![1; room]);
        println!("begun");
        let result = match self.kind {
            RequestKind::QueueWrite
            | RequestKind::QueueSend
            | RequestKind::QueueAdd
            | RequestKind::QueueFill => {
                let queue = cluster.create_queue(DEPTH, DEPTH as usize * room)?;
                self.submit_requests(queue, &region, &mut made)
            }
            _ => (0..self.count).try_for_each(|_| {
                self.make_request(&region, &mut buffer)?;
                made += 1;
                Ok(())
            }),
        };
        let error = result.err();
        let error = error.map_or(String::new(), |error| format!(", then {error:?}"));
        println!("{made} in {} ms{error}", start.elapsed().as_millis());
        Ok(())
    }

    fn make_request(&self, region: &Region, buffer: &mut [u8]) -> kite::Result<()> {
        let len = self.len as u64;
        match self.kind {
            RequestKind::Read => region.read_at(buffer, 0),
            RequestKind::Write => region.write_at(buffer, 0),
            RequestKind::Vectored => {
                let (front, back) = buffer.split_at(self.len / 2);
                region.write_vectored_at(&[(0, front), (len, back)])
            }
            RequestKind::Fill => region.fill(7, 0, len),
            RequestKind::Copy => region.copy_to(0, region, len, len),
            RequestKind::FetchAdd => region.fetch_add(0, 1).map(drop),
            RequestKind::Lock => region.lock(1)?.unlock(),
            _ => region.send(0, buffer),
        }
    }

    fn submit_requests(
        &self,
        mut queue: IoQueue,
        region: &Region,
        made: &mut u64,
    ) -> kite::Result<()> {
        let mut started = 0;
        while *made < self.count {
            while started < self.count && queue.in_flight() < queue.entries() {
                let at =
                    queue.buffer_len() / queue.entries() * (started as usize % queue.entries());
                let data = at..at + queue.buffer_len() / queue.entries();
                match self.kind {
                    RequestKind::QueueFill => queue.fill(started, region, 7, 0, self.len as u64)?,
                    RequestKind::QueueWrite => queue.write(started, region, at as u64, data)?,
                    RequestKind::QueueSend => queue.send(started, region, 0, data)?,
                    _ => queue.fetch_add(started, region, 0, 1)?,
                }
                started += 1;
            }
            queue.wait()?.result?;
            *made += 1;
        }
        Ok(())
    }
}
