// SPDX-License-Identifier: GPL-2.0

//! How fast somebody may go.

use super::MICROS;

/// How much of what was not used may be used later, in microseconds of the pace: who sleeps between requests
/// sleeps for longer than asked, and is not to lose by it.
pub(super) const CREDIT_US: u64 = 10_000;

/// Longest time that is counted at once, in microseconds; by then every debt is paid that can be.
const LONG_US: u64 = 1 << 40;

/// How much may go in a time: a bucket that runs out at a steady rate, and into which each request is poured.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pace {
    /// In a second; 0 is any.
    rate: u64,
    /// What went and was not allowed yet, in millionths.
    debt: u64,
    at: u64,
}

impl Pace {
    /// Any.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            rate: 0,
            debt: 0,
            at: 0,
        }
    }

    /// How much may go in a second; 0 is any.
    #[must_use]
    pub const fn rate(&self) -> u64 {
        self.rate
    }

    /// Changes how much may go in a second, from now on; 0 is any.
    pub fn set(&mut self, now: u64, rate: u64) {
        self.drain(now);
        self.rate = rate;
        if rate == 0 {
            self.debt = 0;
        }
    }

    /// When the next may go.
    #[must_use]
    pub fn ready(&mut self, now: u64) -> u64 {
        self.drain(now);
        let credit = self.rate.saturating_mul(CREDIT_US);
        let excess = self.debt.saturating_sub(credit);
        match excess.checked_div(self.rate) {
            Some(us) if excess != 0 => now.saturating_add((us + 1).saturating_mul(1000)),
            _ => now,
        }
    }

    /// One of that cost does not go after all.
    pub fn give_back(&mut self, cost: u64) {
        self.debt = self.debt.saturating_sub(cost.saturating_mul(MICROS));
    }

    /// One of that cost goes, when it is ready.
    pub fn take(&mut self, cost: u64) {
        if self.rate != 0 {
            self.debt = self.debt.saturating_add(cost.saturating_mul(MICROS));
        }
    }

    /// Lets what the time since the last look allows run out. Parts of microseconds are left for later.
    fn drain(&mut self, now: u64) {
        let us = now.saturating_sub(self.at) / 1000;
        self.at += us * 1000;
        let drained = us.min(LONG_US).saturating_mul(self.rate);
        self.debt = self.debt.saturating_sub(drained);
    }
}
