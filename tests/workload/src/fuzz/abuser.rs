// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Random requests of one thread, and the random values in them.

use anyhow::Result;

use super::scratch::Scratch;
use crate::support::abi::*;
use crate::support::random::Random;

/// Handles of a thread before it has valid ones.
pub(super) const NO_HANDLES: [u64; 3] = [0, 1, u64::MAX];

/// State of a thread.
pub(super) struct Abuser {
    pub(super) random: Random,
    pub(super) scratch: Scratch,
    /// Session of the next request: 0 is the thread's own, the others are shared.
    pub(super) session: usize,
    /// Session and handle.
    pub(super) handles: Vec<(usize, u64)>,
}

impl Abuser {
    pub(super) fn new(seed: u64, thread: u64) -> Result<Self> {
        Ok(Self {
            random: Random::new(seed, thread),
            scratch: Scratch::new()?,
            session: 0,
            handles: NO_HANDLES.map(|handle| (0, handle)).to_vec(),
        })
    }

    /// Makes one request of any kind.
    pub(super) fn request(&mut self, device: &Device) -> Errno {
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
            _ => device.ioctl_at(number, self.place() as usize),
        }
    }

    /// A structure whose words are random, though some of them handles and addresses.
    pub(super) fn noise(&mut self, device: &Device, number: u32) -> Errno {
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
        device.ioctl(number, &mut words)
    }

    pub(super) fn keep(&mut self, errno: Errno, handle: u64) -> Errno {
        if errno == 0 {
            self.handles.push((self.session, handle));
        }
        errno
    }

    pub(super) fn forget(&mut self, handle: u64) {
        let mut known = self.handles.iter().skip(NO_HANDLES.len());
        if let Some(at) = known.position(|known| *known == (self.session, handle)) {
            self.handles.swap_remove(NO_HANDLES.len() + at);
        }
    }

    pub(super) fn place(&mut self) -> u64 {
        self.random.pick(&self.scratch.places) as u64
    }

    /// A handle of the session, of another, a former one, or none.
    pub(super) fn handle(&mut self) -> u64 {
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

    pub(super) fn number(&mut self) -> u64 {
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
    pub(super) fn name(&mut self) -> String {
        match self.random.below(8) {
            0 | 1 => String::new(),
            2 => "n".repeat(64),
            n => format!("fuzz-{n}-{}", self.random.below(4)),
        }
    }
}
