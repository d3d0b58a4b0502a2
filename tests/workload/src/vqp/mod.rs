// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `vqp`: virtual queue pairs.
//!
//! `expose` registers memory and prints its address and key. The other programs access the memory ([`RemoteTarget`]),
//! or exchange messages.

mod count;
mod fork;
mod fuzz;
mod invalid;
mod isolation;
mod large;
mod messages;
mod model;
mod node_number;
mod notify;
mod order;
mod pusher;
mod queue;
mod stream;

use std::io::Write;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::{Args, Subcommand};
use kite::{Buffer, Cluster, Error, Mr, RemoteMemory, Rights, SendWr, WrOp};

/// Generous timeout, since machines may be slow.
const TIMEOUT: Option<Duration> = Some(Duration::from_secs(60));

/// Default bytes that `expose` registers.
const LEN: usize = 1 << 20;

/// Offset of the last word, which `count` increments.
const WORD: u64 = LEN as u64 - 8;

/// Virtual queue pairs.
#[derive(Subcommand, Clone, Debug)]
pub(crate) enum Vqps {
    /// Registers memory, prints its address and key, and waits until it is killed
    Expose {
        /// Rights of other users
        #[arg(long, default_value = "-")]
        others: Rights,
        /// Size in MiB
        #[arg(long, default_value_t = LEN >> 20)]
        mib: usize,
    },
    Check(model::VqpCheck),
    Fuzz(fuzz::VqpFuzz),
    QueryNumber(node_number::QueryNumber),
    ReadIsolation(isolation::ReadIsolation),
    Count(count::Count),
    ServeNumber(node_number::ServeNumber),
    Fork(fork::Fork),
    Large(large::Large),
    Order(order::Order),
    Echo(messages::Echo),
    Stream(stream::ReadStream),
    Ping(messages::Ping),
    PollEmpty(stream::PollEmpty),
    NotifyWrites(notify::NotifyWrites),
    VerifyWrites(notify::VerifyWrites),
    /// Sends to a port until an error, and prints the error
    SendUntilError(messages::SendUntilError),
    /// Accepts a peer of a port, and receives none of its messages until it is killed
    Idle {
        /// The port
        port: u32,
        /// Receives all messages instead
        #[arg(long)]
        receive: bool,
        /// Receives once this file exists
        #[arg(long)]
        start_file: Option<std::path::PathBuf>,
    },
    /// Sends one message more than a port queues, writes, and prints the result of the write
    DelayedWrite {
        #[command(flatten)]
        target: RemoteTarget,
        /// The port
        #[arg(long)]
        port: u32,
    },
    /// Reads by a VQP, and reads again by the same VQP once a file exists
    ReadTwice {
        #[command(flatten)]
        target: RemoteTarget,
        /// Reads again once this file exists
        #[arg(long)]
        start_file: std::path::PathBuf,
    },
    /// Pushes invalid requests of each kind, and checks their errors
    Invalid {
        #[command(flatten)]
        target: RemoteTarget,
        /// Uses an I/O queue, with a valid request before and after each
        #[arg(long)]
        queue: bool,
    },
    #[command(subcommand)]
    Queue(queue::QueueTest),
    /// Connects and closes repeatedly, and prints the mean time in microseconds
    Connect {
        /// The node
        node: u32,
        /// Number of connections
        #[arg(long, default_value_t = 1)]
        times: u32,
    },
}

/// Memory of a node.
#[derive(Args, Clone, Debug)]
pub(crate) struct RemoteTarget {
    /// The node
    node: u32,
    /// Address of its memory
    addr: u64,
    /// Key of its memory
    key: u32,
}

impl Vqps {
    pub(crate) fn run(&self) -> Result<()> {
        match self {
            Self::Expose { others, mib } => expose(*others, mib << 20),
            Self::Check(check) => check.run(),
            Self::Fuzz(fuzz) => fuzz.run(),
            Self::QueryNumber(query) => query.run(),
            Self::ReadIsolation(isolation) => isolation.run(),
            Self::Count(count) => count.run(),
            Self::ServeNumber(serve) => serve.run(),
            Self::Fork(fork) => fork.run(),
            Self::Large(large) => large.run(),
            Self::Order(order) => order.run(),
            Self::Echo(echo) => echo.run(),
            Self::Stream(stream) => stream.run(),
            Self::Ping(ping) => ping.run(),
            Self::PollEmpty(poll) => poll.run(),
            Self::NotifyWrites(notify) => notify.run(),
            Self::VerifyWrites(verify) => verify.run(),
            Self::SendUntilError(send) => send.run(),
            Self::Idle {
                port,
                receive,
                start_file,
            } => messages::run_idle_peer(*port, *receive, start_file.as_deref()),
            Self::DelayedWrite { target, port } => messages::push_delayed_write(target, *port),
            Self::ReadTwice { target, start_file } => target.read_twice(start_file),
            Self::Invalid { target, queue } => target.check_invalid(*queue),
            Self::Queue(queue) => queue.run(),
            Self::Connect { node, times } => connect_repeatedly(*node, *times),
        }
    }
}

/// Flushes the standard output, and waits until `file` exists.
fn wait_for_file(file: &std::path::Path) -> Result<()> {
    std::io::stdout().flush()?;
    while !file.exists() {
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

fn expose(others: Rights, len: usize) -> Result<()> {
    let cluster = Cluster::open()?;
    let memory = cluster.reg_mr(Buffer::new(len)?, others)?;
    let RemoteMemory { addr, rkey: key } = memory.remote_memory();
    println!("{addr} {key}");
    std::io::stdout().flush()?;
    loop {
        std::thread::park();
    }
}

fn connect_repeatedly(node: u32, times: u32) -> Result<()> {
    let cluster = Cluster::open()?;
    let start = Instant::now();
    for _ in 0..times {
        drop(cluster.connect(node)?);
    }
    println!("{}", start.elapsed().as_micros() / u128::from(times.max(1)));
    Ok(())
}

impl RemoteTarget {
    fn remote(&self) -> RemoteMemory {
        RemoteMemory {
            addr: self.addr,
            rkey: self.key,
        }
    }

    /// Returns a request for 8 bytes.
    fn send_wr<'a>(&self, verb: WrOp, local: &'a Mr) -> SendWr<'a> {
        SendWr {
            tag: 1,
            op: verb,
            local,
            local_offset: 0,
            len: 8,
            remote: self.remote(),
            remote_offset: 0,
            immediate: None,
            signaled: true,
            fence: false,
        }
    }

    fn read_twice(&self, start_file: &std::path::Path) -> Result<()> {
        let cluster = Cluster::open()?;
        let local = cluster.reg_mr(Buffer::new(8)?, Rights::empty())?;
        let vqp = cluster.connect(self.node)?;
        let read = || -> Result<()> {
            vqp.push(&[self.send_wr(WrOp::Read, &local)])?;
            vqp.pop(1, TIMEOUT)?[0].result?;
            Ok(())
        };
        read()?;
        println!("read");
        wait_for_file(start_file)?;
        read()
    }
}

/// Returns `true` for the errors of requests to a failed node.
fn is_node_failure(error: &anyhow::Error) -> bool {
    matches!(
        error.downcast_ref(),
        Some(Error::TimedOut | Error::HostDown | Error::Canceled)
    )
}
