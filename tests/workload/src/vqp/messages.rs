// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Messages between VQPs: one side sends and writes with immediate data, the other returns the received bytes. Both
//! have several messages in flight, each in a buffer of its own.

use std::collections::VecDeque;
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use anyhow::{bail, ensure, Context, Result};
use clap::Args;
use kite::{Buffer, Cluster, Error, Mr, RemoteMemory, Rights, SendWr, Vqp, WrOp};

use super::pusher::{PushInterface, Pusher};
use super::{wait_for_file, RemoteTarget, TIMEOUT};
use crate::support::random::Random;

/// Messages in flight of one side.
const DEPTH: usize = kite::PUSH_BATCH_MAX;

/// Default bytes of the buffer of a message.
const BUFFER_BYTES: usize = 128 << 10;

/// Buffers of each side: to send from, to receive to, and for writes of the peer.
#[derive(Args, Clone, Copy, Debug)]
struct BufferLayout {
    /// Bytes of the buffer of a message
    #[arg(long, default_value_t = BUFFER_BYTES)]
    buffer_size: usize,
}

impl BufferLayout {
    fn total_len(self) -> usize {
        3 * DEPTH * self.buffer_size
    }

    fn send_offset(self, i: u32) -> usize {
        i as usize % DEPTH * self.buffer_size
    }

    fn recv_offset(self, i: u32) -> usize {
        DEPTH * self.buffer_size + self.send_offset(i)
    }

    fn write_offset(self, i: u32) -> usize {
        2 * DEPTH * self.buffer_size + self.send_offset(i)
    }
}

/// Sends the messages of each peer back
#[derive(Args, Clone, Debug)]
pub(crate) struct Echo {
    /// The port
    port: u32,
    #[command(flatten)]
    layout: BufferLayout,
}

/// Sends messages of random lengths to an echo server, and checks the replies
#[derive(Args, Clone, Debug)]
pub(crate) struct Ping {
    /// Node of the server
    node: u32,
    /// Port of the server
    port: u32,
    /// Number of messages
    #[arg(long, default_value_t = 200)]
    messages: u32,
    /// Maximum length of a message
    #[arg(long, default_value_t = BUFFER_BYTES)]
    len_max: usize,
    #[command(flatten)]
    layout: BufferLayout,
    /// Starts once this file exists
    #[arg(long)]
    start_file: Option<PathBuf>,
    /// Seed of all random numbers
    #[arg(long, default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    interface: PushInterface,
}

/// Sends messages until an error.
#[derive(Args, Clone, Debug)]
pub(crate) struct SendUntilError {
    /// Node of the server
    node: u32,
    /// Port of the server
    port: u32,
    /// Bytes of each message
    #[arg(long, default_value_t = 8)]
    len: usize,
    /// User that the server must belong to
    #[arg(long)]
    owner: Option<u32>,
}

/// Returns a message of `len` bytes at offset `at`.
fn message(local: &Mr, at: usize, len: usize, number: Option<u32>) -> SendWr<'_> {
    SendWr {
        tag: number.unwrap_or_default().into(),
        op: WrOp::Send,
        local,
        local_offset: at,
        len,
        remote: RemoteMemory::default(),
        remote_offset: 0,
        immediate: number,
        signaled: true,
        fence: false,
    }
}

/// Waits for completions until at most `left` requests are pending.
fn await_completions(vqp: &mut Pusher<'_>, pending: &mut usize, left: usize) -> Result<()> {
    while *pending > left {
        let done = vqp.pop(*pending, TIMEOUT)?;
        for done in &done {
            done.result?;
        }
        *pending -= done.len();
    }
    Ok(())
}

impl Echo {
    pub(crate) fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        let listener = cluster.listen(self.port)?;
        println!("ready");
        std::io::stdout().flush()?;
        loop {
            let (vqp, peer) = match listener.accept(TIMEOUT) {
                Err(Error::TimedOut) => continue,
                accepted => accepted?,
            };
            let (cluster, layout) = (cluster.clone(), self.layout);
            thread::spawn(move || {
                if let Err(error) = echo(&cluster, &vqp, layout) {
                    eprintln!("node {}: {error:#}", peer.node);
                }
            });
        }
    }
}

/// Sends the received bytes back until the peer closes.
fn echo(cluster: &Cluster, vqp: &Vqp, layout: BufferLayout) -> Result<()> {
    let local = cluster.reg_mr(
        Buffer::new(layout.total_len())?,
        Rights::READ | Rights::WRITE,
    )?;
    let RemoteMemory { addr, rkey: key } = local.remote_memory();
    let header = [&addr.to_le_bytes()[..], &key.to_le_bytes()].concat();
    local.buffer().store(layout.send_offset(0), &header)?;
    vqp.receive(&local, layout.recv_offset(0), layout.buffer_size, TIMEOUT)?;
    let mut pusher = PushInterface::CALLS.open(cluster, vqp)?;
    pusher.push(&[message(&local, layout.send_offset(0), header.len(), None)])?;
    let mut pending = 1;
    for round in 0.. {
        // The next buffer must be free: its last message was sent.
        await_completions(&mut pusher, &mut pending, DEPTH - 1)?;
        let received = match vqp.receive(
            &local,
            layout.recv_offset(round),
            layout.buffer_size,
            TIMEOUT,
        ) {
            Err(Error::ConnectionReset) => break,
            received => received?,
        };
        let number = received.immediate.context("message without a number")?;
        let at = if received.is_placed {
            layout.write_offset(number)
        } else {
            layout.recv_offset(round)
        };
        pusher.push(&[message(&local, at, received.len, Some(number))])?;
        pending += 1;
    }
    Ok(())
}

/// State of the pinging side.
struct PingClient<'a> {
    ping: &'a Ping,
    vqp: &'a Vqp,
    pusher: Pusher<'a>,
    local: Mr,
    remote: RemoteMemory,
    random: Random,
    /// Sent messages without a reply.
    expected: VecDeque<Vec<u8>>,
    /// Number of received replies.
    received: u32,
    pending: usize,
}

impl Ping {
    pub(crate) fn run(&self) -> Result<()> {
        let (cluster, layout) = (Cluster::open()?, self.layout);
        let local = cluster.reg_mr(Buffer::new(layout.total_len())?, Rights::empty())?;
        let vqp = cluster.connect_to(self.node, self.port)?;
        let mut pusher = self.interface.open(&cluster, &vqp)?;
        // The listener may not exist yet.
        pusher.push(&[message(&local, layout.send_offset(0), 1, None)])?;
        let mut place = [0; 12];
        let short = vqp.receive(&local, layout.recv_offset(0), place.len() - 1, TIMEOUT);
        ensure!(
            short == Err(Error::MessageTooLong),
            "receive into a short buffer: {short:?}"
        );
        let header = vqp.receive(&local, layout.recv_offset(0), layout.buffer_size, TIMEOUT)?;
        ensure!(header.len == place.len(), "invalid header: {header:?}");
        local.buffer().load(layout.recv_offset(0), &mut place)?;
        let (addr, key) = place.split_at(8);
        let remote = RemoteMemory {
            addr: u64::from_le_bytes(addr.try_into()?),
            rkey: u32::from_le_bytes(key.try_into()?),
        };
        if let Some(file) = &self.start_file {
            println!("connected");
            wait_for_file(file)?;
        }
        let mut client = PingClient {
            ping: self,
            vqp: &vqp,
            pusher,
            local,
            remote,
            random: Random::new(self.seed, 0),
            expected: VecDeque::new(),
            received: 0,
            pending: 1,
        };
        let mut number = 0;
        while number < self.messages {
            let count = 1 + client.random.below(DEPTH as u64) as u32;
            let next = self.messages.min(number + count);
            let header = client.send_batch(number..next);
            header.with_context(|| format!("messages from {number}"))?;
            number = next;
        }
        while !client.expected.is_empty() {
            client.receive_echo()?;
        }
        await_completions(&mut client.pusher, &mut client.pending, 0)
    }
}

impl PingClient<'_> {
    /// Pushes a batch of messages, once enough buffers are free.
    fn send_batch(&mut self, numbers: Range<u32>) -> Result<()> {
        let left = DEPTH - numbers.len();
        while self.expected.len() > left {
            self.receive_echo()?;
        }
        await_completions(&mut self.pusher, &mut self.pending, left)?;
        let mut works = Vec::new();
        for number in numbers.clone() {
            let len = 1 + self.random.size(self.ping.len_max as u64 - 1) as usize;
            let mut bytes = vec![0; len];
            self.random.fill(&mut bytes);
            self.local
                .buffer()
                .store(self.ping.layout.send_offset(number), &bytes)?;
            self.expected.push_back(bytes);
            let send = message(
                &self.local,
                self.ping.layout.send_offset(number),
                len,
                Some(number),
            );
            let write = SendWr {
                op: WrOp::Write,
                remote: self.remote,
                remote_offset: self.ping.layout.write_offset(number) as u64,
                ..send
            };
            works.push(if self.random.below(3) == 0 {
                write
            } else {
                send
            });
        }
        self.pusher.push(&works)?;
        self.pending += works.len();
        Ok(())
    }

    /// Receives the next reply.
    fn receive_echo(&mut self) -> Result<()> {
        let expected = self.expected.pop_front().context("no reply is expected")?;
        let at = self.ping.layout.recv_offset(self.received);
        let message = self
            .vqp
            .receive(&self.local, at, self.ping.layout.buffer_size, TIMEOUT)?;
        ensure!(
            message.immediate == Some(self.received),
            "{message:?} is out of order"
        );
        let mut found = vec![0; message.len];
        self.local.buffer().load(at, &mut found)?;
        ensure!(found == expected, "CORRUPT: message {}", self.received);
        self.received += 1;
        Ok(())
    }
}

impl SendUntilError {
    pub(crate) fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        let local = cluster.reg_mr(Buffer::new(1 << 20)?, Rights::empty())?;
        let vqp = match self.owner {
            None => cluster.connect_to(self.node, self.port)?,
            Some(owner) => cluster.connect_to_owner(self.node, self.port, owner)?,
        };
        for sent in 0.. {
            let error = match vqp.push(&[message(&local, 0, self.len, Some(sent))]) {
                // The peer receives no messages.
                Err(Error::QueueFull) => self.await_failure(&vqp)?,
                Ok(()) => match vqp.pop(1, None) {
                    Err(Error::WouldBlock) => continue,
                    Err(error) => error,
                    Ok(done) => match done[0].result {
                        Ok(_) => continue,
                        Err(error) => error,
                    },
                },
                Err(error) => error,
            };
            println!("{error}");
            let again = vqp.push(&[message(&local, 0, self.len, None)]);
            ensure!(again == Err(error), "push after the error: {again:?}");
            return Ok(());
        }
        bail!("no error after 2^32 messages")
    }

    /// Waits for the first failed completion.
    fn await_failure(&self, vqp: &Vqp) -> Result<Error> {
        println!("full");
        std::io::stdout().flush()?;
        loop {
            match vqp.pop(1, Some(Duration::from_secs(3600))) {
                Err(error) => return Ok(error),
                Ok(done) => {
                    if let Err(error) = done[0].result {
                        return Ok(error);
                    }
                }
            }
        }
    }
}

pub(crate) fn run_idle_peer(port: u32, receives: bool, start_file: Option<&Path>) -> Result<()> {
    let cluster = Cluster::open()?;
    let local = cluster.reg_mr(Buffer::new(1 << 20)?, Rights::empty())?;
    let listener = cluster.listen(port)?;
    println!("ready");
    std::io::stdout().flush()?;
    let (vqp, _) = listener.accept(TIMEOUT)?;
    println!("accepted");
    std::io::stdout().flush()?;
    if !receives {
        loop {
            thread::park();
        }
    }
    while start_file.is_some_and(|file| !file.exists()) {
        thread::sleep(Duration::from_millis(10));
    }
    loop {
        match vqp.receive(&local, 0, 1 << 20, TIMEOUT) {
            Err(Error::ConnectionReset) => return Ok(()),
            received => received?,
        };
    }
}

/// Pushes a write behind a message that waits for receive credits. The kernel checks the write at the push.
pub(crate) fn push_delayed_write(target: &RemoteTarget, port: u32) -> Result<()> {
    let cluster = Cluster::open()?;
    let local = cluster.reg_mr(Buffer::new(4096)?, Rights::empty())?;
    let vqp = cluster.connect_to(target.node, port)?;
    let send = message(&local, 0, 8, None);
    let write = SendWr {
        op: WrOp::Write,
        remote: target.remote(),
        ..send
    };
    for _ in 0..kite::VQP_RECV_CREDITS {
        vqp.push(&[send])?;
    }
    vqp.push(&[send])?;
    vqp.push(&[write])?;
    println!("pushed");
    std::io::stdout().flush()?;
    let mut left = kite::VQP_RECV_CREDITS + 2;
    loop {
        let done = vqp.pop(left, TIMEOUT)?;
        left -= done.len();
        let last = done.last().map(|done| done.result);
        match last.filter(|_| left == 0) {
            Some(result) => {
                println!(
                    "{}",
                    result.map_or_else(|error| error.to_string(), |_| "written".into())
                );
                return Ok(());
            }
            None => ensure!(done.iter().all(|done| done.result.is_ok()), "{done:?}"),
        }
    }
}
