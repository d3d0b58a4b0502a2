// SPDX-License-Identifier: GPL-2.0

//! Token bucket rate limiter.

use super::USEC_PER_SEC;

/// Time for which unused rate is kept for later use, in microseconds.
///
/// A caller that sleeps between requests wakes later than requested. The burst compensates for the delay.
pub(super) const BURST_US: u64 = 10_000;

/// Maximum elapsed time that is credited at once, in microseconds. Any practical debt is repaid by then.
const MAX_ELAPSED_US: u64 = 1 << 40;

/// Token bucket in the form of a debt: requests add their cost, and the debt decreases at the configured
/// rate.
#[derive(Clone, Copy, Debug, Default)]
pub struct TokenBucket {
    /// Rate in cost per second; 0: unlimited.
    rate: u64,
    /// Cost that was charged and is not yet covered by elapsed time, in millionths.
    debt: u64,
    updated_at: u64,
}

impl TokenBucket {
    /// Creates a bucket without a limit.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            rate: 0,
            debt: 0,
            updated_at: 0,
        }
    }

    /// Returns the rate in cost per second; 0: unlimited.
    #[must_use]
    pub const fn rate(&self) -> u64 {
        self.rate
    }

    /// Sets the rate in cost per second from `now` on; 0: unlimited.
    pub fn set_rate(&mut self, now: u64, rate: u64) {
        self.replenish(now);
        self.rate = rate;
        if rate == 0 {
            self.debt = 0;
        }
    }

    /// Returns the time in nanoseconds from which the next request may start.
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

    /// Takes back the charge of a request that does not start.
    pub fn refund(&mut self, cost: u64) {
        self.debt = self.debt.saturating_sub(cost.saturating_mul(USEC_PER_SEC));
    }

    /// Charges a request that starts. The caller must have waited until [`Self::next_ready_at`].
    pub fn charge(&mut self, cost: u64) {
        if self.rate != 0 {
            self.debt = self.debt.saturating_add(cost.saturating_mul(USEC_PER_SEC));
        }
    }

    /// Reduces the debt by the elapsed time. Fractions of a microsecond carry over.
    fn replenish(&mut self, now: u64) {
        let elapsed_us = now.saturating_sub(self.updated_at) / 1000;
        self.updated_at += elapsed_us * 1000;
        let replenished = elapsed_us.min(MAX_ELAPSED_US).saturating_mul(self.rate);
        self.debt = self.debt.saturating_sub(replenished);
    }
}
