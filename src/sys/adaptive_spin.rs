// SPDX-License-Identifier: GPL-2.0

//! Adaptive spin time: the time to poll before a thread sleeps.
//!
//! Sleeping and waking up costs more than most replies take, while polling for a slow reply wastes a
//! processor. Therefore each kind of wait adapts its spin time to earlier waits. The time doubles if a spin
//! of the maximum length would have succeeded, and halves if not. KVM uses the same scheme to halt processors
//! (`Documentation/virt/kvm/halt-polling.rst`).
//!
//! The `kernel` crate has no adaptive polling. With such an abstraction this file can be removed. `spin_ns`
//! is a relaxed atomic without a lock, since a lost update only delays the adaptation.

use super::thread::cond_resched;
use kernel::{
    sync::atomic::{Atomic, Relaxed},
    time::{Instant, Monotonic},
};

/// Divisor that yields the minimum spin time from the maximum.
///
/// If both ends of an exchange slept, no wait would be short enough to raise the spin time again.
const MIN_SPIN_DIVISOR: i64 = 4;

/// Time in nanoseconds after which a pending signal ends a spin. Most replies arrive within this time. A
/// thread that sleeps with a pending signal may wait 1 ms for the same reply.
const SIGNAL_SPIN_NS: i64 = 100_000;

/// Maximum number of reschedules that restart the clock of one spin.
const MAX_RESCHEDS: u32 = 8;

/// Spin time of one kind of wait.
pub(crate) struct AdaptiveSpin {
    /// Spin time in nanoseconds.
    spin_ns: Atomic<i64>,
}

/// Wait after the end of its spin time. Dropping the sample ends the wait and adapts the spin time.
#[must_use]
pub(crate) struct SpinSample<'a> {
    spin: &'a AdaptiveSpin,
    start: Instant<Monotonic>,
}

impl AdaptiveSpin {
    /// Starts with the maximum spin time, which later waits can reduce.
    pub(crate) fn new() -> Self {
        Self {
            spin_ns: Atomic::new(Self::max_spin_ns()),
        }
    }

    fn max_spin_ns() -> i64 {
        i64::from(crate::params::max_poll_us()) * 1_000
    }

    /// Returns `true` if a thread that has waited since `start` must continue to poll at `now`.
    pub(crate) fn should_spin(&self, start: Instant<Monotonic>, now: Instant<Monotonic>) -> bool {
        (now - start).as_nanos() < self.spin_ns.load(Relaxed)
    }

    /// Adapts the spin time to a wait that began at `start`, was not covered by polling, and has now ended.
    pub(crate) fn record_wait(&self, start: Instant<Monotonic>) {
        let (current_ns, max_ns) = (self.spin_ns.load(Relaxed), Self::max_spin_ns());
        let new_ns = if start.elapsed().as_nanos() <= max_ns {
            (current_ns * 2).min(max_ns)
        } else {
            (current_ns / 2).max(max_ns / MIN_SPIN_DIVISOR)
        };
        self.spin_ns.store(new_ns, Relaxed);
    }

    /// Returns `true` if a spin that began at `start` has lasted [`SIGNAL_SPIN_NS`] at `now`, and a signal is
    /// pending. The order of the checks keeps the second one out of short spins.
    fn is_interrupted(start: Instant<Monotonic>, now: Instant<Monotonic>) -> bool {
        (now - start).as_nanos() >= SIGNAL_SPIN_NS && kernel::current!().signal_pending()
    }

    /// Polls `done` for at most the spin time, or for [`SIGNAL_SPIN_NS`] if a signal is pending. Returns
    /// `None` if `done` became true.
    ///
    /// A wait with a deadline handles the signal when it sleeps. A wait without one only loses its spin time.
    ///
    /// Time in other tasks after a reschedule does not count, for up to [`MAX_RESCHEDS`] reschedules. One of
    /// these tasks may be the one that makes `done` true.
    pub(crate) fn spin_until(&self, mut done: impl FnMut() -> bool) -> Option<SpinSample<'_>> {
        let mut start = Instant::now();
        let mut rescheds = 0;
        while !done() {
            let now = Instant::now();
            if !self.should_spin(start, now) || Self::is_interrupted(start, now) {
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
