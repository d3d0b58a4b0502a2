// SPDX-License-Identifier: GPL-2.0

//! How long to poll before sleeping.
//!
//! To sleep and be woken costs more than most answers take, and to poll for what takes long costs a processor.
//! So each kind of wait learns from those before: it polls longer once a little longer would have done, and
//! less once it would not. (KVM halts its processors so; `Documentation/virt/kvm/halt-polling.rst`.)

use super::thread::give_way;
use kernel::{
    sync::atomic::{Atomic, Relaxed},
    time::{Instant, Monotonic},
};

/// The part of the most that a wait polls at least: where both ends sleep, no wait is so short that it would
/// teach them better.
const LEAST: i64 = 4;

/// Times that others may run while a waiter polls.
const WAYS_MAX: u32 = 8;

/// What waits of one kind have taught.
pub(crate) struct Patience {
    /// How long to poll.
    ns: Atomic<i64>,
}

/// A wait that has polled long enough. Its end, when this is dropped, says how long would have been.
#[must_use]
pub(crate) struct Impatient<'a> {
    patience: &'a Patience,
    start: Instant<Monotonic>,
}

impl Patience {
    /// As much as may be, until it proves to be too much.
    pub(crate) fn new() -> Self {
        Self {
            ns: Atomic::new(Self::most()),
        }
    }

    fn most() -> i64 {
        i64::from(crate::params::spin_us()) * 1_000
    }

    /// Whether somebody who has waited since `start` should poll on.
    pub(crate) fn lasts(&self, start: Instant<Monotonic>, now: Instant<Monotonic>) -> bool {
        (now - start).as_nanos() < self.ns.load(Relaxed)
    }

    /// A wait since `start`, of which too little was polled, has ended.
    pub(crate) fn learn(&self, start: Instant<Monotonic>) {
        let (lasted, most) = (self.ns.load(Relaxed), Self::most());
        let better = if start.elapsed().as_nanos() <= most {
            (lasted * 2).min(most)
        } else {
            (lasted / 2).max(most / LEAST)
        };
        self.ns.store(better, Relaxed);
    }

    /// Polls `done` for a while. Time that others run meanwhile does not count, within reason: it may be they
    /// who make it true. Returns nothing if it became true.
    pub(crate) fn poll(&self, mut done: impl FnMut() -> bool) -> Option<Impatient<'_>> {
        let mut start = Instant::now();
        let mut ways = 0;
        while !done() {
            if !self.lasts(start, Instant::now()) {
                return Some(Impatient {
                    patience: self,
                    start,
                });
            }
            if ways < WAYS_MAX && give_way() {
                ways += 1;
                start = Instant::now();
            }
            core::hint::spin_loop();
        }
        None
    }
}

impl Drop for Impatient<'_> {
    fn drop(&mut self) {
        self.patience.learn(self.start);
    }
}
