// SPDX-License-Identifier: GPL-2.0

//! How fast somebody may go.

use super::USEC_PER_SEC;

/// How much of what was not used may be used later, in microseconds of the pace: who sleeps between requests
/// sleeps for longer than asked, and is not to lose by it.
pub(super) const BURST_US: u64 = 10_000;

/// Longest time that is counted at once, in microseconds; by then every debt is paid that can be.
const MAX_ELAPSED_US: u64 = 1 << 40;

/// How much may go in a time: a bucket that runs out at a steady rate, and into which each request is poured.
#[derive(Clone, Copy, Debug, Default)]
pub struct TokenBucket {
    /// In a second; 0 is any.
    rate: u64,
    /// What went and was not allowed yet, in millionths.
    debt: u64,
    updated_at: u64,
}

impl TokenBucket {
    /// Any.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            rate: 0,
            debt: 0,
            updated_at: 0,
        }
    }

    /// How much may go in a second; 0 is any.
    #[must_use]
    pub const fn rate(&self) -> u64 {
        self.rate
    }

    /// Changes how much may go in a second, from now on; 0 is any.
    pub fn set_rate(&mut self, now: u64, rate: u64) {
        self.replenish(now);
        self.rate = rate;
        if rate == 0 {
            self.debt = 0;
        }
    }

    /// When the next may go.
    #[must_use]
    pub fn next_ready_at(&mut self, now: u64) -> u64 {
        self.replenish(now);
        let burst = self.rate.saturating_mul(BURST_US);
        let excess = self.debt.saturating_sub(burst);
        match excess.checked_div(self.rate) {
            Some(us) if excess != 0 => now.saturating_add((us + 1).saturating_mul(1000)),
            _ => now,
        }
    }

    /// One of that cost does not go after all.
    pub fn refund(&mut self, cost: u64) {
        self.debt = self.debt.saturating_sub(cost.saturating_mul(USEC_PER_SEC));
    }

    /// One of that cost goes, when it is ready.
    pub fn charge(&mut self, cost: u64) {
        if self.rate != 0 {
            self.debt = self.debt.saturating_add(cost.saturating_mul(USEC_PER_SEC));
        }
    }

    /// Lets what the time since the last look allows run out. Parts of microseconds are left for later.
    fn replenish(&mut self, now: u64) {
        let elapsed_us = now.saturating_sub(self.updated_at) / 1000;
        self.updated_at += elapsed_us * 1000;
        let replenished = elapsed_us.min(MAX_ELAPSED_US).saturating_mul(self.rate);
        self.debt = self.debt.saturating_sub(replenished);
    }
}
