// SPDX-License-Identifier: GPL-2.0

//! Deadlines of requests, and retries until a deadline.
//!
//! The `kernel` crate wraps neither `fatal_signal_pending` nor a public getter of `Instant`. With both,
//! [`fatal_signal_pending`] and [`monotonic_ns`] can be removed. [`Deadline`] and [`retry_until`] are kite's
//! own.

use crate::{
    bindings::{self, inline},
    errno::{TryError, TryResult},
};
use kernel::{
    prelude::*,
    time::{delay::fsleep, ClockSource, Delta, Instant, Monotonic, RealTime},
};

/// Returns `true` if the current task is being killed, so no user receives its results.
pub(crate) fn fatal_signal_pending() -> bool {
    // SAFETY: `current` is valid.
    unsafe { inline::fatal_signal_pending(bindings::get_current()) != 0 }
}

/// Returns the monotonic time in nanoseconds.
pub(crate) fn monotonic_ns() -> u64 {
    // SAFETY: The function has no preconditions.
    unsafe { bindings::ktime_get() }.unsigned_abs()
}

/// Returns the time since 1970 in nanoseconds, by the clock that the administrator sets.
pub(crate) fn real_time_ns() -> u64 {
    RealTime::ktime_get().unsigned_abs()
}

/// Longest sleep of a waiter, in ms, before it checks its condition, its peer and its deadline again. Bounds
/// the delay if a wake-up was lost, or if the end of a peer raises no event.
pub(crate) const WAIT_SLICE_MS: u32 = 50;

/// Point in monotonic time at which a request times out.
#[derive(Clone, Copy)]
pub(crate) struct Deadline {
    start: Instant<Monotonic>,
    timeout: Delta,
    interruptible: bool,
}

impl Deadline {
    /// Returns a deadline `ms` milliseconds from now. Only fatal signals interrupt a wait.
    pub(crate) fn after_ms(ms: u32) -> Self {
        let timeout = Delta::from_millis(i64::from(ms));
        Self {
            start: Instant::now(),
            timeout,
            interruptible: false,
        }
    }

    /// Returns the same deadline, but with any signal to the waiting task ending the wait, not only a fatal
    /// one.
    pub(crate) fn interruptible(self) -> Self {
        Self {
            interruptible: true,
            ..self
        }
    }

    /// Checks that the request may continue.
    ///
    /// # Errors
    ///
    /// - `ETIMEDOUT`: the deadline has passed.
    /// - `EINTR`: a signal that may end the wait is pending.
    pub(crate) fn check(&self) -> Result {
        if self.has_expired() {
            return Err(ETIMEDOUT);
        }
        if self.is_interrupted() {
            return Err(EINTR);
        }
        Ok(())
    }

    fn is_interrupted(&self) -> bool {
        kernel::current!().signal_pending() && (self.interruptible || fatal_signal_pending())
    }

    /// Returns the earlier of this deadline and `ms` milliseconds from now.
    pub(crate) fn capped_at_ms(self, ms: u32) -> Self {
        if self.remaining_ms() <= ms {
            return self;
        }
        Self {
            interruptible: self.interruptible,
            ..Self::after_ms(ms)
        }
    }

    /// Handles a signal that ended a wait early.
    ///
    /// Sleeps for 1 ms if the signal must not end the request, because the next wait would return at once.
    ///
    /// # Errors
    ///
    /// - `EINTR`: the signal may end the wait.
    pub(crate) fn handle_signal(&self) -> Result {
        if self.is_interrupted() {
            return Err(EINTR);
        }
        fsleep(Delta::from_millis(1));
        Ok(())
    }

    /// Returns `true` if the deadline has passed.
    pub(crate) fn has_expired(&self) -> bool {
        self.has_expired_at(Instant::now())
    }

    /// Returns `true` if the deadline has passed at `now`.
    pub(crate) fn has_expired_at(&self, now: Instant<Monotonic>) -> bool {
        now - self.start >= self.timeout
    }

    /// Returns the length of the next sleep of a waiter in ms: the remaining time, at most [`WAIT_SLICE_MS`].
    pub(crate) fn slice_ms(&self) -> u32 {
        self.remaining_ms().min(WAIT_SLICE_MS)
    }

    /// Returns the remaining milliseconds, at least 1, so a wait with the result as timeout always ends.
    pub(crate) fn remaining_ms(&self) -> u32 {
        let remaining_ms = self.timeout.as_millis() - self.start.elapsed().as_millis();
        u32::try_from(remaining_ms).unwrap_or(0).max(1)
    }
}

/// Minimum and maximum delay between two attempts, in microseconds. Most conditions change after a few
/// messages of another node.
const RETRY_MIN_US: i64 = 50;
const RETRY_MAX_US: i64 = 2_000;

/// Calls `f` until it succeeds or fails, with exponential back-off.
///
/// # Errors
///
/// - `ETIMEDOUT`: the deadline has passed.
/// - `EINTR`: a signal that may end the wait is pending.
/// - The error with which `f` failed.
pub(crate) fn retry_until<T>(deadline: Deadline, mut f: impl FnMut() -> TryResult<T>) -> Result<T> {
    let mut delay_us = RETRY_MIN_US;
    loop {
        match f() {
            Ok(value) => return Ok(value),
            Err(TryError::Failed(error)) => return Err(error),
            Err(TryError::WouldBlock | TryError::InTransition) => {}
        }
        deadline.check()?;
        fsleep(Delta::from_micros(delay_us));
        delay_us = (2 * delay_us).min(RETRY_MAX_US);
    }
}
