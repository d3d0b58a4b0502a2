// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `fuzz`: random requests, by several threads that share sessions, none of which may harm the
//! kernel. What comes back does not matter; what it leaves behind is for the test to see.
//!
//! A seed repeats what each thread asks for. Pointers lead to a scratch mapping or to nothing, never
//! to memory of this program, since requests write to them. Run by a user: the daemon's requests
//! must not succeed. Lengths of regions are short or beyond all memory.

use std::sync::Mutex;
use std::time::Instant;

use anyhow::{bail, ensure, Result};
use clap::Args;
use libc::{
    mmap, mprotect, MAP_ANONYMOUS, MAP_FAILED, MAP_PRIVATE, PROT_NONE, PROT_READ, PROT_WRITE,
};

use crate::abi::*;
use crate::random::Random;

const SCRATCH: usize = 1 << 20;

/// Handles of a thread before it has valid ones.
const NO_HANDLES: [u64; 3] = [0, 1, u64::MAX];

/// Most handles that a thread collects.
const HANDLES: usize = 24;

/// Ports with and without listeners.
const PORTS: [u32; 4] = [0, 1, 2, u32::MAX];

/// Makes random requests.
#[derive(Args, Clone, Debug)]
pub(crate) struct Fuzz {
    /// Requests of all threads together
    #[arg(long, default_value_t = 200_000)]
    requests: u64,
    /// Threads
    #[arg(long, default_value_t = 4)]
    threads: u64,
    /// Seed of all random numbers
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Leaves the regions that it named
    #[arg(long)]
    no_sweep: bool,
}

impl Fuzz {
    /// Makes them, and prints how many there were of each outcome.
    pub(crate) fn run(&self) -> Result<()> {
        println!("seed {}", self.seed);
        let start = Instant::now();
        let shared = [Device::bound()?, Device::bound()?, Device::open()?];
        let outcomes = Mutex::new(vec![0_u64; 134]);
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..self.threads)
                .map(|thread| {
                    let (shared, outcomes) = (&shared, &outcomes);
                    scope.spawn(move || self.abuse(thread, shared, outcomes))
                })
                .collect();
            threads
                .into_iter()
                .try_for_each(|thread| thread.join().unwrap_or_else(|_| bail!("a thread panicked")))
        })?;
        drop(shared);
        if !self.no_sweep {
            sweep()?;
        }
        let mut total = 0;
        for (errno, count) in outcomes.into_inner()?.into_iter().enumerate() {
            if count != 0 {
                println!("{:8} {}", count, symbol(errno as Errno));
            }
            total += count;
        }
        println!("{total} requests in {:.1} s", start.elapsed().as_secs_f32());
        ensure!(total >= self.requests, "too few requests");
        Ok(())
    }

    fn abuse(&self, thread: u64, shared: &[Device], outcomes: &Mutex<Vec<u64>>) -> Result<()> {
        let mut abuser = Abuser {
            random: Random::new(self.seed, thread),
            scratch: Scratch::new()?,
            session: 0,
            handles: NO_HANDLES.map(|handle| (0, handle)).to_vec(),
        };
        let mut own = Device::open()?;
        for done in 0..self.requests.div_ceil(self.threads) {
            if done == 500 && thread == 0 {
                println!("2000 requests or so");
            }
            if abuser.random.below(2000) == 0 {
                own = Device::open()?;
            }
            abuser.session = abuser.random.below(4) as usize;
            let device = match abuser.session {
                0 => &own,
                n => &shared[n - 1],
            };
            let errno = abuser.request(device) as usize;
            let mut outcomes = outcomes.lock().unwrap_or_else(|e| e.into_inner());
            let last = outcomes.len() - 1;
            outcomes[errno.min(last)] += 1;
        }
        Ok(())
    }
}

/// Frees the named regions of all nodes, which may have any bytes as names.
fn sweep() -> Result<()> {
    let device = Device::bound()?;
    for node in kite::Cluster::open()?.view()?.members {
        let mut entry = kite_region_entry::default();
        let mut list = kite_list_regions {
            node: node.node,
            count: 1,
            ..Default::default()
        };
        loop {
            list.entries = &raw mut entry as u64;
            list.count = 1;
            let errno = device.ask(KITE_IOC_LIST_REGIONS_NR, &mut list);
            ensure!(errno == 0, "listing: {}", symbol(errno));
            if list.count == 0 {
                break;
            }
            let mut map = kite_map {
                name: entry.name,
                rights: KITE_MASTER,
                ..Default::default()
            };
            let errno = device.ask(KITE_IOC_MAP_NR, &mut map);
            ensure!(errno == 0, "mapping what is listed: {}", symbol(errno));
            let mut handle = kite_handle { handle: map.handle };
            let errno = device.ask(KITE_IOC_FREE_NR, &mut handle);
            ensure!(errno == 0, "freeing what is listed: {}", symbol(errno));
        }
    }
    Ok(())
}

/// Memory that requests may write to, and places where they must not.
struct Scratch {
    base: usize,
    places: Vec<usize>,
}

impl Scratch {
    fn new() -> Result<Self> {
        let flags = MAP_PRIVATE | MAP_ANONYMOUS;
        let protection = PROT_READ | PROT_WRITE;
        // SAFETY: a new mapping, without references.
        let base = unsafe { mmap(std::ptr::null_mut(), SCRATCH, protection, flags, -1, 0) };
        ensure!(base != MAP_FAILED, "mmap");
        let base = base as usize;
        let protect = |offset: usize, protection| {
            // SAFETY: a part of the mapping made above.
            unsafe { mprotect((base + offset) as *mut _, 65_536, protection) }
        };
        ensure!(
            protect(SCRATCH - 65_536, PROT_NONE) == 0 && protect(SCRATCH / 2, PROT_READ) == 0,
            "mprotect"
        );
        let places = vec![
            base,
            base + 1,
            base + 4095,
            base + 65_536,
            base + SCRATCH / 2 - 8,
            base + SCRATCH / 2,
            base + SCRATCH - 65_536 - 8,
            base + SCRATCH - 65_536,
            0,
            8,
            0xffff_8880_0000_0000,
            0xffff_ffff_8100_0000,
            0x7fff_ffff_f000,
            0x8000_0000_0000,
            usize::MAX,
            usize::MAX - 4095,
        ];
        Ok(Scratch { base, places })
    }
}

struct Abuser {
    random: Random,
    scratch: Scratch,
    /// Which session the next request is made in.
    session: usize,
    /// With the session of each.
    handles: Vec<(usize, u64)>,
}

impl Abuser {
    /// Makes one request of any kind.
    fn request(&mut self, device: &Device) -> Errno {
        let number = self.random.pick(&REQUESTS);
        match self.random.below(16) {
            0 => {
                let number = self.random.next() as u32;
                self.anywhere(device, number)
            }
            1 => {
                let flipped = number ^ (1 << self.random.below(32));
                self.anywhere(device, flipped)
            }
            2 => self.anywhere(device, number),
            3 => self.noise(device, number),
            _ => self.plausible(device, number),
        }
    }

    /// Uses a random address as argument, mapped or not; for requests that wait for others random words, since memory
    /// could contain a deadline of hours.
    fn anywhere(&mut self, device: &Device, number: u32) -> Errno {
        match number {
            KITE_IOC_LOCK_NR
            | KITE_IOC_BARRIER_NR
            | KITE_IOC_ENTER_NR
            | KITE_IOC_POP_NR
            | KITE_IOC_ACCEPT_NR
            | KITE_IOC_POP_MESSAGE_NR => self.noise(device, number),
            _ => device.ask_at(number, self.place() as usize),
        }
    }

    /// A structure whose words are random, though some of them handles and addresses.
    fn noise(&mut self, device: &Device, number: u32) -> Errno {
        let mut words = [0_u64; 64];
        for word in &mut words[..size(number).div_ceil(8)] {
            *word = match self.random.below(5) {
                0 => self.place(),
                1 => self.handle(),
                2 => self.number(),
                3 => 0,
                // No address of a process, whatever it is taken for.
                _ => self.random.next() | (1 << 63),
            };
        }
        if matches!(number, KITE_IOC_ALLOC_NR) && words[0] < 1 << 45 {
            words[0] %= 1 << 20;
        }
        // Waits are short.
        match number {
            KITE_IOC_LOCK_NR => words[4] = 1 | (words[4] & (1 << 63)),
            KITE_IOC_BARRIER_NR => words[3] = (1 << 32) | (words[3] & 0xffff_ffff),
            KITE_IOC_ENTER_NR => words[2] = 1 | (words[2] & (1 << 63)),
            KITE_IOC_POP_NR => {
                words[2] = (1 << 32) | (words[2] & 0xffff_ffff);
                words[3] &= 1 | (1 << 63);
            }
            KITE_IOC_ACCEPT_NR => words[3] = 1 | (words[3] & ((1 << 32) | (1 << 63))),
            KITE_IOC_POP_MESSAGE_NR => {
                words[3] &= (1 << 33) - 1;
                words[4] = 1 | (words[4] & (1 << 63));
            }
            _ => {}
        }
        device.ask(number, &mut words)
    }

    /// A structure of which most fields make sense.
    fn plausible(&mut self, device: &Device, number: u32) -> Errno {
        let handle = self.handle();
        match number {
            KITE_IOC_BIND_NR => device.ask(number, &mut binding()),
            KITE_IOC_ALLOC_NR => self.alloc(device),
            KITE_IOC_MAP_NR => self.map(device),
            KITE_IOC_UNMAP_NR | KITE_IOC_FREE_NR => {
                self.forget(handle);
                device.ask(number, &mut kite_handle { handle })
            }
            KITE_IOC_READ_NR | KITE_IOC_WRITE_NR => self.transfer(device, number),
            KITE_IOC_READV_NR | KITE_IOC_WRITEV_NR => self.vectored(device, number),
            KITE_IOC_LIST_REGIONS_NR => {
                let mut list = kite_list_regions {
                    node: self.random.below(5) as u32,
                    count: self.number().min(700) as u32,
                    cursor: self.number(),
                    entries: self.place(),
                };
                device.ask(number, &mut list)
            }
            KITE_IOC_GET_VIEW_NR => {
                let mut nodes = kite_get_view {
                    count: self.number() as u32,
                    members: self.place(),
                    ..Default::default()
                };
                device.ask(number, &mut nodes)
            }
            KITE_IOC_GRANT_NR => {
                let mut grant = kite_grant {
                    handle,
                    uid: self.random.pick(&[0, 0, 1, 1000, 1001, u32::MAX]),
                    rights: self.random.pick(&[0, 1, 3, 7, 7, 7, 8]),
                    flags: self.random.pick(&[0, 0, 0, 1, 1, 2]),
                    ..Default::default()
                };
                device.ask(number, &mut grant)
            }
            KITE_IOC_MIGRATE_NR => {
                let mut wanted = kite_migrate {
                    handle,
                    nodes: self.nodes(),
                    node_count: self.random.pick(&[0, 0, 1, 1, 2, 3, 64, 65, u32::MAX]),
                    timeout_ms: self.random.pick(&[0, 1, 10, 1000]),
                };
                device.ask(number, &mut wanted)
            }
            KITE_IOC_FILL_NR => {
                let mut set = kite_fill {
                    handle,
                    offset: self.random.below(50),
                    len: self.number(),
                    byte: self.random.pick(&[0, 1, 255, 256]),
                    ..Default::default()
                };
                device.ask(number, &mut set)
            }
            KITE_IOC_COPY_NR => {
                let mut copy = kite_copy {
                    from: handle,
                    from_offset: self.random.below(50),
                    to: self.handle(),
                    to_offset: self.random.below(50),
                    len: self.number(),
                    ..Default::default()
                };
                device.ask(number, &mut copy)
            }
            KITE_IOC_LOCK_NR => {
                let mut lock = kite_lock {
                    handle,
                    number: self.random.below(3),
                    flags: self.random.pick(&[0, 0, 1, 2, 3, 4]),
                    timeout_ms: 1,
                    ..Default::default()
                };
                device.ask(number, &mut lock)
            }
            KITE_IOC_UNLOCK_NR => {
                let mut unlock = kite_unlock {
                    // Numbers of locks are between those of handles.
                    lock: handle + self.random.below(4),
                    ..Default::default()
                };
                device.ask(number, &mut unlock)
            }
            KITE_IOC_BARRIER_NR => {
                let mut barrier = kite_barrier {
                    handle,
                    number: self.random.below(3),
                    count: self.random.pick(&[0, 1, 1, 2, 3, u32::MAX]),
                    timeout_ms: 1,
                    ..Default::default()
                };
                device.ask(number, &mut barrier)
            }
            KITE_IOC_REGISTER_NR => {
                let mut register = kite_register {
                    addr: self.place(),
                    len: self
                        .random
                        .pick(&[0, 1, 4096, 5000, 65_536, 1 << 30, 1 << 60]),
                    other_rights: self.random.pick(&[0, 3, 7, 8]),
                    name: name(self.random.pick(&["", "", "", "a", "b"])),
                    ..Default::default()
                };
                let errno = device.ask(number, &mut register);
                self.keep(errno, register.handle)
            }
            KITE_IOC_CREATE_QUEUE_NR => {
                let mut queue = kite_create_queue {
                    addr: self.place(),
                    len: self.number(),
                    entries: self.random.pick(&[0, 1, 3, 8, 64, 1024, 2048]),
                    ..Default::default()
                };
                device.ask(number, &mut queue)
            }
            KITE_IOC_SET_PRIORITY_NR => {
                let mut wanted = kite_priority {
                    priority: self.random.pick(&[0, 1, 1, 2]),
                    ..Default::default()
                };
                device.ask(number, &mut wanted)
            }
            KITE_IOC_LIST_LIMITS_NR => {
                let mut limits = kite_list_limits {
                    limits: self.place(),
                    count: self.number().min(700) as u32,
                    ..Default::default()
                };
                device.ask(number, &mut limits)
            }
            KITE_IOC_LIST_VQPS_NR => {
                let mut vqps = kite_list_vqps {
                    accounts: self.place(),
                    count: self.number().min(700) as u32,
                    ..Default::default()
                };
                device.ask(number, &mut vqps)
            }
            KITE_IOC_ENTER_NR => {
                let mut enter = kite_enter {
                    queue: handle + self.random.below(4),
                    want: self.random.pick(&[0, 0, 1, 8, 1025]),
                    timeout_ms: 1,
                    ..Default::default()
                };
                device.ask(number, &mut enter)
            }
            KITE_IOC_CONNECT_NR => {
                let mut connect = kite_connect {
                    node: self.random.pick(&[0, 1, 2, 2, 2, 3, 70_000]),
                    port: self.random.pick(&PORTS),
                    timeout_ms: 10,
                    ..Default::default()
                };
                device.ask(number, &mut connect)
            }
            KITE_IOC_LISTEN_NR => {
                let mut listen = kite_listen {
                    port: self.random.pick(&PORTS),
                    ..Default::default()
                };
                device.ask(number, &mut listen)
            }
            KITE_IOC_ACCEPT_NR => {
                let mut accept = kite_accept {
                    listener: handle + self.random.below(4),
                    timeout_ms: 1,
                    flags: self.random.pick(&[0, KITE_NOWAIT]),
                    ..Default::default()
                };
                device.ask(number, &mut accept)
            }
            KITE_IOC_CLOSE_VQP_NR => {
                let vqp = handle + self.random.below(4);
                device.ask(number, &mut kite_close_vqp { vqp })
            }
            KITE_IOC_DESTROY_QUEUE_NR => {
                let mut unqueue = kite_destroy_queue {
                    queue: handle + self.random.below(4),
                };
                device.ask(number, &mut unqueue)
            }
            _ => self.noise(device, number),
        }
    }

    /// A place with numbers of nodes, or none.
    fn nodes(&mut self) -> u64 {
        let nodes = self.scratch.base + 8;
        for i in 0..64 {
            let node = self.random.pick(&[1_u32, 2, 3, 1, 2, 3, 1, 2, 0, 9]);
            // SAFETY: within the first page of the scratch mapping, which other requests of this
            // thread alone write to.
            unsafe { (nodes as *mut u32).add(i).write(node) };
        }
        self.random
            .pick(&[nodes as u64, nodes as u64, nodes as u64, 0])
    }

    fn alloc(&mut self, device: &Device) -> Errno {
        let mut alloc = kite_alloc {
            len: match self.random.below(20) {
                0 => self.random.next() | (1 << 54),
                _ => self.random.size(100_000),
            },
            nodes: self.nodes(),
            node_count: self.random.pick(&[0, 0, 1, 1, 2, 3, 64, 65, u32::MAX]),
            other_rights: self.random.pick(&[0, 1, 3, 7, 7, 7, 8]),
            name: name(&self.name()),
            ..Default::default()
        };
        // More than these, and memory would run short.
        if self.handles.len() >= HANDLES {
            let (_, handle) = self.handles.swap_remove(NO_HANDLES.len());
            return device.ask(KITE_IOC_FREE_NR, &mut kite_handle { handle });
        }
        let errno = device.ask(KITE_IOC_ALLOC_NR, &mut alloc);
        self.keep(errno, alloc.handle)
    }

    fn map(&mut self, device: &Device) -> Errno {
        let mut map = kite_map {
            name: name(&self.name()),
            rights: self.random.pick(&[1, 2, 3, 4, 7, 7, 7, 0, 8]),
            reserved: self.random.pick(&[0, 0, 0, 0, 0, 1]),
            ..Default::default()
        };
        if self.handles.len() >= HANDLES {
            let (_, handle) = self.handles.swap_remove(NO_HANDLES.len());
            return device.ask(KITE_IOC_UNMAP_NR, &mut kite_handle { handle });
        }
        let errno = device.ask(KITE_IOC_MAP_NR, &mut map);
        self.keep(errno, map.handle)
    }

    fn keep(&mut self, errno: Errno, handle: u64) -> Errno {
        if errno == 0 {
            self.handles.push((self.session, handle));
        }
        errno
    }

    fn forget(&mut self, handle: u64) {
        let mut known = self.handles.iter().skip(NO_HANDLES.len());
        if let Some(at) = known.position(|known| *known == (self.session, handle)) {
            self.handles.swap_remove(NO_HANDLES.len() + at);
        }
    }

    fn transfer(&mut self, device: &Device, number: u32) -> Errno {
        let mut transfer = kite_rw {
            handle: self.handle(),
            offset: match self.random.below(3) {
                0 => self.number(),
                _ => self.random.below(50),
            },
            addr: self.place(),
            len: self.number(),
            timeout_ms: self.random.pick(&[0, 0, 0, 1, 5, u32::MAX]),
            reserved: self.random.pick(&[0, 0, 0, 0, 0, 0, 7]),
        };
        // The rest of the scratch mapping bounds what is written.
        if transfer.addr < 1 << 47 && transfer.len < 1 << 32 {
            transfer.len = transfer.len.min(60_000);
        }
        device.ask(number, &mut transfer)
    }

    fn vectored(&mut self, device: &Device, number: u32) -> Errno {
        let segments: Vec<kite_segment> = (0..self.random.below(20))
            .map(|_| kite_segment {
                offset: self.random.pick(&[0, 1, 4095, 1 << 20, u64::MAX]),
                addr: self.place(),
                len: self
                    .random
                    .pick(&[0, 1, 100, 5000, 60_000, 1 << 40, u64::MAX]),
            })
            .collect();
        // Also some of what follows them, which may be no memory.
        let extra = self.random.pick(&[0, 0, 0, 0, 1, 2000]);
        let mut rwv = kite_rwv {
            handle: self.handle(),
            segments: match self.random.below(8) {
                0 => self.place(),
                _ => segments.as_ptr() as u64,
            },
            count: segments.len() as u32 + extra,
            timeout_ms: self.random.pick(&[0, 1, u32::MAX]),
        };
        device.ask(number, &mut rwv)
    }

    fn place(&mut self) -> u64 {
        self.random.pick(&self.scratch.places) as u64
    }

    /// A handle of the session, of another, a former one, or none.
    fn handle(&mut self) -> u64 {
        let own = |(session, _): &&(usize, u64)| *session == self.session;
        let own: Vec<u64> = self
            .handles
            .iter()
            .filter(own)
            .map(|known| known.1)
            .collect();
        match self.random.below(8) {
            0 => self.random.below(2000),
            1 => self.random.pick(&self.handles).1,
            _ if own.is_empty() => 0,
            _ => self.random.pick(&own),
        }
    }

    fn number(&mut self) -> u64 {
        match self.random.below(4) {
            0 => self.random.pick(&[
                0,
                1,
                4095,
                4096,
                1 << 32,
                (1 << 32) - 1,
                1 << 62,
                1 << 63,
                u64::MAX,
                u64::MAX - 4096,
            ]),
            1 => self.random.next(),
            _ => self.random.size(20_000),
        }
    }

    /// One of few names, so that they are often taken.
    fn name(&mut self) -> String {
        match self.random.below(8) {
            0 | 1 => String::new(),
            2 => "n".repeat(64),
            n => format!("fuzz-{n}-{}", self.random.below(4)),
        }
    }
}
