// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `vqp fuzz`: work requests of a hostile process, as raw structures. Most fields are nearly valid, so that every
//! check is reached. A missing check would let a request reach the RNIC.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use anyhow::{anyhow, ensure, Result};
use clap::Args;
use libc::*;

use super::{RemoteTarget, LEN};
use crate::support::abi::*;
use crate::support::io_queue::{MappedQueue, SQE_WORDS};
use crate::support::random::Random;

/// Errors that a push may return.
const PUSH_ERRNOS: [i32; 7] = [EACCES, EBADF, EINVAL, ENOBUFS, ENOENT, ERANGE, EFAULT];

/// Entries of a queue.
const ENTRIES: u32 = 64;

/// Pushes random work requests, most of them nearly valid
#[derive(Args, Clone, Debug)]
pub(crate) struct VqpFuzz {
    #[command(flatten)]
    target: RemoteTarget,
    /// Number of requests
    #[arg(long, default_value_t = 1_000_000)]
    operations: u64,
    /// Port of a receiver for messages
    #[arg(long, default_value_t = 0)]
    port: u32,
    /// Reads and writes only, which use RC if the node is promoted
    #[arg(long)]
    one_sided: bool,
    /// Pushes through an I/O queue whose SQEs another thread rewrites continuously
    #[arg(long)]
    queue: bool,
    /// Seed of all random numbers
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// A session with its VQP, and counts of the results.
struct VqpFuzzer {
    device: Device,
    random: Random,
    target: RemoteTarget,
    /// Highest operation that is used.
    ops: u32,
    memory: Vec<u8>,
    key: u32,
    vqp: u64,
    results: BTreeMap<i32, u64>,
}

impl VqpFuzz {
    pub(crate) fn run(&self) -> Result<()> {
        let mut fuzzer = VqpFuzzer::new(self)?;
        let pushed = match self.queue {
            true => fuzzer.submit_all(self.operations)?,
            false => fuzzer.push_all(self.operations)?,
        };
        println!("{pushed} requests: {:?}", fuzzer.results);
        let done = fuzzer.results.get(&0).copied().unwrap_or(0);
        ensure!(
            done > pushed / 100,
            "less than 1 % of the requests succeeded"
        );
        for refusal in [EBADF, EINVAL, ENOENT, ERANGE] {
            ensure!(
                fuzzer.results.contains_key(&refusal),
                "no request failed with errno {refusal}"
            );
        }
        Ok(())
    }
}

impl VqpFuzzer {
    fn new(options: &VqpFuzz) -> Result<Self> {
        let device = Device::open_bound()?;
        let memory = vec![0_u8; LEN];
        let mut registered = kite_reg_mr {
            addr: memory.as_ptr() as u64,
            len: LEN as u64,
            ..Default::default()
        };
        let errno = device.ioctl(KITE_IOC_REG_MR_NR, &mut registered);
        ensure!(errno == 0, "cannot register memory: errno {errno}");
        let mut connect = kite_connect {
            node: options.target.node,
            port: options.port,
            ..Default::default()
        };
        let errno = device.ioctl(KITE_IOC_CONNECT_NR, &mut connect);
        ensure!(errno == 0, "cannot connect: errno {errno}");
        Ok(VqpFuzzer {
            device,
            random: Random::new(options.seed, 0),
            target: options.target.clone(),
            ops: match options.port {
                0 if options.one_sided => KITE_WR_OP_WRITE,
                0 => KITE_WR_OP_FETCH_ADD,
                _ => KITE_WR_OP_SEND,
            },
            memory,
            key: registered.key,
            vqp: connect.vqp,
            results: BTreeMap::new(),
        })
    }

    /// Returns `right`, or `wrong` with a probability of 1/24.
    fn mostly_valid<T: Copy>(&mut self, right: T, wrong: T) -> T {
        if self.random.below(24) == 0 {
            wrong
        } else {
            right
        }
    }

    /// Returns an address in the memory of `LEN` bytes at `addr`, or with a low probability a wrong one.
    fn random_address(&mut self, addr: u64) -> u64 {
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
        self.mostly_valid(inside, wrong)
    }

    fn random_wr(&mut self) -> kite_send_wr {
        let op = 1 + self.random.below(self.ops.into()) as u16;
        let atomic = [KITE_WR_OP_COMPARE_SWAP, KITE_WR_OP_FETCH_ADD].contains(&op.into());
        let size = self.random.size(LEN as u64 / 2) as u32;
        let len = if atomic { 8 } else { size };
        let any = self.random.next();
        let local = self.memory.as_ptr() as u64;
        let (remote, key, remote_key) = (self.target.addr, self.key, self.target.key);
        let nowhere = u32::from(op) == KITE_WR_OP_SEND;
        let random_address = self.random_address(remote);
        let operand = if atomic { any } else { 0 };
        let expected = if u32::from(op) == KITE_WR_OP_COMPARE_SWAP {
            any
        } else {
            0
        };
        let lengths = [0, len + 1, LEN as u32, u32::MAX, 1 << 31];
        let wrong_len = self.random.pick(&lengths);
        kite_send_wr {
            tag: any,
            addr: self.random_address(local),
            remote_addr: if nowhere {
                self.mostly_valid(0, 8)
            } else {
                random_address
            },
            operand: self.mostly_valid(operand, any),
            expected: self.mostly_valid(expected, any),
            len: self.mostly_valid(len, wrong_len),
            key: self.mostly_valid(key, key ^ (1 << self.random.clone().below(32))),
            remote_key: if nowhere {
                self.mostly_valid(0, 1)
            } else {
                self.mostly_valid(
                    remote_key,
                    remote_key ^ (1 << self.random.clone().below(32)),
                )
            },
            op: self.mostly_valid(op, any as u16),
            flags: self.mostly_valid(any as u16 & 3, any as u16),
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
        let wrs: Vec<_> = (0..count).map(|_| self.random_wr()).collect();
        let at = wrs.as_ptr() as u64;
        let mut push = kite_push {
            vqp: self.mostly_valid(self.vqp, self.vqp ^ 1),
            wrs: self.mostly_valid(at, 0),
            count: self.mostly_valid(count, 1 << 31),
            timeout_ms: 0,
        };
        let errno = self.device.ioctl(KITE_IOC_PUSH_NR, &mut push);
        ensure!(
            errno == 0 || PUSH_ERRNOS.contains(&errno),
            "push: errno {errno}"
        );
        *self.results.entry(errno).or_default() += u64::from(count);
        if errno == ENOBUFS {
            self.pop()?;
        }
        Ok(u64::from(count))
    }

    /// Pops all completions. Each must be successful.
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
                "the RNIC rejected {failed} requests, which the kernel must reject"
            );
        }
        Ok(())
    }
}

/// Requests through an I/O queue.
impl VqpFuzzer {
    fn submit_all(&mut self, operations: u64) -> Result<u64> {
        let queue = MappedQueue::new(&self.device, ENTRIES, 4096)?;
        let (stop, mut random) = (AtomicBool::new(false), Random::new(operations, 1));
        thread::scope(|scope| {
            scope.spawn(|| flip_bits(&queue, &mut random, &stop));
            let mut submitted = 0;
            let mut submit = || -> Result<u64> {
                while submitted < operations {
                    submitted += self.submit(&queue)?;
                }
                Ok(submitted)
            };
            let result = submit();
            stop.store(true, Ordering::Relaxed);
            result
        })
    }

    /// Submits up to [`ENTRIES`] requests, and waits for them.
    fn submit(&mut self, queue: &MappedQueue) -> Result<u64> {
        let count = 1 + self.random.below(ENTRIES.into());
        let all: Vec<_> = (0..count).map(|_| self.random_sqe()).collect();
        let done = queue.execute_all(&self.device, &all);
        let done =
            done.map_err(|errno| anyhow!("cannot wait for completions: {}", symbol(errno)))?;
        for (_, _, errno) in done {
            ensure!(
                errno != EIO,
                "the RNIC rejected a request, which the kernel must reject"
            );
            *self.results.entry(errno).or_default() += 1;
        }
        Ok(count)
    }

    fn random_sqe(&mut self) -> [u32; SQE_WORDS] {
        let work = self.random_wr();
        let vqp = self.mostly_valid(self.vqp, self.vqp ^ 1);
        let longs = [
            work.tag,
            u64::from(self.mostly_valid(KITE_IOC_PUSH_NR, KITE_IOC_POP_NR)),
            vqp,
            work.addr,
            work.remote_addr,
            work.operand,
            work.expected,
            join_words(work.len, work.key),
            join_words(
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

/// Joins two 32-bit fields to a 64-bit word.
fn join_words(first: u32, second: u32) -> u64 {
    u64::from(first) | (u64::from(second) << 32)
}

/// Flips random bits of SQEs while the kernel may read them.
fn flip_bits(queue: &MappedQueue, random: &mut Random, stop: &AtomicBool) {
    let start = KITE_QUEUE_SQ_OFFSET as usize;
    let words = (queue.cq_offset() - start) as u64 / 4;
    while !stop.load(Ordering::Relaxed) {
        let at = start + 4 * random.below(words) as usize;
        // One bit per step: most SQEs stay nearly valid.
        let word = queue.word(at).load(Ordering::Relaxed) ^ (1 << random.below(32));
        queue.store_words(at, &[word]);
        thread::yield_now();
    }
}
