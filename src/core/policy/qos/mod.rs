// SPDX-License-Identifier: GPL-2.0

//! Quality of service: rate limits ([`TokenBucket`]) and the control of low-priority traffic
//! ([`RateController`]).
//!
//! [`RateController`] is LITE's SW-Pri (section 7): it limits low priority according to the load and the
//! latency of high priority.
//!
//! Times are nanoseconds of a monotonic clock. The caller chooses the unit of cost: bytes or requests.

#[cfg(test)]
mod tests;
pub mod token_bucket;

pub use self::token_bucket::TokenBucket;
use core::num::NonZeroU64;

/// Microseconds per second. Debts and rates are scaled by this factor.
const USEC_PER_SEC: u64 = 1_000_000;

/// Length of a measurement window of the controller, in nanoseconds.
const WINDOW_NS: u64 = 10_000_000;

/// Maximum length of a window with few high-priority requests, in nanoseconds: there may be few because each
/// takes long.
const LONG_WINDOW_NS: u64 = 10 * WINDOW_NS;

/// Cost of a request beside its length, in bytes.
const REQUEST_OVERHEAD_BYTES: u64 = 256;

/// Minimum number of high-priority requests in a normal window. With fewer requests the window is extended to
/// [`LONG_WINDOW_NS`]. The load then counts as negligible, unless [`LATENCY_INFLATION_BLOCKED_16THS`] is
/// exceeded.
const MIN_HIGH_REQUESTS: u32 = 8;

/// Number of size classes, one for each power of two up to 1 MiB. Latencies are compared within a class.
const SIZE_CLASSES: usize = 21;

/// Number of parts into which the rate that low priority may use is divided.
const LOW_SHARE_DENOMINATOR: u64 = 32;

/// Mean latency of high priority above which low priority is throttled, in sixteenths of the minimum (32:
/// twice).
const LATENCY_INFLATION_MAX_16THS: u64 = 32;

/// Mean latency above which high-priority requests are few because low priority blocks them, in sixteenths
/// (256: 16 times the minimum).
const LATENCY_INFLATION_BLOCKED_16THS: u64 = 256;

/// Maximum contribution of one request to the mean, in sixteenths: the wait for a lost packet is no sign of
/// load.
const LATENCY_INFLATION_CAP_16THS: u64 = 1024;

/// Latency statistics of one size class.
#[derive(Clone, Copy, Debug)]
struct SizeClass {
    /// Shortest latency, in nanoseconds. `None` before the first request.
    min_latency_ns: Option<NonZeroU64>,
    /// `true` if a request of the class completed in the current window.
    is_sampled: bool,
}

impl SizeClass {
    const NONE: Self = Self {
        min_latency_ns: None,
        is_sampled: false,
    };

    /// Records a latency. Returns the latency in sixteenths of the minimum.
    fn record_latency(&mut self, latency_ns: u64) -> u64 {
        let latency = NonZeroU64::new(latency_ns.min(u64::MAX >> 4)).unwrap_or(NonZeroU64::MIN);
        let min_latency = self
            .min_latency_ns
            .map_or(latency, |best| best.min(latency));
        self.min_latency_ns = Some(min_latency);
        self.is_sampled = true;
        (latency.get() * 16 / min_latency).min(LATENCY_INFLATION_CAP_16THS)
    }

    /// Raises the minimum by 1/64, since the true minimum may have increased.
    ///
    /// Only classes with a sample in the window age: if the minimum is still valid, a new sample restores it
    /// at once.
    fn age_min_latency(&mut self) {
        if self.is_sampled {
            let longer = |best: NonZeroU64| best.saturating_add(best.get() / 64);
            self.min_latency_ns = self.min_latency_ns.map(longer);
        }
    }
}

/// Controller of the rate of low priority, driven by measurements of high priority.
///
/// The three policies are LITE's:
///
/// - While the high-priority load is high, low priority gets a share of the peak rate that high priority
///   leaves unused.
/// - While the high-priority load is zero or negligible, low priority is unlimited.
/// - While the mean latency of high priority exceeds twice the minimum, each window halves the share of low
///   priority. Otherwise the share grows by one part per window. The initial share is the minimum.
///
/// A limit is at least 1/32 of the peak rate, so low priority does not starve.
#[derive(Clone, Debug)]
pub struct RateController {
    window_start: u64,
    /// Cost of the requests completed in the current window, by priority.
    high_cost: u64,
    low_cost: u64,
    high_requests: u32,
    /// Sum of the latencies of high priority in the window, in sixteenths of the minimum.
    inflation_sum: u64,
    size_classes: [SizeClass; SIZE_CLASSES],
    /// Highest total cost per second that was measured. Decays by 1/64 per window while low priority is
    /// unlimited.
    peak_rate: u64,
    /// Share of the unused rate for low priority, in parts of [`LOW_SHARE_DENOMINATOR`]. 0 gives the minimum
    /// rate.
    low_share: u64,
    /// Rate limit of low priority, in cost per second; 0: unlimited.
    low_rate: u64,
}

impl Default for RateController {
    fn default() -> Self {
        Self::new()
    }
}

/// Returns the cost of a request of `len` bytes.
#[must_use]
pub fn request_cost(len: u64) -> u64 {
    len.saturating_add(REQUEST_OVERHEAD_BYTES)
}

fn size_class(len: u64) -> usize {
    (len.max(1).ilog2() as usize).min(SIZE_CLASSES - 1)
}

impl RateController {
    /// Creates a controller that does not limit low priority.
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

    /// Returns the rate limit of low priority per second, in units of [`request_cost`]; 0: unlimited.
    #[must_use]
    pub const fn low_rate(&self) -> u64 {
        self.low_rate
    }

    /// Records a completed high-priority request of `len` bytes.
    pub fn record_high(&mut self, len: u64, latency_ns: u64) {
        self.high_cost = self.high_cost.saturating_add(request_cost(len));
        self.high_requests = self.high_requests.saturating_add(1);
        let inflation = self.size_classes[size_class(len)].record_latency(latency_ns);
        self.inflation_sum = self.inflation_sum.saturating_add(inflation);
    }

    /// Records a completed low-priority request of `len` bytes.
    pub fn record_low(&mut self, len: u64) {
        self.low_cost = self.low_cost.saturating_add(request_cost(len));
    }

    /// Evaluates the measurement window if it has ended. Returns `true` if the rate limit changed.
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

    /// Updates the peak rate and the minimum latencies.
    fn update_peak_rate(&mut self, elapsed_us: u64) {
        let total_rate = rate_per_second(self.high_cost.saturating_add(self.low_cost), elapsed_us);
        if self.low_rate == 0 {
            // The capacity may have decreased. While low priority is throttled, a low total rate does not
            // show a decrease.
            self.peak_rate -= self.peak_rate / 64;
        }
        self.peak_rate = self.peak_rate.max(total_rate);
        if self.low_cost == 0 {
            // Latencies measured beside low priority do not show the minimum, so the minimum ages only
            // without low priority.
            self.size_classes
                .iter_mut()
                .for_each(SizeClass::age_min_latency);
        }
    }

    /// Returns `true` if the mean latency of high priority exceeds `inflation`, in sixteenths of the minimum.
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
