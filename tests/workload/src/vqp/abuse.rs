// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `vqp abuse`: work requests of a hostile process, as raw structures. Most fields are nearly valid, so that every
//! check is reached. A missing check would let a request reach the RNIC.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use anyhow::{anyhow, ensure, Result};
use clap::Args;
use libc::*;

use super::{To, LEN};
use crate::support::abi::*;
use crate::support::io_queue::{MappedQueue, SQE_WORDS};
use crate::support::random::Random;

/// Errors that a push may return.
const REFUSALS: [i32; 7] = [EACCES, EBADF, EINVAL, ENOBUFS, ENOENT, ERANGE, EFAULT];

/// Entries of a queue.
const ENTRIES: u32 = 64;

/// Random requests.
#[derive(Args, Clone, Debug)]
pub(crate) struct Abuse {
    #[command(flatten)]
    to: To,
    /// So many requests
    #[arg(long, default_value_t = 1_000_000)]
    operations: u64,
    /// Port of a receiver for messages
    #[arg(long, default_value_t = 0)]
    port: u32,
    /// Reads and writes alone: the node may be promoted, and they go by connections
    #[arg(long)]
    one_sided: bool,
    /// Pushes by an I/O queue whose SQEs another thread rewrites continuously
    #[arg(long)]
    queue: bool,
    /// Seed of all random numbers
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// A session with its VQP, and counts of the results.
struct Abuser {
    device: Device,
    random: Random,
    to: To,
    /// Highest operation that it knows.
    ops: u32,
    memory: Vec<u8>,
    key: u32,
    vqp: u64,
    said: BTreeMap<i32, u64>,
}

impl Abuse {
    pub(crate) fn run(&self) -> Result<()> {
        let mut abuser = Abuser::new(self)?;
        let pushed = match self.queue {
            true => abuser.submit_all(self.operations)?,
            false => abuser.push_all(self.operations)?,
        };
        println!("{pushed} requests: {:?}", abuser.said);
        let done = abuser.said.get(&0).copied().unwrap_or(0);
        ensure!(done > pushed / 100, "hardly anything was done");
        for refusal in [EBADF, EINVAL, ENOENT, ERANGE] {
            ensure!(
                abuser.said.contains_key(&refusal),
                "nothing was refused by errno {refusal}"
            );
        }
        Ok(())
    }
}

impl Abuser {
    fn new(abuse: &Abuse) -> Result<Self> {
        let device = Device::open_bound()?;
        let memory = vec![0_u8; LEN];
        let mut registered = kite_reg_mr {
            addr: memory.as_ptr() as u64,
            len: LEN as u64,
            ..Default::default()
        };
        let errno = device.ioctl(KITE_IOC_REG_MR_NR, &mut registered);
        ensure!(errno == 0, "registering memory: errno {errno}");
        let mut connect = kite_connect {
            node: abuse.to.node,
            port: abuse.port,
            ..Default::default()
        };
        let errno = device.ioctl(KITE_IOC_CONNECT_NR, &mut connect);
        ensure!(errno == 0, "connecting: errno {errno}");
        Ok(Abuser {
            device,
            random: Random::new(abuse.seed, 0),
            to: abuse.to.clone(),
            ops: match abuse.port {
                0 if abuse.one_sided => KITE_WR_WRITE,
                0 => KITE_WR_FETCH_ADD,
                _ => KITE_WR_SEND,
            },
            memory,
            key: registered.key,
            vqp: connect.vqp,
            said: BTreeMap::new(),
        })
    }

    /// Right most of the time.
    fn nearly<T: Copy>(&mut self, right: T, wrong: T) -> T {
        if self.random.below(24) == 0 {
            wrong
        } else {
            right
        }
    }

    /// A place in memory of `len` bytes at `addr`, or a little beside it, or anywhere.
    fn place(&mut self, addr: u64) -> u64 {
        let inside = addr + self.random.below(LEN as u64 / 2) / 8 * 8;
        let edges = [
            addr.wrapping_sub(1),
            addr + LEN as u64 - 7,
            addr + LEN as u64,
            u64::MAX - 7,
            0,
        ];
        let edge = self.random.pick(&edges);
        let wrong = self
            .random
            .pick(&[edge, inside + 1, self.random.clone().next()]);
        self.nearly(inside, wrong)
    }

    fn work(&mut self) -> kite_send_wr {
        let op = 1 + self.random.below(self.ops.into()) as u16;
        let atomic = [KITE_WR_COMPARE_SWAP, KITE_WR_FETCH_ADD].contains(&op.into());
        let size = self.random.size(LEN as u64 / 2) as u32;
        let len = if atomic { 8 } else { size };
        let any = self.random.next();
        let local = self.memory.as_ptr() as u64;
        let (remote, key, remote_key) = (self.to.addr, self.key, self.to.key);
        let nowhere = u32::from(op) == KITE_WR_SEND;
        let place = self.place(remote);
        let operand = if atomic { any } else { 0 };
        let expected = if u32::from(op) == KITE_WR_COMPARE_SWAP {
            any
        } else {
            0
        };
        let lengths = [0, len + 1, LEN as u32, u32::MAX, 1 << 31];
        let wrong_len = self.random.pick(&lengths);
        kite_send_wr {
            tag: any,
            addr: self.place(local),
            remote_addr: if nowhere { self.nearly(0, 8) } else { place },
            operand: self.nearly(operand, any),
            expected: self.nearly(expected, any),
            len: self.nearly(len, wrong_len),
            key: self.nearly(key, key ^ (1 << self.random.clone().below(32))),
            remote_key: if nowhere {
                self.nearly(0, 1)
            } else {
                self.nearly(
                    remote_key,
                    remote_key ^ (1 << self.random.clone().below(32)),
                )
            },
            op: self.nearly(op, any as u16),
            flags: self.nearly(any as u16 & 3, any as u16),
        }
    }

    fn push_all(&mut self, operations: u64) -> Result<u64> {
        let mut pushed = 0;
        while pushed < operations {
            pushed += self.push()?;
            if self.random.below(4) == 0 {
                self.pop()?;
            }
        }
        Ok(pushed)
    }

    fn push(&mut self) -> Result<u64> {
        let count = 1 + self.random.below(3) as u32;
        let works: Vec<_> = (0..count).map(|_| self.work()).collect();
        let at = works.as_ptr() as u64;
        let mut push = kite_push {
            vqp: self.nearly(self.vqp, self.vqp ^ 1),
            works: self.nearly(at, 0),
            count: self.nearly(count, 1 << 31),
            timeout_ms: 0,
        };
        let errno = self.device.ioctl(KITE_IOC_PUSH_NR, &mut push);
        ensure!(
            errno == 0 || REFUSALS.contains(&errno),
            "a push: errno {errno}"
        );
        *self.said.entry(errno).or_default() += u64::from(count);
        if errno == ENOBUFS {
            self.pop()?;
        }
        Ok(u64::from(count))
    }

    /// Takes what there is: all of it has succeeded.
    fn pop(&mut self) -> Result<()> {
        let mut completions = [kite_cqe::default(); KITE_VQP_DEPTH as usize];
        let mut pop = kite_pop {
            vqp: self.vqp,
            completions: completions.as_mut_ptr() as u64,
            count: KITE_VQP_DEPTH,
            flags: KITE_NOWAIT,
            ..Default::default()
        };
        if self.device.ioctl(KITE_IOC_POP_NR, &mut pop) == 0 {
            let popped = completions.iter().take(pop.count as usize);
            let failed = popped.filter(|done| done.error != 0).count();
            ensure!(
                failed == 0,
                "{failed} requests reached the RNIC that it refused"
            );
        }
        Ok(())
    }
}

/// By a queue.
impl Abuser {
    fn submit_all(&mut self, operations: u64) -> Result<u64> {
        let queue = MappedQueue::new(&self.device, ENTRIES, 4096)?;
        let (over, mut random) = (AtomicBool::new(false), Random::new(operations, 1));
        thread::scope(|scope| {
            scope.spawn(|| scribble(&queue, &mut random, &over));
            let mut submitted = 0;
            let mut submit = || -> Result<u64> {
                while submitted < operations {
                    submitted += self.submit(&queue)?;
                }
                Ok(submitted)
            };
            let result = submit();
            over.store(true, Ordering::Relaxed);
            result
        })
    }

    /// Submits some, and waits for all of them.
    fn submit(&mut self, queue: &MappedQueue) -> Result<u64> {
        let count = 1 + self.random.below(ENTRIES.into());
        let all: Vec<_> = (0..count).map(|_| self.submission()).collect();
        let done = queue.execute_all(&self.device, &all);
        let done = done.map_err(|errno| anyhow!("waiting: {}", symbol(errno)))?;
        for (_, _, errno) in done {
            ensure!(errno != EIO, "a request reached the RNIC that it refused");
            *self.said.entry(errno).or_default() += 1;
        }
        Ok(count)
    }

    fn submission(&mut self) -> [u32; SQE_WORDS] {
        let work = self.work();
        let vqp = self.nearly(self.vqp, self.vqp ^ 1);
        let longs = [
            work.tag,
            u64::from(self.nearly(KITE_IOC_PUSH_NR, KITE_IOC_POP_NR)),
            vqp,
            work.addr,
            work.remote_addr,
            work.operand,
            work.expected,
            both(work.len, work.key),
            both(
                work.remote_key,
                u32::from(work.op) | (u32::from(work.flags) << 16),
            ),
        ];
        let mut words = [0; SQE_WORDS];
        for (to, from) in words.chunks_exact_mut(2).zip(longs) {
            to.copy_from_slice(&[from as u32, (from >> 32) as u32]);
        }
        words
    }
}

/// Two fields as one number.
fn both(first: u32, second: u32) -> u64 {
    u64::from(first) | (u64::from(second) << 32)
}

/// Rewrites submissions, perhaps while the kernel takes them.
fn scribble(queue: &MappedQueue, random: &mut Random, over: &AtomicBool) {
    let start = KITE_QUEUE_SQ_OFFSET as usize;
    let words = (queue.cq_offset() - start) as u64 / 4;
    while !over.load(Ordering::Relaxed) {
        let at = start + 4 * random.below(words) as usize;
        // What is nearly right stays so most of the time.
        let word = queue.word(at).load(Ordering::Relaxed) ^ (1 << random.below(32));
        queue.store_words(at, &[word]);
        thread::yield_now();
    }
}
