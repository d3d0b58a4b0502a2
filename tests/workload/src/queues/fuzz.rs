// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `queues fuzz`: random writes to the memory that a process shares with the kernel.
//!
//! Results are ignored. The test checks leaks and effects on other processes. Threads change the rings at random while
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

/// Submits random and nearly valid SQEs
#[derive(Args, Clone, Debug)]
pub(crate) struct QueueFuzz {
    /// Number of SQEs that the kernel must consume
    #[arg(long, default_value_t = 1_000_000)]
    submissions: u64,
    /// Queues, each with its threads
    #[arg(long, default_value_t = 2)]
    queues: u64,
    /// Seed of all random numbers
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Region that requests use
    #[arg(long)]
    region: String,
}

impl QueueFuzz {
    /// Runs until the kernel has consumed the SQEs.
    pub(crate) fn run(&self) -> Result<()> {
        let device = Device::open_bound()?;
        let (handle, served) = (self.map_region(&device)?, serve_region(&device)?);
        let before = count_sqes(&device)?;
        let (consumed, stop) = (AtomicU64::new(0), AtomicBool::new(false));
        let queues: Vec<MappedQueue> = (0..self.queues)
            .map(|_| MappedQueue::new(&device, ENTRIES, MEMORY))
            .collect::<Result<_>>()?;
        println!("started");
        std::thread::scope(|scope| {
            for (i, queue) in queues.iter().enumerate() {
                let fuzzer = QueueFuzzer {
                    queue,
                    device: &device,
                    handle,
                    served,
                    stop: &stop,
                };
                let random = |thread| Random::new(self.seed, 2 * i as u64 + thread);
                let (one, other) = (random(0), random(1));
                let fuzzer = Arc::new(fuzzer);
                let writer = fuzzer.clone();
                scope.spawn(move || fuzzer.submit_random(one));
                scope.spawn(move || writer.overwrite_random(other));
            }
            let start = Instant::now();
            while consumed.load(Ordering::Relaxed) < self.submissions
                && start.elapsed() < Duration::from_secs(800)
            {
                std::thread::sleep(Duration::from_millis(20));
                let now = count_sqes(&device).unwrap_or(0);
                consumed.store(now - before, Ordering::Relaxed);
            }
            stop.store(true, Ordering::Relaxed);
        });
        let consumed = consumed.into_inner();
        println!("{consumed} submissions");
        ensure!(
            consumed >= self.submissions,
            "only {consumed} SQEs were consumed"
        );
        Ok(())
    }

    fn map_region(&self, device: &Device) -> Result<u64> {
        let mut map = kite_map {
            name: name(&self.region),
            rights: KITE_READ | KITE_WRITE,
            ..Default::default()
        };
        let errno = device.ioctl(KITE_IOC_MAP_NR, &mut map);
        ensure!(errno == 0, "cannot map: {}", symbol(errno));
        Ok(map.handle)
    }
}

/// Allocates and serves a region. Returns its handle.
fn serve_region(device: &Device) -> Result<u64> {
    let mut alloc = kite_alloc {
        len: 1,
        ..Default::default()
    };
    let errno = device.ioctl(KITE_IOC_ALLOC_NR, &mut alloc);
    ensure!(errno == 0, "cannot allocate: {}", symbol(errno));
    let mut serve = kite_serve {
        handle: alloc.handle,
        ..Default::default()
    };
    let errno = device.ioctl(KITE_IOC_SERVE_NR, &mut serve);
    ensure!(errno == 0, "cannot serve: {}", symbol(errno));
    Ok(alloc.handle)
}

/// Returns the SQEs that the kernel has consumed, of all processes.
fn count_sqes(device: &Device) -> Result<u64> {
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

/// Threads of one queue: one submits, one overwrites the shared memory.
struct QueueFuzzer<'a> {
    queue: &'a MappedQueue,
    device: &'a Device,
    handle: u64,
    served: u64,
    stop: &'a AtomicBool,
}

impl QueueFuzzer<'_> {
    /// Submits and enters at random.
    fn submit_random(&self, mut random: Random) {
        let mut tail = 0_u32;
        while !self.stop.load(Ordering::Relaxed) {
            for _ in 0..random.below(ENTRIES.into()) {
                self.queue.write_sqe(tail, &self.random_sqe(&mut random));
                tail = tail.wrapping_add(1);
            }
            let published = match random.below(20) {
                0 => random.next() as u32,
                _ => tail,
            };
            self.queue.word(SQ_TAIL).store(published, Ordering::Release);
            // A valid CQ head, or a random one.
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

    /// Overwrites random words of the shared memory.
    fn overwrite_random(&self, mut random: Random) {
        while !self.stop.load(Ordering::Relaxed) {
            let at = 4 * random.below(self.queue.len() as u64 / 4) as usize;
            // Invalid words of the ring header stop the queue, so they are rare.
            if at >= KITE_QUEUE_SQ_OFFSET as usize || random.below(1000) == 0 {
                self.queue.store_words(at, &[random.next() as u32]);
            }
            std::thread::yield_now();
        }
    }

    /// Returns random words, or a nearly valid request.
    fn random_sqe(&self, random: &mut Random) -> [u32; SQE_WORDS] {
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
        // All requests begin with a handle, or a number.
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
            // Deadline and reserved bits of reads, writes and copies.
            words[12] = 2;
            words[13] = 0;
            words[16] = 2;
            words[17] = 0;
        }
        words
    }
}
