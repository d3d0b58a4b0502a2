// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Random requests of one thread, and the random values in them.

use anyhow::Result;

use super::scratch::Scratch;
use crate::support::abi::*;
use crate::support::random::Random;

/// Handles of a thread before it has valid ones.
pub(super) const NO_HANDLES: [u64; 3] = [0, 1, u64::MAX];

/// State of a thread.
pub(super) struct RequestFuzzer {
    pub(super) random: Random,
    pub(super) scratch: Scratch,
    /// Session of the next request: 0 is the thread's own, the others are shared.
    pub(super) session: usize,
    /// Session and handle.
    pub(super) handles: Vec<(usize, u64)>,
}

impl RequestFuzzer {
    pub(super) fn new(seed: u64, thread: u64) -> Result<Self> {
        Ok(Self {
            random: Random::new(seed, thread),
            scratch: Scratch::new()?,
            session: 0,
            handles: NO_HANDLES.map(|handle| (0, handle)).to_vec(),
        })
    }

    /// Makes one request of a random kind.
    pub(super) fn make_request(&mut self, device: &Device) -> Errno {
        let number = self.random.pick(&REQUESTS);
        match self.random.below(16) {
            0 => {
                let number = self.random.next() as u32;
                self.request_at_random_address(device, number)
            }
            1 => {
                let flipped = number ^ (1 << self.random.below(32));
                self.request_at_random_address(device, flipped)
            }
            2 => self.request_at_random_address(device, number),
            3 => self.request_random_words(device, number),
            _ => self.request_plausible(device, number),
        }
    }

    /// Uses a random address as argument, mapped or not; for requests that wait for others random words, since memory
    /// could contain a deadline of hours.
    fn request_at_random_address(&mut self, device: &Device, number: u32) -> Errno {
        match number {
            KITE_IOC_LOCK_NR
            | KITE_IOC_BARRIER_NR
            | KITE_IOC_ENTER_NR
            | KITE_IOC_POP_NR
            | KITE_IOC_ACCEPT_NR
            | KITE_IOC_POP_MESSAGE_NR => self.request_random_words(device, number),
            _ => device.ioctl_at(number, self.random_address() as usize),
        }
    }

    /// Makes a request with random words, some of them handles and addresses.
    pub(super) fn request_random_words(&mut self, device: &Device, number: u32) -> Errno {
        let mut words = [0_u64; 64];
        for word in &mut words[..size(number).div_ceil(8)] {
            *word = match self.random.below(5) {
                0 => self.random_address(),
                1 => self.handle(),
                2 => self.number(),
                3 => 0,
                // Never a user address.
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

    pub(super) fn add_handle(&mut self, errno: Errno, handle: u64) -> Errno {
        if errno == 0 {
            self.handles.push((self.session, handle));
        }
        errno
    }

    pub(super) fn remove_handle(&mut self, handle: u64) {
        let mut known = self.handles.iter().skip(NO_HANDLES.len());
        if let Some(at) = known.position(|known| *known == (self.session, handle)) {
            self.handles.swap_remove(NO_HANDLES.len() + at);
        }
    }

    pub(super) fn random_address(&mut self) -> u64 {
        self.random.pick(&self.scratch.addresses) as u64
    }

    /// Returns a handle of this session or of another, open, closed or invalid.
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

    /// Returns one of a few names, so that names are often in use.
    pub(super) fn name(&mut self) -> String {
        match self.random.below(8) {
            0 | 1 => String::new(),
            2 => "n".repeat(64),
            n => format!("fuzz-{n}-{}", self.random.below(4)),
        }
    }
}
