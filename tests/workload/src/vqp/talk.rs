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

use super::pusher::{Pusher, Way};
use super::{await_file, To, PATIENCE};
use crate::support::random::Random;

/// Messages under way of one side.
const DEPTH: usize = kite::PUSH_BATCH_MAX;

/// Default bytes of the buffer of a message.
const PLACE: usize = 128 << 10;

/// Buffers of each side: to send from, to receive to, and for writes of the peer.
#[derive(Args, Clone, Copy, Debug)]
struct Places {
    /// Bytes of the place of a message
    #[arg(long, default_value_t = PLACE)]
    place: usize,
}

impl Places {
    fn all(self) -> usize {
        3 * DEPTH * self.place
    }

    fn sending(self, i: u32) -> usize {
        i as usize % DEPTH * self.place
    }

    fn receiving(self, i: u32) -> usize {
        DEPTH * self.place + self.sending(i)
    }

    fn written(self, i: u32) -> usize {
        2 * DEPTH * self.place + self.sending(i)
    }
}

/// Returns the messages of each peer
#[derive(Args, Clone, Debug)]
pub(crate) struct Echo {
    /// The port
    port: u32,
    #[command(flatten)]
    places: Places,
}

/// Messages of random lengths, each checked when it comes back
#[derive(Args, Clone, Debug)]
pub(crate) struct Talk {
    /// To this node
    node: u32,
    /// And this port
    port: u32,
    /// So many messages
    #[arg(long, default_value_t = 200)]
    messages: u32,
    /// No message is longer
    #[arg(long, default_value_t = PLACE)]
    longest: usize,
    #[command(flatten)]
    places: Places,
    /// Once it is connected, when this file is there
    #[arg(long)]
    when: Option<PathBuf>,
    /// Seed of all random numbers
    #[arg(long, default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    way: Way,
}

/// The end of messages.
#[derive(Args, Clone, Debug)]
pub(crate) struct Last {
    /// To this node
    node: u32,
    /// And this port
    port: u32,
    /// Bytes of each
    #[arg(long, default_value_t = 8)]
    len: usize,
}

/// A message from one place.
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

/// Waits for completions until so many are left, and until the last has come.
fn settle(vqp: &mut Pusher<'_>, pending: &mut usize, left: usize) -> Result<()> {
    while *pending > left {
        let done = vqp.pop(*pending, PATIENCE)?;
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
            let (vqp, peer) = match listener.accept(PATIENCE) {
                Err(Error::TimedOut) => continue,
                accepted => accepted?,
            };
            let (cluster, places) = (cluster.clone(), self.places);
            thread::spawn(move || {
                if let Err(error) = echo(&cluster, &vqp, places) {
                    eprintln!("node {}: {error:#}", peer.node);
                }
            });
        }
    }
}

/// Sends back what comes, until the other side has enough.
fn echo(cluster: &Cluster, vqp: &Vqp, places: Places) -> Result<()> {
    let local = cluster.reg_mr(Buffer::new(places.all())?, Rights::READ | Rights::WRITE)?;
    let RemoteMemory { addr, rkey: key } = local.remote_memory();
    let place = [&addr.to_le_bytes()[..], &key.to_le_bytes()].concat();
    local.buffer().store(places.sending(0), &place)?;
    vqp.receive(&local, places.receiving(0), places.place, PATIENCE)?;
    let mut pusher = Way::CALLS.of(cluster, vqp)?;
    pusher.push(&[message(&local, places.sending(0), place.len(), None)])?;
    let mut pending = 1;
    for turn in 0.. {
        // What is in the next place was sent by now.
        settle(&mut pusher, &mut pending, DEPTH - 1)?;
        let came = match vqp.receive(&local, places.receiving(turn), places.place, PATIENCE) {
            Err(Error::ConnectionReset) => break,
            came => came?,
        };
        let number = came.immediate.context("nothing was said")?;
        let at = if came.is_placed {
            places.written(number)
        } else {
            places.receiving(turn)
        };
        pusher.push(&[message(&local, at, came.len, Some(number))])?;
        pending += 1;
    }
    Ok(())
}

/// The side that asks.
struct Talker<'a> {
    talk: &'a Talk,
    vqp: &'a Vqp,
    pusher: Pusher<'a>,
    local: Mr,
    remote: RemoteMemory,
    random: Random,
    /// Messages that must return.
    expected: VecDeque<Vec<u8>>,
    /// Messages that came back.
    came: u32,
    pending: usize,
}

impl Talk {
    pub(crate) fn run(&self) -> Result<()> {
        let (cluster, places) = (Cluster::open()?, self.places);
        let local = cluster.reg_mr(Buffer::new(places.all())?, Rights::empty())?;
        let vqp = cluster.connect_to(self.node, self.port)?;
        let mut pusher = self.way.of(&cluster, &vqp)?;
        // The listener may not exist yet.
        pusher.push(&[message(&local, places.sending(0), 1, None)])?;
        let mut place = [0; 12];
        let short = vqp.receive(&local, places.receiving(0), place.len() - 1, PATIENCE);
        ensure!(
            short == Err(Error::MessageTooLong),
            "{short:?} for too little room"
        );
        let said = vqp.receive(&local, places.receiving(0), places.place, PATIENCE)?;
        ensure!(said.len == place.len(), "{said:?} is no place");
        local.buffer().load(places.receiving(0), &mut place)?;
        let (addr, key) = place.split_at(8);
        let remote = RemoteMemory {
            addr: u64::from_le_bytes(addr.try_into()?),
            rkey: u32::from_le_bytes(key.try_into()?),
        };
        if let Some(file) = &self.when {
            println!("connected");
            await_file(file)?;
        }
        let mut talker = Talker {
            talk: self,
            vqp: &vqp,
            pusher,
            local,
            remote,
            random: Random::new(self.seed, 0),
            expected: VecDeque::new(),
            came: 0,
            pending: 1,
        };
        let mut number = 0;
        while number < self.messages {
            let count = 1 + talker.random.below(DEPTH as u64) as u32;
            let next = self.messages.min(number + count);
            let said = talker.say(number..next);
            said.with_context(|| format!("messages from {number}"))?;
            number = next;
        }
        while !talker.expected.is_empty() {
            talker.hear()?;
        }
        settle(&mut talker.pusher, &mut talker.pending, 0)
    }
}

impl Talker<'_> {
    /// Pushes some messages at a time, once there are places for as many.
    fn say(&mut self, numbers: Range<u32>) -> Result<()> {
        let left = DEPTH - numbers.len();
        while self.expected.len() > left {
            self.hear()?;
        }
        settle(&mut self.pusher, &mut self.pending, left)?;
        let mut works = Vec::new();
        for number in numbers.clone() {
            let len = 1 + self.random.size(self.talk.longest as u64 - 1) as usize;
            let mut bytes = vec![0; len];
            self.random.fill(&mut bytes);
            self.local
                .buffer()
                .store(self.talk.places.sending(number), &bytes)?;
            self.expected.push_back(bytes);
            let send = message(
                &self.local,
                self.talk.places.sending(number),
                len,
                Some(number),
            );
            let write = SendWr {
                op: WrOp::Write,
                remote: self.remote,
                remote_offset: self.talk.places.written(number) as u64,
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

    /// Waits for the next to come back.
    fn hear(&mut self) -> Result<()> {
        let expected = self.expected.pop_front().context("nothing is to come")?;
        let at = self.talk.places.receiving(self.came);
        let heard = self
            .vqp
            .receive(&self.local, at, self.talk.places.place, PATIENCE)?;
        ensure!(
            heard.immediate == Some(self.came),
            "{heard:?} is not in order"
        );
        let mut found = vec![0; heard.len];
        self.local.buffer().load(at, &mut found)?;
        ensure!(found == expected, "CORRUPT: message {}", self.came);
        self.came += 1;
        Ok(())
    }
}

impl Last {
    pub(crate) fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        let local = cluster.reg_mr(Buffer::new(1 << 20)?, Rights::empty())?;
        let vqp = cluster.connect_to(self.node, self.port)?;
        for sent in 0.. {
            let error = match vqp.push(&[message(&local, 0, self.len, Some(sent))]) {
                // The peer receives no messages.
                Err(Error::QueueFull) => self.failure(&vqp)?,
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
            ensure!(again == Err(error), "then {again:?}");
            return Ok(());
        }
        bail!("too many")
    }

    /// Waits until one fails.
    fn failure(&self, vqp: &Vqp) -> Result<Error> {
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

pub(crate) fn idle(port: u32, takes: bool, when: Option<&Path>) -> Result<()> {
    let cluster = Cluster::open()?;
    let local = cluster.reg_mr(Buffer::new(1 << 20)?, Rights::empty())?;
    let listener = cluster.listen(port)?;
    println!("ready");
    std::io::stdout().flush()?;
    let (vqp, _) = listener.accept(PATIENCE)?;
    println!("accepted");
    std::io::stdout().flush()?;
    if !takes {
        loop {
            thread::park();
        }
    }
    while when.is_some_and(|file| !file.exists()) {
        thread::sleep(Duration::from_millis(10));
    }
    loop {
        match vqp.receive(&local, 0, 1 << 20, PATIENCE) {
            Err(Error::ConnectionReset) => return Ok(()),
            received => received?,
        };
    }
}

/// The write is checked when it is pushed, and posted when there is room for the message before it.
pub(crate) fn late(to: &To, port: u32) -> Result<()> {
    let cluster = Cluster::open()?;
    let local = cluster.reg_mr(Buffer::new(4096)?, Rights::empty())?;
    let vqp = cluster.connect_to(to.node, port)?;
    let send = message(&local, 0, 8, None);
    let write = SendWr {
        op: WrOp::Write,
        remote: to.remote(),
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
        let done = vqp.pop(left, PATIENCE)?;
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
