// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `rpc`: programs that serve a region, and programs that call them, such that a call or message that is
//! lost, made twice, out of order or answered by another's reply shows.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Mutex;
use std::time::Duration;

use anyhow::{anyhow, ensure, Result};
use clap::{Args, Subcommand};
use kite::{
    AllocOptions, Cluster, Error, IncomingRpc, PendingCall, Region, Rights, ServeOptions, Service,
    RPC_INLINE_BYTES,
};

use crate::support::random::Random;
use crate::support::threads::run_threads;

/// Nothing here is about time, and machines may be slow.
const PATIENCE: Duration = Duration::from_secs(120);

/// Functions of the servers. The function number is the position in this list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Function {
    /// Answers with the data, each byte inverted
    Invert,
    /// Adds 1 to the first word of the region, and answers with what it was
    Count,
    /// Keeps the call, and never answers
    Keep,
    /// Gives the call up
    Abandon,
    /// Ends the server's process
    Exit,
    /// A message: the number of a stream, and which message of it this is
    Next,
    /// Answers with how many messages of all streams have come
    Total,
}

const FUNCTIONS: [Function; 7] = [
    Function::Invert,
    Function::Count,
    Function::Keep,
    Function::Abandon,
    Function::Exit,
    Function::Next,
    Function::Total,
];

/// RPC servers and clients
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Rpc {
    Serve(Serve),
    /// Makes calls with random data of random lengths, and checks the replies
    Invert(Crowd),
    /// Makes calls that count, and prints the sum of all replies
    Count(Crowd),
    /// Sends messages, numbered, of a stream for each thread
    Send(Crowd),
    Try(Try),
    Desert(Desert),
}

/// Serves a region, which is made if it does not exist
#[derive(Args, Clone, Debug)]
pub(crate) struct Serve {
    /// The region
    name: String,
    /// Threads
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Bytes of each ring
    #[arg(long, default_value_t = 0)]
    ring: u32,
    /// Most bytes of data of a call
    #[arg(long, default_value_t = RPC_INLINE_BYTES as u32)]
    most: u32,
    /// Serves in name only: it takes no call
    #[arg(long)]
    asleep: bool,
}

/// Clients.
#[derive(Args, Clone, Debug)]
pub(crate) struct Crowd {
    /// The region
    name: String,
    /// Threads
    #[arg(long, default_value_t = 2)]
    threads: u64,
    /// Calls of each
    #[arg(long, default_value_t = 100)]
    operations: u64,
    /// Most bytes of data of each; by default what fits into a message, or what is needed
    #[arg(long)]
    most: Option<u64>,
}

/// Makes one call, and prints its reply or error
#[derive(Args, Clone, Debug)]
pub(crate) struct Try {
    /// The region
    name: String,
    /// The function
    #[arg(value_enum)]
    function: Function,
    /// Deadline in seconds
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Bytes of its data
    #[arg(long, default_value_t = 4)]
    bytes: usize,
    /// Again and again, until it is answered
    #[arg(long)]
    insist: bool,
}

/// Calls itself many times and waits for no reply, takes each call, and ends without answering one
#[derive(Args, Clone, Debug)]
pub(crate) struct Desert {
    /// Calls
    calls: u64,
}

impl Desert {
    fn run(&self) -> Result<()> {
        let region = Cluster::open()?.alloc(&AllocOptions::new(1))?;
        let service = region.serve(&ServeOptions::new())?;
        region.send(Function::Next as u32, &[])?;
        let hasty = region.clone().with_timeout(Duration::from_millis(1));
        let mut calls = Vec::new();
        service.receive(&mut [])?;
        for _ in 0..self.calls {
            let called = hasty.call(Function::Keep as u32, &[], &mut []);
            ensure!(called == Err(Error::TimedOut), "{called:?}");
            calls.push(service.receive(&mut [])?.call);
        }
        // All of them end with the process, not one by one.
        std::process::exit(0);
    }
}

impl Rpc {
    /// Does it.
    pub(crate) fn run(&self) -> Result<()> {
        match self {
            Rpc::Serve(serve) => serve.run(),
            Rpc::Invert(crowd) => crowd.invert(),
            Rpc::Count(crowd) => {
                println!("{}", crowd.count()?);
                Ok(())
            }
            Rpc::Send(crowd) => crowd.send(),
            Rpc::Try(attempt) => attempt.run(),
            Rpc::Desert(desert) => desert.run(),
        }
    }
}

fn map(name: &str, rights: Rights) -> Result<Region> {
    Ok(Cluster::open()?.map(name, rights)?.with_timeout(PATIENCE))
}

/// State of the servers of one process.
#[derive(Default)]
struct Kept {
    calls: Mutex<Vec<PendingCall>>,
    /// The last message of each stream of a node.
    streams: Mutex<HashMap<(u32, u64), u64>>,
    messages: AtomicU64,
}

impl Serve {
    fn options(&self) -> ServeOptions {
        ServeOptions::new().ring_size(self.ring).data_max(self.most)
    }

    fn run(&self) -> Result<()> {
        let rights = Rights::READ | Rights::WRITE | Rights::MASTER;
        let cluster = Cluster::open()?;
        let made = AllocOptions::new(4096)
            .name(&self.name)
            .other_rights(rights);
        let region = match cluster.alloc(&made) {
            Err(Error::Exists) => cluster.map(&self.name, rights)?,
            made => made?,
        };
        let service = region.serve(&self.options())?;
        println!("serving");
        if self.asleep {
            loop {
                std::thread::park();
            }
        }
        let kept = Kept::default();
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..self.threads)
                .map(|_| scope.spawn(|| serve(&service, &kept, self.most as usize)))
                .collect();
            let panicked = |_| Err(anyhow!("a thread panicked"));
            threads
                .into_iter()
                .try_for_each(|thread| thread.join().unwrap_or_else(panicked))
        })
    }
}

/// Answers calls, each together with waiting for the next.
fn serve(service: &Service, kept: &Kept, most: usize) -> Result<()> {
    let mut buffer = vec![0; most];
    let mut answer: Option<(PendingCall, Vec<u8>)> = None;
    loop {
        let incoming = match answer.take() {
            Some((call, reply)) => service.reply_receive(call, &reply, &mut buffer)?,
            None => service.receive(&mut buffer)?,
        };
        let function = FUNCTIONS.get(incoming.function as usize);
        let function = *function.ok_or_else(|| anyhow!("an odd function"))?;
        let reply = act(service, kept, function, &incoming)?;
        match (incoming.call, function) {
            (Some(call), Function::Keep) => kept.calls.lock().unwrap().push(call),
            (Some(_), Function::Abandon) | (None, _) => (),
            (Some(call), _) => answer = Some((call, reply)),
        }
    }
}

fn act(
    service: &Service,
    kept: &Kept,
    function: Function,
    incoming: &IncomingRpc<'_>,
) -> Result<Vec<u8>> {
    let data = incoming.data;
    Ok(match function {
        Function::Invert => data.iter().map(|byte| !byte).collect(),
        Function::Count => service.region().fetch_add(0, 1)?.to_ne_bytes().to_vec(),
        Function::Keep | Function::Abandon => Vec::new(),
        Function::Exit => std::process::abort(),
        Function::Next => {
            let (stream, number) = ((incoming.node, word(data, 0)?), word(data, 8)?);
            let last = kept.streams.lock().unwrap().insert(stream, number);
            ensure!(
                number == last.map_or(0, |last| last + 1),
                "stream {stream:?}: {number} after {last:?}"
            );
            let own = data[16..].iter().all(|&byte| byte == number as u8);
            ensure!(own, "stream {stream:?}: {number} has another's data");
            kept.messages.fetch_add(1, Ordering::Relaxed);
            Vec::new()
        }
        Function::Total => kept.messages.load(Ordering::Relaxed).to_ne_bytes().to_vec(),
    })
}

/// A length of data, as likely short as any.
fn length(random: &mut Random, most: u64) -> usize {
    let most = match random.below(2) {
        0 => most.min(RPC_INLINE_BYTES as u64),
        _ => most,
    };
    random.below(most + 1) as usize
}

fn word(data: &[u8], at: usize) -> Result<u64> {
    let word = data.get(at..at + 8).ok_or_else(|| anyhow!("too short"))?;
    Ok(u64::from_ne_bytes(word.try_into()?))
}

impl Crowd {
    fn invert(&self) -> Result<()> {
        let process = u64::from(std::process::id());
        let region = map(&self.name, Rights::WRITE)?;
        run_threads(self.threads, self.operations, |thread, i| {
            let mut random = Random::new((process << 32) | thread, i);
            let most = self.most.unwrap_or(RPC_INLINE_BYTES as u64);
            let mut data = vec![0; length(&mut random, most)];
            random.fill(&mut data);
            let mut reply = vec![0; data.len() + random.below(9) as usize];
            let len = region.call(Function::Invert as u32, &data, &mut reply)?;
            let same = data
                .iter()
                .map(|byte| !byte)
                .eq(reply[..len].iter().copied());
            ensure!(same, "{} bytes: another's reply, of {len}", data.len());
            Ok(())
        })
    }

    fn count(&self) -> Result<u64> {
        let sum = AtomicU64::new(0);
        let region = map(&self.name, Rights::WRITE)?;
        run_threads(self.threads, self.operations, |_, _| {
            let mut reply = [0; 8];
            let len = region.call(Function::Count as u32, &[], &mut reply)?;
            sum.fetch_add(word(&reply[..len], 0)?, Ordering::Relaxed);
            Ok(())
        })?;
        Ok(sum.into_inner())
    }

    fn send(&self) -> Result<()> {
        let process = u64::from(std::process::id());
        let region = map(&self.name, Rights::WRITE)?;
        run_threads(self.threads, self.operations, |thread, i| {
            let stream = (process << 32) | thread;
            let mut data = stream.to_ne_bytes().to_vec();
            data.extend(i.to_ne_bytes());
            let mut random = Random::new(stream, i);
            data.resize(16.max(length(&mut random, self.most.unwrap_or(0))), i as u8);
            Ok(region.send(Function::Next as u32, &data)?)
        })
    }
}

impl Try {
    fn run(&self) -> Result<()> {
        let region = Cluster::open()?.map(&self.name, Rights::WRITE)?;
        let region = region.with_timeout(Duration::from_secs(self.seconds));
        println!("calling");
        let data = vec![b'd'; self.bytes];
        let mut reply = vec![0; RPC_INLINE_BYTES.max(self.bytes)];
        let len = loop {
            match region.call(self.function as u32, &data, &mut reply) {
                Err(Error::ConnectionRefused | Error::ConnectionReset) if self.insist => (),
                replied => break replied?,
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        match len {
            8 => println!("{}", word(&reply, 0)?),
            len => println!("{len} bytes"),
        }
        Ok(())
    }
}
