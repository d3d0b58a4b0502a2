// SPDX-License-Identifier: GPL-2.0

//! How long to poll before sleeping.
//!
//! To sleep and be woken costs more than most answers take, and to poll for what takes long costs a processor.
//! So each kind of wait learns from those before: it polls longer once a little longer would have done, and
//! less once it would not. (KVM halts its processors so; `Documentation/virt/kvm/halt-polling.rst`.)

use super::thread::cond_resched;
use kernel::{
    sync::atomic::{Atomic, Relaxed},
    time::{Instant, Monotonic},
};

/// The part of the most that a wait polls at least: where both ends sleep, no wait is so short that it would
/// teach them better.
const MIN_SPIN_DIVISOR: i64 = 4;

/// Times that others may run while a waiter polls.
const MAX_RESCHEDS: u32 = 8;

/// What waits of one kind have taught.
pub(crate) struct AdaptiveSpin {
    /// How long to poll.
    spin_ns: Atomic<i64>,
}

/// A wait that has polled long enough. Its end, when this is dropped, says how long would have been.
#[must_use]
pub(crate) struct SpinSample<'a> {
    spin: &'a AdaptiveSpin,
    start: Instant<Monotonic>,
}

impl AdaptiveSpin {
    /// As much as may be, until it proves to be too much.
    pub(crate) fn new() -> Self {
        Self {
            spin_ns: Atomic::new(Self::max_spin_ns()),
        }
    }

    fn max_spin_ns() -> i64 {
        i64::from(crate::params::max_poll_us()) * 1_000
    }

    /// Whether somebody who has waited since `start` should poll on.
    pub(crate) fn should_spin(&self, start: Instant<Monotonic>, now: Instant<Monotonic>) -> bool {
        (now - start).as_nanos() < self.spin_ns.load(Relaxed)
    }

    /// A wait since `start`, of which too little was polled, has ended.
    pub(crate) fn record_wait(&self, start: Instant<Monotonic>) {
        let (current_ns, max_ns) = (self.spin_ns.load(Relaxed), Self::max_spin_ns());
        let new_ns = if start.elapsed().as_nanos() <= max_ns {
            (current_ns * 2).min(max_ns)
        } else {
            (current_ns / 2).max(max_ns / MIN_SPIN_DIVISOR)
        };
        self.spin_ns.store(new_ns, Relaxed);
    }

    /// Polls `done` for a while. Time that others run meanwhile does not count, within reason: it may be they
    /// who make it true. Returns nothing if it became true.
    pub(crate) fn spin_until(&self, mut done: impl FnMut() -> bool) -> Option<SpinSample<'_>> {
        let mut start = Instant::now();
        let mut rescheds = 0;
        while !done() {
            if !self.should_spin(start, Instant::now()) {
                return Some(SpinSample { spin: self, start });
            }
            if rescheds < MAX_RESCHEDS && cond_resched() {
                rescheds += 1;
                start = Instant::now();
            }
            core::hint::spin_loop();
        }
        None
    }
}

impl Drop for SpinSample<'_> {
    fn drop(&mut self) {
        self.spin.record_wait(self.start);
    }
}
