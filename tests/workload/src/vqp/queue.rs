// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `vqp queue`: VQP requests of an I/O queue. Few need system calls. They wait for VQP slots and receive credits, and
//! fail with the VQP.

use std::collections::BTreeMap;
use std::io::Write;
use std::time::Instant;

use anyhow::{ensure, Context, Result};
use clap::Subcommand;
use kite::{Buffer, Cluster, Error, IoQueue, Mr, RemoteMemory, Rights, SendWr, Vqp, WrOp};

use super::{RemoteTarget, TIMEOUT};

/// Number of requests, larger than the depth of a VQP.
const REQUESTS: u64 = kite::VQP_DEPTH as u64 + 50;

/// Messages that a receiver queues.
const CREDITS: u64 = kite::VQP_RECV_CREDITS as u64;

/// VQP requests of an I/O queue
#[derive(Subcommand, Clone, Debug)]
pub(crate) enum QueueTest {
    /// Reads without pause; prints the number of system calls
    Steady {
        #[command(flatten)]
        target: RemoteTarget,
        /// Number of reads
        #[arg(long, default_value_t = 20_000)]
        operations: u64,
    },
    /// Submits more requests than the depth of a VQP, and one while the VQP is full of completions
    Full(RemoteTarget),
    /// Cancels requests during the lookup of an invalid key; later requests complete
    Cancel(RemoteTarget),
    /// Sends more messages than a port queues, reads by another VQP, and prints the results of the messages
    Backlog {
        #[command(flatten)]
        target: RemoteTarget,
        /// The port
        #[arg(long)]
        port: u32,
        /// Cancels a waiting message, and closes the VQP
        #[arg(long)]
        close: bool,
    },
}

impl QueueTest {
    pub(crate) fn run(&self) -> Result<()> {
        match self {
            Self::Steady { target, operations } => run_steady(target, *operations),
            Self::Full(target) => check_full(target),
            Self::Cancel(target) => check_cancel(target),
            Self::Backlog {
                target,
                port,
                close,
            } => run_backlog(target, *port, *close),
        }
    }
}

fn run_steady(target: &RemoteTarget, operations: u64) -> Result<()> {
    let cluster = Cluster::open()?;
    let local = cluster.reg_mr(Buffer::new(4096)?, Rights::empty())?;
    let vqp = cluster.connect(target.node)?;
    let mut queue = cluster.create_queue(kite::PUSH_BATCH_MAX as u32, 1)?;
    let read = target.send_wr(WrOp::Read, &local);
    // The first requests wait for the lookup of the key.
    push_reads(&mut queue, &vqp, read, 100)?;
    let before = queue.system_calls();
    push_reads(&mut queue, &vqp, read, operations)?;
    let calls = queue.system_calls() - before;
    println!("{operations} operations, {calls} system calls");
    Ok(())
}

/// Keeps as many requests in flight as the queue has entries. A normal client sleeps after some time. This one polls
/// without limit.
fn push_reads(queue: &mut IoQueue, vqp: &Vqp, work: SendWr<'_>, operations: u64) -> Result<()> {
    let (mut pushed, mut last) = (0, Instant::now());
    while pushed < operations || queue.in_flight() > 0 {
        while pushed < operations && !queue.is_full() {
            queue.push(
                vqp,
                &SendWr {
                    tag: pushed,
                    ..work
                },
            )?;
            pushed += 1;
        }
        queue.submit()?;
        match queue.try_next()? {
            Some(done) => {
                done.result?;
                last = Instant::now();
            }
            None => std::hint::spin_loop(),
        }
        ensure!(Some(last.elapsed()) < TIMEOUT, "no completion");
    }
    Ok(())
}

fn check_full(target: &RemoteTarget) -> Result<()> {
    let cluster = Cluster::open()?;
    let local = cluster.reg_mr(Buffer::new(4096)?, Rights::empty())?;
    let vqp = cluster.connect(target.node)?;
    let mut queue = cluster.create_queue(1024, 1)?;
    let read = target.send_wr(WrOp::Read, &local);
    for tag in 0..1024 {
        queue.push(&vqp, &SendWr { tag, ..read })?;
    }
    ensure!(
        queue.push(&vqp, &read) == Err(Error::QueueFull),
        "push to a full queue succeeded"
    );
    for tag in 0..1024 {
        let done = queue.wait()?;
        ensure!(done.tag == tag && done.result.is_ok(), "{tag}: {done:?}");
    }
    check_unpopped(&vqp, &mut queue, read)
}

/// Completions that are not popped leave no space for requests, by either interface.
fn check_unpopped(vqp: &Vqp, queue: &mut IoQueue, read: SendWr<'_>) -> Result<()> {
    let one = |queue: &mut IoQueue| -> Result<_> {
        queue.push(vqp, &read)?;
        Ok(queue.wait()?.result)
    };
    for _ in 0..kite::VQP_DEPTH / kite::PUSH_BATCH_MAX {
        vqp.push(&[read; kite::PUSH_BATCH_MAX])?;
    }
    let none = one(queue)?;
    ensure!(
        none == Err(Error::QueueFull),
        "request without a free VQP slot: {none:?}"
    );
    let mut left = kite::VQP_DEPTH;
    while left != 0 {
        left -= vqp.pop(left, TIMEOUT)?.len();
    }
    let some = one(queue)?;
    ensure!(some.is_ok(), "request with a free VQP slot: {some:?}");
    Ok(())
}

/// Checks that the key lookup of a canceled request does not affect another request.
fn check_cancel(target: &RemoteTarget) -> Result<()> {
    let cluster = Cluster::open()?;
    let local = cluster.reg_mr(Buffer::new(4096)?, Rights::empty())?;
    let mut queue = cluster.create_queue(4, 1)?;
    let good = target.send_wr(WrOp::Read, &local);
    let remote = RemoteMemory {
        rkey: target.key ^ (1 << 20),
        ..target.remote()
    };
    let wrong = SendWr { remote, ..good };
    let mut canceled = 0;
    for _ in 0..100 {
        // A new VQP has no cached keys.
        let vqp = cluster.connect(target.node)?;
        queue.push(&vqp, &SendWr { tag: 0, ..wrong })?;
        canceled += u64::from(queue.cancel(0)?);
        queue.push(&vqp, &SendWr { tag: 1, ..good })?;
        let done = [queue.wait()?, queue.wait()?];
        ensure!(done[0].tag == 0 && done[0].result.is_err(), "{done:?}");
        ensure!(done[1].tag == 1 && done[1].result.is_ok(), "{done:?}");
    }
    ensure!(canceled != 0, "no request was canceled");
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

fn run_backlog(target: &RemoteTarget, port: u32, close: bool) -> Result<()> {
    let cluster = Cluster::open()?;
    let local = cluster.reg_mr(Buffer::new(4096)?, Rights::empty())?;
    let (sends, reads) = (
        cluster.connect_to(target.node, port)?,
        cluster.connect(target.node)?,
    );
    let mut queue = cluster.create_queue(1024, 1)?;
    for tag in 0..REQUESTS {
        queue.push(&sends, &message(&local, tag))?;
    }
    for tag in REQUESTS..2 * REQUESTS {
        let read = target.send_wr(WrOp::Read, &local);
        queue.push(&reads, &SendWr { tag, ..read })?;
    }
    // Completions of the messages with receive credits, and of all reads.
    for _ in 0..CREDITS + REQUESTS {
        let done = queue.wait()?;
        let is_waiting = (CREDITS..REQUESTS).contains(&done.tag);
        ensure!(!is_waiting && done.result.is_ok(), "{done:?}");
    }
    println!("held");
    std::io::stdout().flush()?;
    if close {
        cancel_waiting(&mut queue)?;
        drop(sends);
    }
    println!("{:?}", count_errors(&mut queue)?);
    Ok(())
}

/// Cancels waiting requests. Those that the VQP has accepted continue.
fn cancel_waiting(queue: &mut IoQueue) -> Result<()> {
    ensure!(!queue.cancel(CREDITS)?, "canceled a request in flight");
    ensure!(
        queue.cancel(REQUESTS - 1)?,
        "cannot cancel a waiting request"
    );
    let done = queue.wait()?;
    let right = done.tag == REQUESTS - 1 && done.result == Err(Error::Canceled);
    ensure!(right, "{done:?}");
    Ok(())
}

/// Returns the number of other requests by error.
fn count_errors(queue: &mut IoQueue) -> Result<BTreeMap<String, u64>> {
    let mut errors = BTreeMap::new();
    while queue.in_flight() > 0 {
        let done = queue.wait()?;
        let error = done.result.err().context("unexpected success")?;
        *errors.entry(format!("{error:?}")).or_default() += 1;
    }
    Ok(errors)
}
