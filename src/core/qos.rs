// SPDX-License-Identifier: GPL-2.0

//! Quality of service: how fast somebody may go ([`Pace`]), and how fast requests of low priority may go beside
//! those of high priority ([`Governor`], which is LITE's SW-Pri, section 7 of the paper).
//!
//! Times are nanoseconds of a clock that never goes back. What is counted is up to the caller: bytes, or requests.

mod pace;
#[cfg(test)]
mod tests;

use core::num::NonZeroU64;
pub use pace::Pace;

/// Millionths of one.
const MICROS: u64 = 1_000_000;

/// Length of the windows by which the governor measures, in nanoseconds.
const WINDOW_NS: u64 = 10_000_000;

/// Length of one with few requests of high priority: they may be few as they take long.
const LONG_WINDOW_NS: u64 = 10 * WINDOW_NS;

/// What a request costs besides its bytes.
const REQUEST_COST: u64 = 256;

/// Requests of high priority with fewer of which a window is a long one, and then there is no load to speak of.
const FEW: u32 = 8;

/// Requests are compared with those of a length like theirs: one class for each power of two, up to 1 MiB.
const CLASSES: usize = 21;

/// Parts into which what low priority may have is divided.
const WHOLE: u64 = 32;

/// How much longer than at best requests of high priority may take on average, in sixteenths of that.
const STRETCH_MAX: u64 = 32;

/// By how much longer few requests take if there are few because low priority is in their way.
const STRETCH_STUCK: u64 = 256;

/// The most that one request counts for in that average: one that waited for a lost packet says little.
const STRETCH_CAP: u64 = 1024;

/// How long requests of one class take.
#[derive(Clone, Copy, Debug)]
struct Class {
    /// The shortest time of one, in nanoseconds, if there was one.
    best: Option<NonZeroU64>,
    /// Whether there was one in this window.
    seen: bool,
}

impl Class {
    const NONE: Self = Self {
        best: None,
        seen: false,
    };

    /// Returns how much longer than at best one took, in sixteenths.
    fn stretch(&mut self, took_ns: u64) -> u64 {
        let took = NonZeroU64::new(took_ns.min(u64::MAX >> 4)).unwrap_or(NonZeroU64::MIN);
        let best = self.best.map_or(took, |best| best.min(took));
        self.best = Some(best);
        self.seen = true;
        (took.get() * 16 / best).min(STRETCH_CAP)
    }

    /// What was best may be no more; those that are seen say at once if it is.
    fn forget(&mut self) {
        if self.seen {
            let longer = |best: NonZeroU64| best.saturating_add(best.get() / 64);
            self.best = self.best.map(longer);
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
pub struct Governor {
    since: u64,
    /// What has gone in this window.
    high: u64,
    low: u64,
    requests: u32,
    /// How much longer than at best requests of high priority took, in sixteenths, added up.
    stretch: u64,
    classes: [Class; CLASSES],
    /// The most that went, in a second.
    peak: u64,
    /// How much low priority gets of what is left, in parts of [`WHOLE`]; of 0 the least.
    parts: u64,
    /// What low priority may have in a second; 0 is any.
    rate: u64,
}

impl Default for Governor {
    fn default() -> Self {
        Self::new()
    }
}

/// What a request of so many bytes costs.
#[must_use]
pub fn cost(len: u64) -> u64 {
    len.saturating_add(REQUEST_COST)
}

fn class(len: u64) -> usize {
    (len.max(1).ilog2() as usize).min(CLASSES - 1)
}

impl Governor {
    /// Low priority goes as it likes.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            since: 0,
            high: 0,
            low: 0,
            requests: 0,
            stretch: 0,
            classes: [Class::NONE; CLASSES],
            peak: 0,
            parts: 0,
            rate: 0,
        }
    }

    /// What low priority may have in a second, as [`cost`] counts; 0 is any.
    #[must_use]
    pub const fn rate(&self) -> u64 {
        self.rate
    }

    /// A request of high priority, of so many bytes, took so long.
    pub fn high_done(&mut self, len: u64, took_ns: u64) {
        self.high = self.high.saturating_add(cost(len));
        self.requests = self.requests.saturating_add(1);
        let stretch = self.classes[class(len)].stretch(took_ns);
        self.stretch = self.stretch.saturating_add(stretch);
    }

    /// A request of low priority, of so many bytes, has ended.
    pub fn low_done(&mut self, len: u64) {
        self.low = self.low.saturating_add(cost(len));
    }

    /// Looks at the window that ends now, if one does. Returns whether the rate is another.
    pub fn look(&mut self, now: u64) -> bool {
        let length = now.saturating_sub(self.since);
        let few = self.requests < FEW;
        if length < WINDOW_NS || (few && length < LONG_WINDOW_NS) {
            return false;
        }
        let before = self.rate;
        self.measure(length / 1000);
        self.decide(length / 1000);
        self.since = now;
        (self.high, self.low, self.requests, self.stretch) = (0, 0, 0, 0);
        self.classes.iter_mut().for_each(|class| class.seen = false);
        self.rate != before
    }

    /// Takes note of how much can go, and how fast.
    fn measure(&mut self, us: u64) {
        let all = per_second(self.high.saturating_add(self.low), us);
        if self.rate == 0 {
            // It may be less than it was. While low priority is held back, less says nothing.
            self.peak -= self.peak / 64;
        }
        self.peak = self.peak.max(all);
        if self.low == 0 {
            // Times beside low priority do not say how short they could be now.
            self.classes.iter_mut().for_each(Class::forget);
        }
    }

    /// Whether requests of high priority take so much longer than at best, in sixteenths, on average.
    fn is_stretched(&self, by: u64) -> bool {
        self.stretch > by * u64::from(self.requests)
    }

    fn decide(&mut self, us: u64) {
        if self.requests < FEW && !self.is_stretched(STRETCH_STUCK) {
            (self.parts, self.rate) = (0, 0);
            return;
        }
        if self.rate != 0 {
            self.parts = match self.is_stretched(STRETCH_MAX) {
                true => self.parts / 2,
                false => (self.parts + 1).min(WHOLE),
            };
        }
        let left = self.peak.saturating_sub(per_second(self.high, us));
        let least = (self.peak / WHOLE).max(1);
        self.rate = (left / WHOLE).saturating_mul(self.parts).max(least);
    }
}

fn per_second(cost: u64, us: u64) -> u64 {
    cost.saturating_mul(MICROS) / us.max(1)
}
