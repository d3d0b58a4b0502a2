// SPDX-License-Identifier: GPL-2.0

//! Quality of service: how fast somebody may go ([`TokenBucket`]), and how fast requests of low priority may go beside
//! those of high priority ([`RateController`], which is LITE's SW-Pri, section 7 of the paper).
//!
//! Times are nanoseconds of a clock that never goes back. What is counted is up to the caller: bytes, or requests.

#[cfg(test)]
mod tests;
pub mod token_bucket;

pub use self::token_bucket::TokenBucket;
use core::num::NonZeroU64;

/// Millionths of one.
const USEC_PER_SEC: u64 = 1_000_000;

/// Length of the windows by which the governor measures, in nanoseconds.
const WINDOW_NS: u64 = 10_000_000;

/// Length of one with few requests of high priority: they may be few as they take long.
const LONG_WINDOW_NS: u64 = 10 * WINDOW_NS;

/// What a request costs besides its bytes.
const REQUEST_OVERHEAD_BYTES: u64 = 256;

/// Requests of high priority with fewer of which a window is a long one, and then there is no load to speak of.
const MIN_HIGH_REQUESTS: u32 = 8;

/// Requests are compared with those of a length like theirs: one class for each power of two, up to 1 MiB.
const SIZE_CLASSES: usize = 21;

/// Parts into which what low priority may have is divided.
const LOW_SHARE_DENOMINATOR: u64 = 32;

/// How much longer than at best requests of high priority may take on average, in sixteenths of that.
const LATENCY_INFLATION_MAX_16THS: u64 = 32;

/// By how much longer few requests take if there are few because low priority is in their way.
const LATENCY_INFLATION_BLOCKED_16THS: u64 = 256;

/// The most that one request counts for in that average: one that waited for a lost packet says little.
const LATENCY_INFLATION_CAP_16THS: u64 = 1024;

/// How long requests of one class take.
#[derive(Clone, Copy, Debug)]
struct SizeClass {
    /// The shortest time of one, in nanoseconds, if there was one.
    min_latency_ns: Option<NonZeroU64>,
    /// Whether there was one in this window.
    is_sampled: bool,
}

impl SizeClass {
    const NONE: Self = Self {
        min_latency_ns: None,
        is_sampled: false,
    };

    /// Returns how much longer than at best one took, in sixteenths.
    fn record_latency(&mut self, latency_ns: u64) -> u64 {
        let latency = NonZeroU64::new(latency_ns.min(u64::MAX >> 4)).unwrap_or(NonZeroU64::MIN);
        let min_latency = self
            .min_latency_ns
            .map_or(latency, |best| best.min(latency));
        self.min_latency_ns = Some(min_latency);
        self.is_sampled = true;
        (latency.get() * 16 / min_latency).min(LATENCY_INFLATION_CAP_16THS)
    }

    /// What was best may be no more; those that are seen say at once if it is.
    fn age_min_latency(&mut self) {
        if self.is_sampled {
            let longer = |best: NonZeroU64| best.saturating_add(best.get() / 64);
            self.min_latency_ns = self.min_latency_ns.map(longer);
        }
    }
}

/// Decides how fast requests of low priority go, from what those of high priority meet.
///
/// Its three policies are LITE's: while there is much of high priority, low priority gets what that leaves of
/// the most that was seen to go; while there is none or very little, low priority goes as it likes; and when
/// requests of high priority take longer than they could, low priority gets half as much, and then by and by
/// more again, and it begins with the least. It always gets some, so nobody starves.
#[derive(Clone, Debug)]
pub struct RateController {
    window_start: u64,
    /// What has gone in this window.
    high_cost: u64,
    low_cost: u64,
    high_requests: u32,
    /// How much longer than at best requests of high priority took, in sixteenths, added up.
    inflation_sum: u64,
    size_classes: [SizeClass; SIZE_CLASSES],
    /// The most that went, in a second.
    peak_rate: u64,
    /// How much low priority gets of what is left, in parts of [`WHOLE`]; of 0 the least.
    low_share: u64,
    /// What low priority may have in a second; 0 is any.
    low_rate: u64,
}

impl Default for RateController {
    fn default() -> Self {
        Self::new()
    }
}

/// What a request of so many bytes costs.
#[must_use]
pub fn request_cost(len: u64) -> u64 {
    len.saturating_add(REQUEST_OVERHEAD_BYTES)
}

fn size_class(len: u64) -> usize {
    (len.max(1).ilog2() as usize).min(SIZE_CLASSES - 1)
}

impl RateController {
    /// Low priority goes as it likes.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            window_start: 0,
            high_cost: 0,
            low_cost: 0,
            high_requests: 0,
            inflation_sum: 0,
            size_classes: [SizeClass::NONE; SIZE_CLASSES],
            peak_rate: 0,
            low_share: 0,
            low_rate: 0,
        }
    }

    /// What low priority may have in a second, as [`request_cost`] counts; 0 is any.
    #[must_use]
    pub const fn low_rate(&self) -> u64 {
        self.low_rate
    }

    /// A request of high priority, of so many bytes, took so long.
    pub fn record_high(&mut self, len: u64, latency_ns: u64) {
        self.high_cost = self.high_cost.saturating_add(request_cost(len));
        self.high_requests = self.high_requests.saturating_add(1);
        let inflation = self.size_classes[size_class(len)].record_latency(latency_ns);
        self.inflation_sum = self.inflation_sum.saturating_add(inflation);
    }

    /// A request of low priority, of so many bytes, has ended.
    pub fn record_low(&mut self, len: u64) {
        self.low_cost = self.low_cost.saturating_add(request_cost(len));
    }

    /// Looks at the window that ends now, if one does. Returns whether the rate is another.
    pub fn update(&mut self, now: u64) -> bool {
        let elapsed_ns = now.saturating_sub(self.window_start);
        let few_requests = self.high_requests < MIN_HIGH_REQUESTS;
        if elapsed_ns < WINDOW_NS || (few_requests && elapsed_ns < LONG_WINDOW_NS) {
            return false;
        }
        let previous_rate = self.low_rate;
        self.update_peak_rate(elapsed_ns / 1000);
        self.update_low_rate(elapsed_ns / 1000);
        self.window_start = now;
        (
            self.high_cost,
            self.low_cost,
            self.high_requests,
            self.inflation_sum,
        ) = (0, 0, 0, 0);
        self.size_classes
            .iter_mut()
            .for_each(|class| class.is_sampled = false);
        self.low_rate != previous_rate
    }

    /// Takes note of how much can go, and how fast.
    fn update_peak_rate(&mut self, elapsed_us: u64) {
        let total_rate = rate_per_second(self.high_cost.saturating_add(self.low_cost), elapsed_us);
        if self.low_rate == 0 {
            // It may be less than it was. While low priority is held back, less says nothing.
            self.peak_rate -= self.peak_rate / 64;
        }
        self.peak_rate = self.peak_rate.max(total_rate);
        if self.low_cost == 0 {
            // Times beside low priority do not say how short they could be now.
            self.size_classes
                .iter_mut()
                .for_each(SizeClass::age_min_latency);
        }
    }

    /// Whether requests of high priority take so much longer than at best, in sixteenths, on average.
    fn is_inflated_above(&self, inflation: u64) -> bool {
        self.inflation_sum > inflation * u64::from(self.high_requests)
    }

    fn update_low_rate(&mut self, elapsed_us: u64) {
        if self.high_requests < MIN_HIGH_REQUESTS
            && !self.is_inflated_above(LATENCY_INFLATION_BLOCKED_16THS)
        {
            (self.low_share, self.low_rate) = (0, 0);
            return;
        }
        if self.low_rate != 0 {
            self.low_share = match self.is_inflated_above(LATENCY_INFLATION_MAX_16THS) {
                true => self.low_share / 2,
                false => (self.low_share + 1).min(LOW_SHARE_DENOMINATOR),
            };
        }
        let unused_rate = self
            .peak_rate
            .saturating_sub(rate_per_second(self.high_cost, elapsed_us));
        let min_rate = (self.peak_rate / LOW_SHARE_DENOMINATOR).max(1);
        self.low_rate = (unused_rate / LOW_SHARE_DENOMINATOR)
            .saturating_mul(self.low_share)
            .max(min_rate);
    }
}

fn rate_per_second(cost: u64, elapsed_us: u64) -> u64 {
    cost.saturating_mul(USEC_PER_SEC) / elapsed_us.max(1)
}
