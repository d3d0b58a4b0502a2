// SPDX-License-Identifier: GPL-2.0

//! The moment at which a request gives up.

use crate::{
    bindings::{self, inline},
    errno,
};
use kernel::{
    prelude::*,
    time::{delay::fsleep, Delta, Instant, Monotonic},
};

/// Whether the current task is being killed: nobody hears any more of what it does.
pub(crate) fn fatal_signal_pending() -> bool {
    // SAFETY: `current` is valid.
    unsafe { inline::fatal_signal_pending(bindings::get_current()) != 0 }
}

/// Nanoseconds of monotonic time.
pub(crate) fn monotonic_ns() -> u64 {
    // SAFETY: The function has no preconditions.
    unsafe { bindings::ktime_get() }.unsigned_abs()
}

/// A moment in monotonic time.
#[derive(Clone, Copy)]
pub(crate) struct Deadline {
    start: Instant<Monotonic>,
    timeout: Delta,
    interruptible: bool,
}

impl Deadline {
    /// `ms` milliseconds from now.
    pub(crate) fn after_ms(ms: u32) -> Self {
        let timeout = Delta::from_millis(i64::from(ms));
        Self {
            start: Instant::now(),
            timeout,
            interruptible: false,
        }
    }

    /// The same moment, but any signal to the waiting task ends the wait earlier, not only one that kills it.
    pub(crate) fn interruptible(self) -> Self {
        Self {
            interruptible: true,
            ..self
        }
    }

    /// Whether to go on.
    ///
    /// # Errors
    ///
    /// `ETIMEDOUT` if it has passed, `EINTR` if there is a signal that may end the wait.
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

    /// The same moment, or that in so many milliseconds if it is earlier.
    pub(crate) fn capped_at_ms(self, ms: u32) -> Self {
        if self.remaining_ms() <= ms {
            return self;
        }
        Self {
            interruptible: self.interruptible,
            ..Self::after_ms(ms)
        }
    }

    /// What a wait does that a signal cut short.
    ///
    /// # Errors
    ///
    /// `EINTR` if the signal may end it; else it is delayed a little, as it would return at once again.
    pub(crate) fn handle_signal(&self) -> Result {
        if self.is_interrupted() {
            return Err(EINTR);
        }
        fsleep(Delta::from_millis(1));
        Ok(())
    }

    /// Whether it has passed.
    pub(crate) fn has_expired(&self) -> bool {
        self.has_expired_at(Instant::now())
    }

    /// Whether it has passed by then.
    pub(crate) fn has_expired_at(&self, now: Instant<Monotonic>) -> bool {
        now - self.start >= self.timeout
    }

    /// Milliseconds left, at least 1 so that a wait of so long always ends.
    pub(crate) fn remaining_ms(&self) -> u32 {
        let remaining_ms = self.timeout.as_millis() - self.start.elapsed().as_millis();
        u32::try_from(remaining_ms).unwrap_or(0).max(1)
    }
}

/// Time before something is tried again that could not be done yet: at first, and at most. Much of what is
/// waited for takes another node a few messages.
const RETRY_MIN_US: i64 = 50;
const RETRY_MAX_US: i64 = 2_000;

/// Calls `f` again and again while it says `EAGAIN` or `EINPROGRESS`: the view is settling, a region is moving, or
/// what was asked for takes its time.
///
/// # Errors
///
/// Those of `f`, `ETIMEDOUT`, or `EINTR` for a task that is killed.
pub(crate) fn retry_until<T>(deadline: Deadline, mut f: impl FnMut() -> Result<T>) -> Result<T> {
    let mut delay_us = RETRY_MIN_US;
    loop {
        match f() {
            Err(error) if error == EAGAIN || error == errno::inprogress() => {}
            result => return result,
        }
        deadline.check()?;
        fsleep(Delta::from_micros(delay_us));
        delay_us = (2 * delay_us).min(RETRY_MAX_US);
    }
}
