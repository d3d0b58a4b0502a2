// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `queues`: requests by queue pairs, checked against a model, counted, without end, or hostile.

mod abuse;
mod model;
mod serve;

use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use clap::{Args, Subcommand};
use kite::{AllocOptions, Cluster, Error, IoQueue, Region, Rights, RPC_INLINE_BYTES};

use crate::support::abi::symbol;
use crate::support::random::Random;
use crate::support::threads::run_threads;

/// Nothing here is about time, and machines may be slow.
const PATIENCE: Duration = Duration::from_secs(120);

/// Requests by queue pairs
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Queues {
    /// At random, in regions of its own and in a model of them, which have to agree
    Check(model::Check),
    Steady(Steady),
    Endless(Endless),
    Invert(Invert),
    Serve(serve::Serve),
    /// Sends many messages, each the first of a stream, and asks how many have come
    Send {
        /// A region that is served
        name: String,
    },
    /// Makes calls that are never answered, gives up every second, and waits for the end of the others
    Keep {
        /// A region that is served
        name: String,
    },
    /// Makes and ends queue pairs in several threads at once, each of which writes by its own
    Crowd,
    Abuse(abuse::Abuse),
    /// Leaves a queue pair full of submissions and with no room for their completions, and sleeps
    Clog {
        /// A region that exists
        name: String,
    },
}

/// Short writes without pause; prints how many system calls they took
#[derive(Args, Clone, Debug)]
pub(crate) struct Steady {
    /// The node that is written to
    node: u32,
    /// Writes
    #[arg(long, default_value_t = 20_000)]
    operations: u64,
    /// At a time
    #[arg(long, default_value_t = DEPTH)]
    depth: u32,
    /// Regions that they go to in turn
    #[arg(long, default_value_t = 1)]
    regions: usize,
}

/// Short reads and writes until the first error, which is printed
#[derive(Args, Clone, Debug)]
pub(crate) struct Endless {
    /// A region that exists
    name: String,
    /// Bytes of each
    #[arg(long, default_value_t = 64)]
    size: usize,
    /// Goes on after errors
    #[arg(long)]
    persist: bool,
}

/// Calls of a function that inverts, many at a time
#[derive(Args, Clone, Debug)]
pub(crate) struct Invert {
    /// A region that is served
    name: String,
    /// Calls
    #[arg(long, default_value_t = 500)]
    operations: u64,
    /// At a time
    #[arg(long, default_value_t = 64)]
    depth: u32,
    /// Most bytes of data of each
    #[arg(long, default_value_t = RPC_INLINE_BYTES)]
    most: usize,
}

impl Queues {
    /// Does it.
    pub(crate) fn run(&self) -> Result<()> {
        match self {
            Queues::Check(check) => check.run(),
            Queues::Steady(steady) => steady.run(),
            Queues::Endless(endless) => endless.run(),
            Queues::Invert(invert) => invert.run(),
            Queues::Serve(serve) => serve.run(),
            Queues::Send { name } => send(name),
            Queues::Keep { name } => keep(name),
            Queues::Crowd => crowd(),
            Queues::Abuse(abuse) => abuse.run(),
            Queues::Clog { name } => clog(name),
        }
    }
}

const DEPTH: u32 = 32;

impl Steady {
    fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        let region = || cluster.alloc(&AllocOptions::new(1 << 16).nodes([self.node]));
        let regions: Result<Vec<_>, _> = (0..self.regions)
            .map(|_| region().map(|region| region.with_timeout(PATIENCE)))
            .collect();
        let regions = regions?;
        let mut queue = cluster.create_queue(self.depth, 8 * self.depth as usize)?;
        // Until the queue pairs to the node are connected nothing is steady.
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
        let mut begun = 0;
        while begun < operations || queue.in_flight() > 0 {
            while begun < operations && queue.in_flight() < queue.entries() {
                let at = 8 * (begun as usize % queue.entries());
                let region = turns.next().context("no region")?;
                queue.write(begun, region, at as u64, at..at + 8)?;
                begun += 1;
            }
            queue.submit()?;
            // A normal client sleeps after some time. This one polls without limit.
            let patience = Instant::now();
            while queue.in_flight() == queue.entries() || begun == operations {
                match queue.try_next()? {
                    Some(completion) => drop(completion.result?),
                    None if queue.in_flight() == 0 => break,
                    None => std::hint::spin_loop(),
                }
                ensure!(patience.elapsed() < PATIENCE, "no completion");
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
        let (mut said, mut count) = (Instant::now(), 0_u64);
        let room = region.len() - self.size as u64 + 1;
        for slot in 0..DEPTH as u64 {
            self.begin(&mut queue, &region, slot, slot * 4097 % room)?;
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
            if said.elapsed() > Duration::from_millis(200) {
                println!("ops {count}");
                said = Instant::now();
            }
            self.begin(&mut queue, &region, done.tag, count * 1_000_003 % room)?;
        }
    }

    fn begin(&self, queue: &mut IoQueue, region: &Region, slot: u64, offset: u64) -> Result<()> {
        let at = slot as usize * self.size;
        let part = at..at + self.size;
        let begun = match offset % 2 {
            0 => queue.read(slot, region, offset, part),
            _ => queue.write(slot, region, offset, part),
        };
        Ok(begun?)
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
            .with_timeout(PATIENCE);
        let depth = self.depth as usize;
        let size = self.most;
        let mut queue = cluster.create_queue(self.depth, 2 * size * depth)?;
        let mut random = Random::new(1, std::process::id().into());
        let mut asked: Vec<Vec<u8>> = vec![Vec::new(); depth];
        let mut free: Vec<usize> = (0..depth).collect();
        let (mut begun, mut done) = (0, 0);
        while done < self.operations {
            while let Some(slot) = free.pop().filter(|_| begun < self.operations) {
                let mut data = vec![0; random.below(size as u64 + 1) as usize];
                random.fill(&mut data);
                let (at, room) = (2 * slot * size, (2 * slot + 1) * size);
                queue.store(at, &data)?;
                let reply = room..room + size;
                queue.call(slot as u64, &region, INVERT, at..at + data.len(), reply)?;
                asked[slot] = data;
                begun += 1;
            }
            let completion = queue.wait()?;
            let slot = completion.tag as usize;
            let mut reply = vec![0; completion.result? as usize];
            queue.load((2 * slot + 1) * size, &mut reply)?;
            check_reply(&asked[slot], &reply)?;
            free.push(slot);
            done += 1;
        }
        println!("{done} calls");
        Ok(())
    }
}

fn check_reply(asked: &[u8], reply: &[u8]) -> Result<()> {
    let same = asked.iter().map(|byte| !byte).eq(reply.iter().copied());
    let (asked, got) = (asked.len(), reply.len());
    ensure!(same, "{asked} bytes: another's reply, of {got}");
    Ok(())
}

fn crowd() -> Result<()> {
    let cluster = Cluster::open()?;
    let region = cluster
        .alloc(&AllocOptions::new(4096).nodes([2]))?
        .with_timeout(PATIENCE);
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

fn send(name: &str) -> Result<()> {
    let cluster = Cluster::open()?;
    let region = cluster.map(name, Rights::WRITE)?.with_timeout(PATIENCE);
    // Every other one is too long to be sent in one piece.
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
    // Of several servers another may still count the last ones.
    let (patience, sent) = (Instant::now(), 10 * u64::from(DEPTH));
    let mut total = 0;
    while total < sent && patience.elapsed() < PATIENCE {
        let mut reply = [0; 8];
        region.call(TOTAL, &[], &mut reply)?;
        total = u64::from_ne_bytes(reply);
    }
    println!("{total} messages");
    Ok(())
}

fn keep(name: &str) -> Result<()> {
    let cluster = Cluster::open()?;
    let region = cluster.map(name, Rights::WRITE)?.with_timeout(PATIENCE);
    let mut queue = cluster.create_queue(2 * DEPTH, 8)?;
    for tag in 0..DEPTH.into() {
        queue.call(tag, &region, KEEP, 0..8, 0..0)?;
    }
    // However many calls wait, what takes a worker is done.
    let own = cluster.alloc(&AllocOptions::new(1 << 16))?;
    queue.fill(u64::MAX, &own, 1, 0, 1 << 16)?;
    let done = queue.wait()?;
    ensure!(done.tag == u64::MAX && done.result == Ok(0), "{done:?}");
    let patience = Instant::now();
    for tag in (0..DEPTH.into()).step_by(2) {
        while !queue.cancel(tag)? {
            ensure!(patience.elapsed() < PATIENCE, "call {tag} is not to be had");
        }
        ensure!(!queue.cancel(tag)?, "call {tag} was given up twice");
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

fn clog(name: &str) -> Result<()> {
    let cluster = Cluster::open()?;
    let region = cluster.map(name, Rights::READ)?;
    let mut queue = cluster.create_queue(8, 8)?;
    for tag in 0..8 {
        queue.read(tag, &region, 0, 0..8)?;
    }
    queue.submit()?;
    match queue.read(8, &region, 0, 0..8) {
        Err(kite::Error::QueueFull) => println!("full"),
        other => bail!("one more: {other:?}"),
    }
    loop {
        std::thread::park();
    }
}
