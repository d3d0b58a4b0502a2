// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `queues`: requests of I/O queues: comparison with a model, system calls, endless load, and invalid SQEs.

mod fuzz;
mod model;
mod serve;

use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use clap::{Args, Subcommand};
use kite::{AllocOptions, Cluster, Error, IoQueue, Region, Rights, RPC_INLINE_BYTES};

use crate::support::abi::symbol;
use crate::support::random::Random;
use crate::support::threads::run_threads;

/// Generous timeout, since machines may be slow.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Requests of I/O queues
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Queues {
    /// Changes own regions at random, and compares them with a model
    Check(model::QueueCheck),
    Steady(Steady),
    Endless(Endless),
    Invert(Invert),
    Serve(serve::QueueServe),
    /// Sends messages, each the first of its stream, and queries the number of received messages
    Send {
        /// Served region
        name: String,
    },
    /// Makes calls without replies, cancels every other call, and waits until the server exits
    CancelCalls {
        /// Served region
        name: String,
    },
    /// Creates and destroys queues in several threads, each with a write
    Concurrent,
    Fuzz(fuzz::QueueFuzz),
    /// Fills a queue with SQEs without consuming the completions, and sleeps
    Stall {
        /// Existing region
        name: String,
    },
}

/// Writes 8 bytes at a time without pause, and prints the number of system calls
#[derive(Args, Clone, Debug)]
pub(crate) struct Steady {
    /// Node of the regions
    node: u32,
    /// Writes
    #[arg(long, default_value_t = 20_000)]
    operations: u64,
    /// Requests in flight
    #[arg(long, default_value_t = DEPTH)]
    depth: u32,
    /// Regions, used in turn
    #[arg(long, default_value_t = 1)]
    regions: usize,
}

/// Reads and writes until the first error, and prints the error
#[derive(Args, Clone, Debug)]
pub(crate) struct Endless {
    /// Existing region
    name: String,
    /// Bytes of each request
    #[arg(long, default_value_t = 64)]
    size: usize,
    /// Continues after errors
    #[arg(long)]
    persist: bool,
}

/// Calls the function `invert`, several calls at a time
#[derive(Args, Clone, Debug)]
pub(crate) struct Invert {
    /// Served region
    name: String,
    /// Calls
    #[arg(long, default_value_t = 500)]
    operations: u64,
    /// Calls in flight
    #[arg(long, default_value_t = 64)]
    depth: u32,
    /// Maximum bytes of data of a call
    #[arg(long, default_value_t = RPC_INLINE_BYTES)]
    data_max: usize,
}

impl Queues {
    /// Runs the subcommand.
    pub(crate) fn run(&self) -> Result<()> {
        match self {
            Queues::Check(check) => check.run(),
            Queues::Steady(steady) => steady.run(),
            Queues::Endless(endless) => endless.run(),
            Queues::Invert(invert) => invert.run(),
            Queues::Serve(serve) => serve.run(),
            Queues::Send { name } => send_messages(name),
            Queues::CancelCalls { name } => cancel_calls(name),
            Queues::Concurrent => create_concurrently(),
            Queues::Fuzz(fuzz) => fuzz.run(),
            Queues::Stall { name } => stall(name),
        }
    }
}

const DEPTH: u32 = 32;

impl Steady {
    fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        let region = || cluster.alloc(&AllocOptions::new(1 << 16).nodes([self.node]));
        let regions: Result<Vec<_>, _> = (0..self.regions)
            .map(|_| region().map(|region| region.with_timeout(TIMEOUT)))
            .collect();
        let regions = regions?;
        let mut queue = cluster.create_queue(self.depth, 8 * self.depth as usize)?;
        // The first requests wait for the connections.
        self.write(&mut queue, &regions, self.depth.into())?;
        let (before, start) = (queue.system_calls(), Instant::now());
        self.write(&mut queue, &regions, self.operations)?;
        let calls = queue.system_calls() - before;
        println!("{} operations, {calls} system calls", self.operations);
        eprintln!("{:?} each", start.elapsed() / self.operations as u32);
        Ok(())
    }

    fn write(&self, queue: &mut IoQueue, regions: &[Region], operations: u64) -> Result<()> {
        let mut turns = regions.iter().cycle();
        let mut started = 0;
        while started < operations || queue.in_flight() > 0 {
            while started < operations && queue.in_flight() < queue.entries() {
                let at = 8 * (started as usize % queue.entries());
                let region = turns.next().context("no region")?;
                queue.write(started, region, at as u64, at..at + 8)?;
                started += 1;
            }
            queue.submit()?;
            // A normal client sleeps after some time. This one polls without limit.
            let start = Instant::now();
            while queue.in_flight() == queue.entries() || started == operations {
                match queue.try_next()? {
                    Some(completion) => drop(completion.result?),
                    None if queue.in_flight() == 0 => break,
                    None => std::hint::spin_loop(),
                }
                ensure!(start.elapsed() < TIMEOUT, "no completion");
            }
        }
        Ok(())
    }
}

impl Endless {
    fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        let region = cluster.map(&self.name, Rights::READ | Rights::WRITE)?;
        let mut queue = cluster.create_queue(DEPTH, self.size * DEPTH as usize)?;
        println!("holding {}", region.id());
        let (mut printed, mut count) = (Instant::now(), 0_u64);
        let room = region.len() - self.size as u64 + 1;
        for slot in 0..DEPTH as u64 {
            self.start_transfer(&mut queue, &region, slot, slot * 4097 % room)?;
        }
        loop {
            let done = queue.wait()?;
            if let Err(error) = done.result {
                println!("error {}", symbol(error.errno()));
                if !self.persist {
                    return Ok(());
                }
                std::thread::sleep(Duration::from_millis(20));
            }
            count += 1;
            if printed.elapsed() > Duration::from_millis(200) {
                println!("ops {count}");
                printed = Instant::now();
            }
            self.start_transfer(&mut queue, &region, done.tag, count * 1_000_003 % room)?;
        }
    }

    fn start_transfer(
        &self,
        queue: &mut IoQueue,
        region: &Region,
        slot: u64,
        offset: u64,
    ) -> Result<()> {
        let at = slot as usize * self.size;
        let part = at..at + self.size;
        let started = match offset % 2 {
            0 => queue.read(slot, region, offset, part),
            _ => queue.write(slot, region, offset, part),
        };
        Ok(started?)
    }
}

/// Functions of `rpc serve`.
const INVERT: u32 = 0;
const KEEP: u32 = 2;
const NEXT: u32 = 5;
const TOTAL: u32 = 6;

impl Invert {
    fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        let region = cluster
            .map(&self.name, Rights::WRITE)?
            .with_timeout(TIMEOUT);
        let depth = self.depth as usize;
        let size = self.data_max;
        let mut queue = cluster.create_queue(self.depth, 2 * size * depth)?;
        let mut random = Random::new(1, std::process::id().into());
        let mut sent: Vec<Vec<u8>> = vec![Vec::new(); depth];
        let mut free: Vec<usize> = (0..depth).collect();
        let (mut started, mut done) = (0, 0);
        while done < self.operations {
            while let Some(slot) = free.pop().filter(|_| started < self.operations) {
                let mut data = vec![0; random.below(size as u64 + 1) as usize];
                random.fill(&mut data);
                let (at, room) = (2 * slot * size, (2 * slot + 1) * size);
                queue.store(at, &data)?;
                let reply = room..room + size;
                queue.call(slot as u64, &region, INVERT, at..at + data.len(), reply)?;
                sent[slot] = data;
                started += 1;
            }
            let completion = queue.wait()?;
            let slot = completion.tag as usize;
            let mut reply = vec![0; completion.result? as usize];
            queue.load((2 * slot + 1) * size, &mut reply)?;
            check_reply(&sent[slot], &reply)?;
            free.push(slot);
            done += 1;
        }
        println!("{done} calls");
        Ok(())
    }
}

fn check_reply(sent: &[u8], reply: &[u8]) -> Result<()> {
    let same = sent.iter().map(|byte| !byte).eq(reply.iter().copied());
    let (sent, got) = (sent.len(), reply.len());
    ensure!(same, "call of {sent} bytes: wrong reply of {got} bytes");
    Ok(())
}

fn create_concurrently() -> Result<()> {
    let cluster = Cluster::open()?;
    let region = cluster
        .alloc(&AllocOptions::new(4096).nodes([2]))?
        .with_timeout(TIMEOUT);
    run_threads(8, 20, |thread, i| {
        let mut queue = cluster.create_queue(8, 8)?;
        queue.store(0, &i.to_ne_bytes())?;
        queue.write(i, &region, 8 * thread, 0..8)?;
        let done = queue.wait()?;
        ensure!(done.tag == i && done.result == Ok(0), "{done:?}");
        Ok(())
    })?;
    let mut words = [0; 64];
    region.read_at(&mut words, 0)?;
    let last = words.chunks(8).all(|word| word == 19_u64.to_ne_bytes());
    ensure!(last, "{words:?}");
    Ok(())
}

fn send_messages(name: &str) -> Result<()> {
    let cluster = Cluster::open()?;
    let region = cluster.map(name, Rights::WRITE)?.with_timeout(TIMEOUT);
    // Every other message is too long for an inline message.
    let lengths = [16, 2 * RPC_INLINE_BYTES];
    let mut queue = cluster.create_queue(DEPTH, lengths[1] * DEPTH as usize)?;
    for round in 0..10 {
        for slot in 0..DEPTH as usize {
            let stream = (u64::from(std::process::id()) << 32) + round * 1000 + slot as u64;
            let (at, len) = (lengths[1] * slot, lengths[slot % 2]);
            queue.store(at, &stream.to_ne_bytes())?;
            queue.send(stream, &region, NEXT, at..at + len)?;
        }
        while queue.in_flight() > 0 {
            queue.wait()?.result?;
        }
    }
    // Another server thread may still process the last messages.
    let (start, sent) = (Instant::now(), 10 * u64::from(DEPTH));
    let mut total = 0;
    while total < sent && start.elapsed() < TIMEOUT {
        let mut reply = [0; 8];
        region.call(TOTAL, &[], &mut reply)?;
        total = u64::from_ne_bytes(reply);
    }
    println!("{total} messages");
    Ok(())
}

fn cancel_calls(name: &str) -> Result<()> {
    let cluster = Cluster::open()?;
    let region = cluster.map(name, Rights::WRITE)?.with_timeout(TIMEOUT);
    let mut queue = cluster.create_queue(2 * DEPTH, 8)?;
    for tag in 0..DEPTH.into() {
        queue.call(tag, &region, KEEP, 0..8, 0..0)?;
    }
    // Waiting calls must not block requests that need a worker.
    let own = cluster.alloc(&AllocOptions::new(1 << 16))?;
    queue.fill(u64::MAX, &own, 1, 0, 1 << 16)?;
    let done = queue.wait()?;
    ensure!(done.tag == u64::MAX && done.result == Ok(0), "{done:?}");
    let start = Instant::now();
    for tag in (0..DEPTH.into()).step_by(2) {
        while !queue.cancel(tag)? {
            ensure!(start.elapsed() < TIMEOUT, "call {tag} cannot be canceled");
        }
        ensure!(!queue.cancel(tag)?, "call {tag} was canceled twice");
        let done = queue.wait()?;
        ensure!(
            done.tag == tag && done.result == Err(Error::Canceled),
            "{done:?}"
        );
    }
    println!("canceled {}", DEPTH as usize - queue.in_flight());
    while queue.in_flight() > 0 {
        let done = queue.wait()?;
        ensure!(done.result == Err(Error::ConnectionReset), "{done:?}");
    }
    println!("ended");
    Ok(())
}

fn stall(name: &str) -> Result<()> {
    let cluster = Cluster::open()?;
    let region = cluster.map(name, Rights::READ)?;
    let mut queue = cluster.create_queue(8, 8)?;
    for tag in 0..8 {
        queue.read(tag, &region, 0, 0..8)?;
    }
    queue.submit()?;
    match queue.read(8, &region, 0, 0..8) {
        Err(kite::Error::QueueFull) => println!("full"),
        other => bail!("read in a full queue: {other:?}"),
    }
    loop {
        std::thread::park();
    }
}
