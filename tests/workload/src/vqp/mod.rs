// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `vqp`: virtual queue pairs.
//!
//! `offer` registers memory and prints its address and key. The other programs access the memory ([`To`]), or
//! exchange messages.

mod abuse;
mod ask;
mod beside;
mod count;
mod fork;
mod large;
mod model;
mod order;
mod pusher;
mod queue;
mod refused;
mod stream;
mod talk;
mod told;

use std::io::Write;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::{Args, Subcommand};
use kite::{Buffer, Cluster, Error, Mr, RemoteMemory, Rights, SendWr, WrOp};

/// Nothing here is about time, and machines may be slow.
const PATIENCE: Option<Duration> = Some(Duration::from_secs(60));

/// Default bytes that `offer` registers.
const LEN: usize = 1 << 20;

/// The last word of it is for counting.
const WORD: u64 = LEN as u64 - 8;

/// Virtual queue pairs.
#[derive(Subcommand, Clone, Debug)]
pub(crate) enum Vqps {
    /// Registers memory, prints its address and key, and waits until it is killed
    Offer {
        /// Rights of other users
        #[arg(long, default_value = "-")]
        others: Rights,
        /// MiB of it
        #[arg(long, default_value_t = LEN >> 20)]
        mib: usize,
    },
    /// Random requests, in pushes of random lengths, against a model of a part of the memory
    Check(model::Check),
    Abuse(abuse::Abuse),
    Ask(ask::Ask),
    Beside(beside::Beside),
    Count(count::Count),
    Say(ask::Say),
    Fork(fork::Fork),
    Large(large::Large),
    Order(order::Order),
    Echo(talk::Echo),
    Stream(stream::Stream),
    Talk(talk::Talk),
    Tell(told::Tell),
    Written(told::Written),
    /// Sends to a port until an error, and prints the error
    Last(talk::Last),
    /// Accepts a peer of a port, and receives none of its messages until it is killed
    Idle {
        /// The port
        port: u32,
        /// Takes all of them instead
        #[arg(long)]
        takes: bool,
        /// When this file is there
        #[arg(long)]
        when: Option<std::path::PathBuf>,
    },
    /// Sends one message more than a port queues, then writes, and prints the result of the write
    Late {
        #[command(flatten)]
        to: To,
        /// The port
        #[arg(long)]
        port: u32,
    },
    /// Reads by a queue pair, and once more by the same when a file is there
    Again {
        #[command(flatten)]
        to: To,
        /// The file
        #[arg(long)]
        when: std::path::PathBuf,
    },
    /// Requests of each kind that are refused, each by its error
    Refused {
        #[command(flatten)]
        to: To,
        /// By a queue, each between two that are done
        #[arg(long)]
        queue: bool,
    },
    #[command(subcommand)]
    Queue(queue::ByQueue),
    /// Connects and closes so many times, and prints the microseconds that one takes
    Connect {
        /// To this node
        node: u32,
        /// So many times
        #[arg(long, default_value_t = 1)]
        times: u32,
    },
}

/// Memory of a node.
#[derive(Args, Clone, Debug)]
pub(crate) struct To {
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
            Self::Offer { others, mib } => offer(*others, mib << 20),
            Self::Check(check) => check.run(),
            Self::Abuse(abuse) => abuse.run(),
            Self::Ask(ask) => ask.run(),
            Self::Beside(beside) => beside.run(),
            Self::Count(count) => count.run(),
            Self::Say(say) => say.run(),
            Self::Fork(fork) => fork.run(),
            Self::Large(large) => large.run(),
            Self::Order(order) => order.run(),
            Self::Echo(echo) => echo.run(),
            Self::Stream(stream) => stream.run(),
            Self::Talk(talk) => talk.run(),
            Self::Tell(tell) => tell.run(),
            Self::Written(written) => written.run(),
            Self::Last(last) => last.run(),
            Self::Idle { port, takes, when } => talk::idle(*port, *takes, when.as_deref()),
            Self::Late { to, port } => talk::late(to, *port),
            Self::Again { to, when } => to.again(when),
            Self::Refused { to, queue } => to.refused(*queue),
            Self::Queue(queue) => queue.run(),
            Self::Connect { node, times } => connect(*node, *times),
        }
    }
}

/// Shows what was printed, and waits until the file is there.
fn await_file(file: &std::path::Path) -> Result<()> {
    std::io::stdout().flush()?;
    while !file.exists() {
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

fn offer(others: Rights, len: usize) -> Result<()> {
    let cluster = Cluster::open()?;
    let memory = cluster.reg_mr(Buffer::new(len)?, others)?;
    let RemoteMemory { addr, rkey: key } = memory.remote_memory();
    println!("{addr} {key}");
    std::io::stdout().flush()?;
    loop {
        std::thread::park();
    }
}

fn connect(node: u32, times: u32) -> Result<()> {
    let cluster = Cluster::open()?;
    let start = Instant::now();
    for _ in 0..times {
        drop(cluster.connect(node)?);
    }
    println!("{}", start.elapsed().as_micros() / u128::from(times.max(1)));
    Ok(())
}

impl To {
    fn remote(&self) -> RemoteMemory {
        RemoteMemory {
            addr: self.addr,
            rkey: self.key,
        }
    }

    /// A request for 8 bytes, to be changed.
    fn work<'a>(&self, verb: WrOp, local: &'a Mr) -> SendWr<'a> {
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

    fn again(&self, when: &std::path::Path) -> Result<()> {
        let cluster = Cluster::open()?;
        let local = cluster.reg_mr(Buffer::new(8)?, Rights::empty())?;
        let vqp = cluster.connect(self.node)?;
        let read = || -> Result<()> {
            vqp.push(&[self.work(WrOp::Read, &local)])?;
            vqp.pop(1, PATIENCE)?[0].result?;
            Ok(())
        };
        read()?;
        println!("read");
        await_file(when)?;
        read()
    }
}

/// Returns `true` for the errors of requests to a node that has died.
fn died(error: &anyhow::Error) -> bool {
    matches!(
        error.downcast_ref(),
        Some(Error::TimedOut | Error::HostDown | Error::Canceled)
    )
}
