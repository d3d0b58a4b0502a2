// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `vqp`: virtual queue pairs, whose memory is checked against a model.

mod abuse;
mod ask;
mod beside;
mod count;
mod fork;
mod large;
mod order;
mod pusher;
mod queue;
mod stream;
mod talk;
mod told;

use std::io::Write;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use clap::{Args, Subcommand};
use kite::{Buffer, Cluster, Error, IoQueue, Mr, RemoteMemory, Rights, SendWr, Vqp, WrOp};

use crate::random::Random;
use crate::threads::each;
use pusher::{Pusher, Way};

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
    Check(Check),
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

/// Random requests against a model.
#[derive(Args, Clone, Debug)]
pub(crate) struct Check {
    #[command(flatten)]
    to: To,
    /// So many pushes
    #[arg(long, default_value_t = 100)]
    operations: u32,
    /// Parts that the memory is cut into
    #[arg(long, default_value_t = 1)]
    parts: usize,
    /// The part that is this program's
    #[arg(long, default_value_t = 0)]
    part: usize,
    /// Seed of all random numbers
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Ends without an error when the node does not answer any more
    #[arg(long)]
    until_it_dies: bool,
    #[command(flatten)]
    way: Way,
    /// This part by system calls, and the next by a queue, at once by one queue pair
    #[arg(long)]
    both: bool,
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

    /// Nothing of what is refused is done, and what comes after it is.
    fn refused(&self, by_queue: bool) -> Result<()> {
        let cluster = Cluster::open()?;
        let local = cluster.reg_mr(Buffer::new(4096)?, Rights::empty())?;
        let other = Cluster::open()?;
        let foreign = other.reg_mr(Buffer::new(4096)?, Rights::READ)?;
        let vqp = cluster.connect(self.node)?;
        let good = self.work(WrOp::Read, &local);
        let wrong_key = RemoteMemory {
            rkey: self.key ^ (1 << 20),
            ..self.remote()
        };
        let adds = WrOp::FetchAdd { operand: 1 };
        let cases = [
            (
                "longer than the local memory",
                SendWr { len: 4097, ..good },
                Error::OutOfRange,
            ),
            (
                "beyond the local memory",
                SendWr {
                    local_offset: 4089,
                    ..good
                },
                Error::OutOfRange,
            ),
            (
                "beyond the remote memory",
                SendWr {
                    remote_offset: LEN as u64 - 7,
                    ..good
                },
                Error::OutOfRange,
            ),
            (
                "far beyond it",
                SendWr {
                    remote_offset: u64::MAX,
                    ..good
                },
                Error::OutOfRange,
            ),
            ("no bytes", SendWr { len: 0, ..good }, Error::Invalid),
            (
                "another key",
                SendWr {
                    remote: wrong_key,
                    ..good
                },
                Error::NotFound,
            ),
            (
                "memory of another session",
                SendWr {
                    local: &foreign,
                    ..good
                },
                Error::BadHandle,
            ),
            (
                "half a word",
                SendWr {
                    op: adds,
                    len: 4,
                    ..good
                },
                Error::Invalid,
            ),
            (
                "a word astride",
                SendWr {
                    op: adds,
                    remote_offset: 4,
                    ..good
                },
                Error::Invalid,
            ),
        ];
        let message = SendWr {
            op: WrOp::Send,
            remote: RemoteMemory::default(),
            ..good
        };
        let cases = cases.into_iter().chain([
            ("a message to no port", message, Error::Invalid),
            (
                "a message with remote memory",
                SendWr {
                    remote: self.remote(),
                    ..message
                },
                Error::Invalid,
            ),
            (
                "a read that says something",
                SendWr {
                    immediate: Some(1),
                    ..good
                },
                Error::Invalid,
            ),
        ]);
        let mut queue = cluster.create_queue(4, 1)?;
        for (what, bad, error) in cases {
            if by_queue {
                between(&mut queue, &vqp, good, bad, error).context(what)?;
                continue;
            }
            ensure!(
                vqp.push(&[good, bad]) == Err(error),
                "{what}: not {error:?}"
            );
            ensure!(
                vqp.pop(1, None) == Err(Error::WouldBlock),
                "{what}: something was done"
            );
        }
        if by_queue {
            return Ok(());
        }
        ensure!(vqp.push(&[]) == Err(Error::Invalid), "nothing at all");
        let many = vec![good; kite::PUSH_BATCH_MAX + 1];
        ensure!(vqp.push(&many) == Err(Error::Invalid), "too many at once");
        for _ in 0..kite::VQP_DEPTH / kite::PUSH_BATCH_MAX {
            vqp.push(&many[1..])?;
        }
        ensure!(
            vqp.push(&[good]) == Err(Error::QueueFull),
            "too many in all"
        );
        let mut left = kite::VQP_DEPTH;
        while left != 0 {
            let done = vqp.pop(left, PATIENCE)?;
            ensure!(done.iter().all(|done| done.result.is_ok()), "{done:?}");
            left -= done.len();
        }
        ensure!(
            vqp.receive(&local, 0, 8, None) == Err(Error::Invalid),
            "messages of no port"
        );
        self.listening_refused(&cluster)?;
        ensure!(
            cluster
                .connect(77)
                .is_err_and(|error| error == Error::HostDown),
            "no such node"
        );
        Ok(())
    }
}

/// An I/O queue rejects an invalid request alone: the requests before and after it complete.
fn between(
    queue: &mut IoQueue,
    vqp: &Vqp,
    good: SendWr<'_>,
    bad: SendWr<'_>,
    error: Error,
) -> Result<()> {
    for (tag, work) in [(0, good), (1, bad), (2, good)] {
        queue.push(vqp, &SendWr { tag, ..work })?;
    }
    for _ in 0..3 {
        let done = queue.wait()?;
        let expected = if done.tag == 1 { Err(error) } else { Ok(0) };
        ensure!(done.result == expected, "{done:?} and not {expected:?}");
    }
    Ok(())
}

impl To {
    /// A port has one listener.
    fn listening_refused(&self, cluster: &Cluster) -> Result<()> {
        const PORT: u32 = 4000;
        let refused = |port| cluster.listen(port).map(drop);
        ensure!(refused(0) == Err(Error::Invalid), "no port");
        let listener = cluster.listen(PORT)?;
        ensure!(refused(PORT) == Err(Error::PortInUse), "a port of another");
        let nobody = listener.accept(None).map(drop);
        ensure!(nobody == Err(Error::WouldBlock), "nobody has come");
        drop(listener);
        let listeners = (1..=kite::VQPS_MAX as u32 - 1).map(|port| cluster.listen(PORT + port));
        let _listeners = listeners.collect::<kite::Result<Vec<_>>>()?;
        ensure!(refused(PORT) == Err(Error::Busy), "too many");
        Ok(())
    }
}

/// A part of the remote memory, what is in it, and where it is copied to and from.
struct Part<'a> {
    check: &'a Check,
    local: &'a Mr,
    start: u64,
    model: Vec<u8>,
}

/// Expected result of a read.
struct Expected {
    at: usize,
    bytes: Vec<u8>,
}

impl Check {
    fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        let vqp = cluster.connect(self.to.node)?;
        if !self.both {
            return self.check(&cluster, &vqp, self.part, self.way);
        }
        each(2, 1, |i, _| {
            let way = [Way::CALLS, Way::QUEUE][i as usize];
            self.check(&cluster, &vqp, self.part + i as usize, way)
        })
    }

    fn check(&self, cluster: &Cluster, vqp: &Vqp, number: usize, way: Way) -> Result<()> {
        let local = cluster.reg_mr(Buffer::new(LEN)?, Rights::empty())?;
        let mut vqp = way.of(cluster, vqp)?;
        let len = (WORD as usize) / self.parts;
        let mut part = Part {
            check: self,
            local: &local,
            start: (len * number) as u64,
            model: vec![0; len],
        };
        part.learn(&mut vqp)?;
        let mut random = Random::new(self.seed, number as u64);
        for push in 0..self.operations {
            match part
                .push(&mut vqp, &mut random)
                .with_context(|| format!("push {push}"))
            {
                Err(error) if self.until_it_dies && died(&error) => break,
                done => done?,
            }
        }
        Ok(())
    }
}

fn died(error: &anyhow::Error) -> bool {
    matches!(
        error.downcast_ref(),
        Some(Error::TimedOut | Error::HostDown | Error::Canceled)
    )
}

impl Part<'_> {
    /// Reads the values that an earlier run has left.
    fn learn(&mut self, vqp: &mut Pusher<'_>) -> Result<()> {
        vqp.push(&[SendWr {
            len: self.model.len(),
            remote_offset: self.start,
            ..self.check.to.work(WrOp::Read, self.local)
        }])?;
        self.settle(vqp, vec![1])?;
        Ok(self.local.buffer().load(0, &mut self.model)?)
    }

    /// Pushes a few writes and reads, of which some have no completion, and looks at what they did.
    fn push(&mut self, vqp: &mut Pusher<'_>, random: &mut Random) -> Result<()> {
        let count = 1 + random.below(kite::PUSH_BATCH_MAX as u64) as usize;
        let room = LEN / kite::PUSH_BATCH_MAX;
        let (mut works, mut expected) = (Vec::new(), Vec::new());
        for i in 0..count {
            let len = 1 + random.size(room.min(self.model.len()) as u64 - 1) as usize;
            let offset = random.below((self.model.len() - len + 1) as u64) as usize;
            let (at, reads) = (i * room, random.below(2) == 0);
            if reads {
                let bytes = self.model[offset..offset + len].to_vec();
                let wrong: Vec<_> = bytes.iter().map(|byte| !byte).collect();
                self.local.buffer().store(at, &wrong)?;
                expected.push(Expected { at, bytes });
            } else {
                random.fill(&mut self.model[offset..offset + len]);
                self.local
                    .buffer()
                    .store(at, &self.model[offset..offset + len])?;
            }
            works.push(SendWr {
                tag: i as u64,
                op: if reads { WrOp::Read } else { WrOp::Write },
                local_offset: at,
                len,
                remote_offset: self.start + offset as u64,
                signaled: i + 1 == count || random.below(3) == 0,
                fence: !reads,
                ..self.check.to.work(WrOp::Read, self.local)
            });
        }
        vqp.push(&works)?;
        let signalled = works.iter().filter(|work| work.signaled);
        self.settle(vqp, signalled.map(|work| work.tag).collect())?;
        self.compare(&expected)
    }

    /// Waits for completions with these tags, in their order.
    fn settle(&self, vqp: &mut Pusher<'_>, tags: Vec<u64>) -> Result<()> {
        let mut tags = tags.into_iter();
        while tags.len() != 0 {
            for done in vqp.pop(tags.len(), PATIENCE)? {
                done.result?;
                ensure!(
                    tags.next() == Some(done.tag),
                    "completion {} is not in order",
                    done.tag
                );
            }
        }
        match vqp.pop(1, None) {
            Err(Error::WouldBlock) => Ok(()),
            Err(error) => Err(error.into()),
            Ok(more) => bail!("one too many: {more:?}"),
        }
    }

    fn compare(&self, expected: &[Expected]) -> Result<()> {
        for Expected { at, bytes } in expected {
            let mut found = vec![0; bytes.len()];
            self.local.buffer().load(*at, &mut found)?;
            ensure!(found == *bytes, "CORRUPT: a read of {} bytes", bytes.len());
        }
        Ok(())
    }
}
