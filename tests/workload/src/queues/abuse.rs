// SPDX-License-Identifier: GPL-2.0 OR MIT
//! A process that writes whatever it likes to the memory that it shares with the kernel.
//!
//! The results do not matter. The test checks leaks and effects on others. Threads change the rings at random while
//! the kernel reads them. Valid requests have short deadlines, since the number of workers is limited.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{ensure, Result};
use clap::Args;

use crate::support::abi::*;
use crate::support::io_queue::{MappedQueue, CQ_HEAD, CQ_TAIL, SQE_WORDS, SQ_TAIL};
use crate::support::random::Random;

const ENTRIES: u32 = 64;
const MEMORY: usize = 1 << 16;

/// Submits random bytes, and what is nearly right
#[derive(Args, Clone, Debug)]
pub(crate) struct Abuse {
    /// Submissions for the kernel to take
    #[arg(long, default_value_t = 1_000_000)]
    submissions: u64,
    /// Queue pairs, with a thread each
    #[arg(long, default_value_t = 2)]
    queues: u64,
    /// Seed of all random numbers
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// A region that requests may name
    #[arg(long)]
    region: String,
}

impl Abuse {
    /// Does it, until the kernel has taken so many.
    pub(crate) fn run(&self) -> Result<()> {
        let device = Device::open_bound()?;
        let (handle, served) = (self.handle(&device)?, served(&device)?);
        let before = submissions(&device)?;
        let (taken, over) = (AtomicU64::new(0), AtomicBool::new(false));
        let mapped: Vec<MappedQueue> = (0..self.queues)
            .map(|_| MappedQueue::new(&device, ENTRIES, MEMORY))
            .collect::<Result<_>>()?;
        println!("abusing");
        std::thread::scope(|scope| {
            for (i, queue) in mapped.iter().enumerate() {
                let abuser = Abuser {
                    queue,
                    device: &device,
                    handle,
                    served,
                    over: &over,
                };
                let random = |thread| Random::new(self.seed, 2 * i as u64 + thread);
                let (one, other) = (random(0), random(1));
                let abuser = Arc::new(abuser);
                let scribbler = abuser.clone();
                scope.spawn(move || abuser.abuse(one));
                scope.spawn(move || scribbler.scribble(other));
            }
            let start = Instant::now();
            while taken.load(Ordering::Relaxed) < self.submissions
                && start.elapsed() < Duration::from_secs(800)
            {
                std::thread::sleep(Duration::from_millis(20));
                let now = submissions(&device).unwrap_or(0);
                taken.store(now - before, Ordering::Relaxed);
            }
            over.store(true, Ordering::Relaxed);
        });
        let taken = taken.into_inner();
        println!("{taken} submissions");
        ensure!(taken >= self.submissions, "too few were taken");
        Ok(())
    }

    fn handle(&self, device: &Device) -> Result<u64> {
        let mut map = kite_map {
            name: name(&self.region),
            rights: KITE_READ | KITE_WRITE,
            ..Default::default()
        };
        let errno = device.ioctl(KITE_IOC_MAP_NR, &mut map);
        ensure!(errno == 0, "mapping: {}", symbol(errno));
        Ok(map.handle)
    }
}

/// A region that calls and messages come to.
fn served(device: &Device) -> Result<u64> {
    let mut alloc = kite_alloc {
        len: 1,
        ..Default::default()
    };
    let errno = device.ioctl(KITE_IOC_ALLOC_NR, &mut alloc);
    ensure!(errno == 0, "allocating: {}", symbol(errno));
    let mut serve = kite_serve {
        handle: alloc.handle,
        ..Default::default()
    };
    let errno = device.ioctl(KITE_IOC_SERVE_NR, &mut serve);
    ensure!(errno == 0, "serving: {}", symbol(errno));
    Ok(alloc.handle)
}

/// Returns the SQEs that the kernel has consumed, of all processes.
fn submissions(device: &Device) -> Result<u64> {
    let mut stats = kite_stats::default();
    let mut args = kite_get_stats {
        stats: &raw mut stats as u64,
        size: size_of_val(&stats) as u32,
        ..Default::default()
    };
    let errno = device.ioctl(KITE_IOC_GET_STATS_NR, &mut args);
    ensure!(errno == 0, "statistics: {}", symbol(errno));
    Ok(stats.sqes)
}

/// A thread that submits, and one that scribbles, on one queue pair.
struct Abuser<'a> {
    queue: &'a MappedQueue,
    device: &'a Device,
    handle: u64,
    served: u64,
    over: &'a AtomicBool,
}

impl Abuser<'_> {
    /// Submits, and enters, at random.
    fn abuse(&self, mut random: Random) {
        let mut tail = 0_u32;
        while !self.over.load(Ordering::Relaxed) {
            for _ in 0..random.below(ENTRIES.into()) {
                self.queue.write_sqe(tail, &self.submission(&mut random));
                tail = tail.wrapping_add(1);
            }
            let told = match random.below(20) {
                0 => random.next() as u32,
                _ => tail,
            };
            self.queue.word(SQ_TAIL).store(told, Ordering::Release);
            // Room for completions, or nonsense.
            let head = match random.below(10) {
                0 => random.next() as u32,
                _ => self.queue.word(CQ_TAIL).load(Ordering::Relaxed),
            };
            self.queue.word(CQ_HEAD).store(head, Ordering::Release);
            let mut enter = kite_enter {
                queue: self.queue.number,
                want: match random.below(50) {
                    0 => random.next() as u32,
                    1 => 1,
                    _ => 0,
                },
                timeout_ms: 1,
                ..Default::default()
            };
            self.device.ioctl(KITE_IOC_ENTER_NR, &mut enter);
        }
    }

    /// Changes anything in the memory all the time.
    fn scribble(&self, mut random: Random) {
        while !self.over.load(Ordering::Relaxed) {
            let at = 4 * random.below(self.queue.len() as u64 / 4) as usize;
            // Most of the words at the begin are left: nonsense there stops everything.
            if at >= KITE_QUEUE_SQ_OFFSET as usize || random.below(1000) == 0 {
                self.queue.store_words(at, &[random.next() as u32]);
            }
            std::thread::yield_now();
        }
    }

    /// Random words, or a request of which most is right.
    fn submission(&self, random: &mut Random) -> [u32; SQE_WORDS] {
        let mut words = [0; SQE_WORDS];
        for word in &mut words {
            *word = random.next() as u32;
        }
        if random.below(4) == 0 {
            return words;
        }
        let (addr, len) = (self.queue.memory.as_ptr() as u64, MEMORY as u64);
        let (handle, served) = (self.handle, self.served);
        let some = [0, 1, 64, 4095, 4096, 4097, len, u64::MAX];
        let mut put = |at: usize, value: u64| {
            words[at] = value as u32;
            words[at + 1] = (value >> 32) as u32;
        };
        let request = random.pick(&[
            KITE_IOC_READ_NR,
            KITE_IOC_WRITE_NR,
            KITE_IOC_READ_NR,
            KITE_IOC_WRITE_NR,
            KITE_IOC_FILL_NR,
            KITE_IOC_COPY_NR,
            KITE_IOC_ATOMIC_NR,
            KITE_IOC_CALL_NR,
            KITE_IOC_RECEIVE_NR,
            KITE_IOC_RECEIVE_NR,
            KITE_IOC_REPLY_NR,
            KITE_IOC_UNLOCK_NR,
            KITE_IOC_PUSH_NR,
            KITE_IOC_LOCK_NR,
            KITE_IOC_FREE_NR,
        ]);
        // All of them begin with a handle, or a number.
        put(2, request.into());
        let any = random.next();
        put(4, random.pick(&[handle, handle, served, served, 0, any]));
        put(6, random.pick(&some));
        let wild = random.next();
        put(8, random.pick(&[addr, addr, addr + len - 1, wild, handle]));
        put(10, random.pick(&some));
        put(12, random.pick(&[addr, 2, 0, wild]));
        put(14, random.pick(&[1, (1 << 32) | 1, 2]));
        if random.below(8) != 0 {
            // Where reads, writes and copies have a deadline and reserved bits, and calls other things.
            words[12] = 2;
            words[13] = 0;
            words[16] = 2;
            words[17] = 0;
        }
        words
    }
}
