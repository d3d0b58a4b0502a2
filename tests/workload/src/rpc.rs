// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `rpc`: servers and clients of a region. They detect calls and messages that are lost, duplicated or reordered, and
//! replies to another call.

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

/// Generous timeout, since machines may be slow.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Functions of the servers. The function number is the position in this list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Function {
    /// Replies with the data, each byte inverted
    Invert,
    /// Increments the first word of the region, and replies with the previous value
    Count,
    /// Keeps the call without a reply
    Keep,
    /// Aborts the call
    Abort,
    /// Aborts the server process
    Exit,
    /// Message with the number of its stream, and its number in the stream
    Next,
    /// Replies with the number of messages of all streams
    Total,
}

const FUNCTIONS: [Function; 7] = [
    Function::Invert,
    Function::Count,
    Function::Keep,
    Function::Abort,
    Function::Exit,
    Function::Next,
    Function::Total,
];

/// RPC servers and clients
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Rpc {
    Serve(RpcServer),
    /// Makes calls with random data of random lengths, and checks the replies
    Invert(RpcClients),
    /// Makes `count` calls, and prints the sum of all replies
    Count(RpcClients),
    /// Sends numbered messages, one stream per thread
    Send(RpcClients),
    Call(SingleCall),
    ExitUnanswered(ExitUnanswered),
}

/// Serves a region, and allocates the region if it does not exist
#[derive(Args, Clone, Debug)]
pub(crate) struct RpcServer {
    /// The region
    name: String,
    /// Threads
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Bytes of each ring
    #[arg(long, default_value_t = 0)]
    ring: u32,
    /// Maximum bytes of data of a call
    #[arg(long, default_value_t = RPC_INLINE_BYTES as u32)]
    data_max: u32,
    /// Registers the service without receiving calls
    #[arg(long)]
    no_receive: bool,
}

/// Clients.
#[derive(Args, Clone, Debug)]
pub(crate) struct RpcClients {
    /// The region
    name: String,
    /// Threads
    #[arg(long, default_value_t = 2)]
    threads: u64,
    /// Calls of each thread
    #[arg(long, default_value_t = 100)]
    operations: u64,
    /// Maximum bytes of data of a call [default: size of an inline message, or the minimum]
    #[arg(long)]
    data_max: Option<u64>,
}

/// Makes one call, and prints its reply or error
#[derive(Args, Clone, Debug)]
pub(crate) struct SingleCall {
    /// The region
    name: String,
    /// The function
    #[arg(value_enum)]
    function: Function,
    /// Deadline in seconds
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Bytes of the data
    #[arg(long, default_value_t = 4)]
    bytes: usize,
    /// Repeats the call until it has a reply
    #[arg(long)]
    retry: bool,
}

/// Calls its own service with a short timeout, receives each call, and exits without a reply
#[derive(Args, Clone, Debug)]
pub(crate) struct ExitUnanswered {
    /// Number of calls
    calls: u64,
}

impl ExitUnanswered {
    fn run(&self) -> Result<()> {
        let region = Cluster::open()?.alloc(&AllocOptions::new(1))?;
        let service = region.serve(&ServeOptions::new())?;
        region.send(Function::Next as u32, &[])?;
        let short_timeout = region.clone().with_timeout(Duration::from_millis(1));
        let mut calls = Vec::new();
        service.receive(&mut [])?;
        for _ in 0..self.calls {
            let called = short_timeout.call(Function::Keep as u32, &[], &mut []);
            ensure!(called == Err(Error::TimedOut), "{called:?}");
            calls.push(service.receive(&mut [])?.call);
        }
        // The kernel must close all calls with the process.
        std::process::exit(0);
    }
}

impl Rpc {
    /// Runs the subcommand.
    pub(crate) fn run(&self) -> Result<()> {
        match self {
            Rpc::Serve(serve) => serve.run(),
            Rpc::Invert(clients) => clients.call_invert(),
            Rpc::Count(clients) => {
                println!("{}", clients.call_count()?);
                Ok(())
            }
            Rpc::Send(clients) => clients.send_messages(),
            Rpc::Call(call) => call.run(),
            Rpc::ExitUnanswered(exit) => exit.run(),
        }
    }
}

fn map(name: &str, rights: Rights) -> Result<Region> {
    Ok(Cluster::open()?.map(name, rights)?.with_timeout(TIMEOUT))
}

/// State of the servers of one process.
#[derive(Default)]
struct ServerState {
    calls: Mutex<Vec<PendingCall>>,
    /// Number of the last message by node and stream.
    streams: Mutex<HashMap<(u32, u64), u64>>,
    messages: AtomicU64,
}

impl RpcServer {
    fn options(&self) -> ServeOptions {
        ServeOptions::new()
            .ring_size(self.ring)
            .data_max(self.data_max)
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
        if self.no_receive {
            loop {
                std::thread::park();
            }
        }
        let state = ServerState::default();
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..self.threads)
                .map(|_| scope.spawn(|| serve(&service, &state, self.data_max as usize)))
                .collect();
            let panicked = |_| Err(anyhow!("a thread panicked"));
            threads
                .into_iter()
                .try_for_each(|thread| thread.join().unwrap_or_else(panicked))
        })
    }
}

/// Serves calls. Each reply also receives the next call.
fn serve(service: &Service, state: &ServerState, data_max: usize) -> Result<()> {
    let mut buffer = vec![0; data_max];
    let mut answer: Option<(PendingCall, Vec<u8>)> = None;
    loop {
        let incoming = match answer.take() {
            Some((call, reply)) => service.reply_receive(call, &reply, &mut buffer)?,
            None => service.receive(&mut buffer)?,
        };
        let function = FUNCTIONS.get(incoming.function as usize);
        let function = *function.ok_or_else(|| anyhow!("unknown function"))?;
        let reply = execute(service, state, function, &incoming)?;
        match (incoming.call, function) {
            (Some(call), Function::Keep) => state.calls.lock().unwrap().push(call),
            (Some(_), Function::Abort) | (None, _) => (),
            (Some(call), _) => answer = Some((call, reply)),
        }
    }
}

fn execute(
    service: &Service,
    state: &ServerState,
    function: Function,
    incoming: &IncomingRpc<'_>,
) -> Result<Vec<u8>> {
    let data = incoming.data;
    Ok(match function {
        Function::Invert => data.iter().map(|byte| !byte).collect(),
        Function::Count => service.region().fetch_add(0, 1)?.to_ne_bytes().to_vec(),
        Function::Keep | Function::Abort => Vec::new(),
        Function::Exit => std::process::abort(),
        Function::Next => {
            let (stream, number) = ((incoming.node, word(data, 0)?), word(data, 8)?);
            let last = state.streams.lock().unwrap().insert(stream, number);
            ensure!(
                number == last.map_or(0, |last| last + 1),
                "stream {stream:?}: {number} after {last:?}"
            );
            let own = data[16..].iter().all(|&byte| byte == number as u8);
            ensure!(own, "stream {stream:?}: {number} has wrong data");
            state.messages.fetch_add(1, Ordering::Relaxed);
            Vec::new()
        }
        Function::Total => state
            .messages
            .load(Ordering::Relaxed)
            .to_ne_bytes()
            .to_vec(),
    })
}

/// Returns a length, in half of all cases at most that of an inline message.
fn random_length(random: &mut Random, data_max: u64) -> usize {
    let data_max = match random.below(2) {
        0 => data_max.min(RPC_INLINE_BYTES as u64),
        _ => data_max,
    };
    random.below(data_max + 1) as usize
}

fn word(data: &[u8], at: usize) -> Result<u64> {
    let word = data
        .get(at..at + 8)
        .ok_or_else(|| anyhow!("reply or message too short"))?;
    Ok(u64::from_ne_bytes(word.try_into()?))
}

impl RpcClients {
    fn call_invert(&self) -> Result<()> {
        let process = u64::from(std::process::id());
        let region = map(&self.name, Rights::WRITE)?;
        run_threads(self.threads, self.operations, |thread, i| {
            let mut random = Random::new((process << 32) | thread, i);
            let data_max = self.data_max.unwrap_or(RPC_INLINE_BYTES as u64);
            let mut data = vec![0; random_length(&mut random, data_max)];
            random.fill(&mut data);
            let mut reply = vec![0; data.len() + random.below(9) as usize];
            let len = region.call(Function::Invert as u32, &data, &mut reply)?;
            let same = data
                .iter()
                .map(|byte| !byte)
                .eq(reply[..len].iter().copied());
            ensure!(
                same,
                "call of {} bytes: wrong reply of {len} bytes",
                data.len()
            );
            Ok(())
        })
    }

    fn call_count(&self) -> Result<u64> {
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

    fn send_messages(&self) -> Result<()> {
        let process = u64::from(std::process::id());
        let region = map(&self.name, Rights::WRITE)?;
        run_threads(self.threads, self.operations, |thread, i| {
            let stream = (process << 32) | thread;
            let mut data = stream.to_ne_bytes().to_vec();
            data.extend(i.to_ne_bytes());
            let mut random = Random::new(stream, i);
            data.resize(
                16.max(random_length(&mut random, self.data_max.unwrap_or(0))),
                i as u8,
            );
            Ok(region.send(Function::Next as u32, &data)?)
        })
    }
}

impl SingleCall {
    fn run(&self) -> Result<()> {
        let region = Cluster::open()?.map(&self.name, Rights::WRITE)?;
        let region = region.with_timeout(Duration::from_secs(self.seconds));
        println!("calling");
        let data = vec![b'd'; self.bytes];
        let mut reply = vec![0; RPC_INLINE_BYTES.max(self.bytes)];
        let len = loop {
            match region.call(self.function as u32, &data, &mut reply) {
                Err(Error::ConnectionRefused | Error::ConnectionReset) if self.retry => (),
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
