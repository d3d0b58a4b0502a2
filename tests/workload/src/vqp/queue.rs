// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `vqp queue`: what is particular to requests that go by a queue: that few take system calls, that they wait for room,
//! and end with what they wait for.

use std::collections::BTreeMap;
use std::io::Write;
use std::time::Instant;

use anyhow::{ensure, Context, Result};
use clap::Subcommand;
use kite::{Buffer, Cluster, Error, IoQueue, Mr, RemoteMemory, Rights, SendWr, Vqp, WrOp};

use super::{To, PATIENCE};

/// More requests than a VQP accepts.
const MANY: u64 = kite::VQP_DEPTH as u64 + 50;
const KEPT: u64 = kite::VQP_RECV_CREDITS as u64;

/// Requests by a queue.
#[derive(Subcommand, Clone, Debug)]
pub(crate) enum ByQueue {
    /// Reads without pause; prints how many system calls they took
    Steady {
        #[command(flatten)]
        to: To,
        /// Reads
        #[arg(long, default_value_t = 20_000)]
        operations: u64,
    },
    /// More requests than a VQP accepts, and one while the VQP is full of completions that are not popped
    Full(To),
    /// Gives up requests whose key is looked for and is none; those after them are done
    GivenUp(To),
    /// Sends more messages to a port than it queues, reads meanwhile by another VQP, and prints the results of the
    /// messages
    Held {
        #[command(flatten)]
        to: To,
        /// The port
        #[arg(long)]
        port: u32,
        /// Ends the queue pair
        #[arg(long)]
        ends: bool,
    },
}

impl ByQueue {
    pub(crate) fn run(&self) -> Result<()> {
        match self {
            Self::Steady { to, operations } => steady(to, *operations),
            Self::Full(to) => full(to),
            Self::GivenUp(to) => given_up(to),
            Self::Held { to, port, ends } => held(to, *port, *ends),
        }
    }
}

fn steady(to: &To, operations: u64) -> Result<()> {
    let cluster = Cluster::open()?;
    let local = cluster.reg_mr(Buffer::new(4096)?, Rights::empty())?;
    let vqp = cluster.connect(to.node)?;
    let mut queue = cluster.create_queue(kite::PUSH_BATCH_MAX as u32, 1)?;
    let read = to.work(WrOp::Read, &local);
    // Until its key is known nothing is steady.
    stream(&mut queue, &vqp, read, 100)?;
    let before = queue.system_calls();
    stream(&mut queue, &vqp, read, operations)?;
    let calls = queue.system_calls() - before;
    println!("{operations} operations, {calls} system calls");
    Ok(())
}

/// Keeps as many requests in flight as the queue has entries. A normal client sleeps after some time. This one polls
/// without limit.
fn stream(queue: &mut IoQueue, vqp: &Vqp, work: SendWr<'_>, operations: u64) -> Result<()> {
    let (mut begun, mut last) = (0, Instant::now());
    while begun < operations || queue.in_flight() > 0 {
        while begun < operations && !queue.is_full() {
            queue.push(vqp, &SendWr { tag: begun, ..work })?;
            begun += 1;
        }
        queue.submit()?;
        match queue.try_next()? {
            Some(done) => {
                done.result?;
                last = Instant::now();
            }
            None => std::hint::spin_loop(),
        }
        ensure!(Some(last.elapsed()) < PATIENCE, "no completion");
    }
    Ok(())
}

fn full(to: &To) -> Result<()> {
    let cluster = Cluster::open()?;
    let local = cluster.reg_mr(Buffer::new(4096)?, Rights::empty())?;
    let vqp = cluster.connect(to.node)?;
    let mut queue = cluster.create_queue(1024, 1)?;
    let read = to.work(WrOp::Read, &local);
    for tag in 0..1024 {
        queue.push(&vqp, &SendWr { tag, ..read })?;
    }
    ensure!(queue.push(&vqp, &read) == Err(Error::QueueFull), "one more");
    for tag in 0..1024 {
        let done = queue.wait()?;
        ensure!(done.tag == tag && done.result.is_ok(), "{tag}: {done:?}");
    }
    unpopped(&vqp, &mut queue, read)
}

/// Completions that are not popped leave no space for requests, by either interface.
fn unpopped(vqp: &Vqp, queue: &mut IoQueue, read: SendWr<'_>) -> Result<()> {
    let one = |queue: &mut IoQueue| -> Result<_> {
        queue.push(vqp, &read)?;
        Ok(queue.wait()?.result)
    };
    for _ in 0..kite::VQP_DEPTH / kite::PUSH_BATCH_MAX {
        vqp.push(&[read; kite::PUSH_BATCH_MAX])?;
    }
    let none = one(queue)?;
    ensure!(none == Err(Error::QueueFull), "without room: {none:?}");
    let mut left = kite::VQP_DEPTH;
    while left != 0 {
        left -= vqp.pop(left, PATIENCE)?.len();
    }
    let some = one(queue)?;
    ensure!(some.is_ok(), "with room: {some:?}");
    Ok(())
}

/// A lookup of a key for a canceled request gives no result to another request.
fn given_up(to: &To) -> Result<()> {
    let cluster = Cluster::open()?;
    let local = cluster.reg_mr(Buffer::new(4096)?, Rights::empty())?;
    let mut queue = cluster.create_queue(4, 1)?;
    let good = to.work(WrOp::Read, &local);
    let remote = RemoteMemory {
        rkey: to.key ^ (1 << 20),
        ..to.remote()
    };
    let wrong = SendWr { remote, ..good };
    let mut canceled = 0;
    for _ in 0..100 {
        // It knows no key.
        let vqp = cluster.connect(to.node)?;
        queue.push(&vqp, &SendWr { tag: 0, ..wrong })?;
        canceled += u64::from(queue.cancel(0)?);
        queue.push(&vqp, &SendWr { tag: 1, ..good })?;
        let done = [queue.wait()?, queue.wait()?];
        ensure!(done[0].tag == 0 && done[0].result.is_err(), "{done:?}");
        ensure!(done[1].tag == 1 && done[1].result.is_ok(), "{done:?}");
    }
    ensure!(canceled != 0, "none was given up in time");
    Ok(())
}

fn message(local: &Mr, tag: u64) -> SendWr<'_> {
    SendWr {
        tag,
        op: WrOp::Send,
        local,
        local_offset: 0,
        len: 8,
        remote: RemoteMemory::default(),
        remote_offset: 0,
        immediate: None,
        signaled: true,
        fence: false,
    }
}

fn held(to: &To, port: u32, ends: bool) -> Result<()> {
    let cluster = Cluster::open()?;
    let local = cluster.reg_mr(Buffer::new(4096)?, Rights::empty())?;
    let (sends, reads) = (
        cluster.connect_to(to.node, port)?,
        cluster.connect(to.node)?,
    );
    let mut queue = cluster.create_queue(1024, 1)?;
    for tag in 0..MANY {
        queue.push(&sends, &message(&local, tag))?;
    }
    for tag in MANY..2 * MANY {
        let read = to.work(WrOp::Read, &local);
        queue.push(&reads, &SendWr { tag, ..read })?;
    }
    // What is kept of the messages, and all of the reads.
    for _ in 0..KEPT + MANY {
        let done = queue.wait()?;
        let held = (KEPT..MANY).contains(&done.tag);
        ensure!(!held && done.result.is_ok(), "{done:?}");
    }
    println!("held");
    std::io::stdout().flush()?;
    if ends {
        give_up(&mut queue)?;
        drop(sends);
    }
    println!("{:?}", ended(&mut queue)?);
    Ok(())
}

/// Cancels waiting requests. Those that the VQP has accepted continue.
fn give_up(queue: &mut IoQueue) -> Result<()> {
    ensure!(!queue.cancel(KEPT)?, "it is under way");
    ensure!(queue.cancel(MANY - 1)?, "it waits for room");
    let done = queue.wait()?;
    let right = done.tag == MANY - 1 && done.result == Err(Error::Canceled);
    ensure!(right, "{done:?}");
    Ok(())
}

/// Returns the number of other requests by error.
fn ended(queue: &mut IoQueue) -> Result<BTreeMap<String, u64>> {
    let mut errors = BTreeMap::new();
    while queue.in_flight() > 0 {
        let done = queue.wait()?;
        let error = done.result.err().context("it was taken")?;
        *errors.entry(format!("{error:?}")).or_default() += 1;
    }
    Ok(errors)
}
