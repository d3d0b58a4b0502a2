// SPDX-License-Identifier: GPL-2.0

//! Who waits for a message looks for it, and takes everybody's meanwhile.
//!
//! An interrupt and a thread to be woken for each cost several times what a message does. So the poller thread
//! naps, without an interrupt, while somebody looks, or did most of the time.

use crate::{
    fabric::Fabric,
    sys::adaptive_spin::{AdaptiveSpin, SpinSample},
};
use kernel::{
    sync::atomic::{Acquire, Atomic, Full, Relaxed, Release},
    time::{Instant, Monotonic},
};

/// How long the poller naps while others look: longer the longer they do. If all of them end at once, that is
/// how late it may find out.
const MIN_INTERVAL_US: u32 = 100;
const MAX_INTERVAL_US: u32 = 1000;

/// Those who look.
pub(in crate::fabric) struct BusyPollers {
    /// How many there are.
    count: Atomic<u32>,
    /// For how many ns each has looked, all together.
    total_ns: Atomic<u64>,
    /// One has gone to sleep, and the poller does not know.
    went_to_sleep: Atomic<u32>,
}

impl BusyPollers {
    /// Nobody.
    pub(in crate::fabric) const fn new() -> Self {
        Self {
            count: Atomic::new(0),
            total_ns: Atomic::new(0),
            went_to_sleep: Atomic::new(0),
        }
    }
}

/// Somebody looks, until this is dropped.
struct BusyPollGuard<'a> {
    pollers: &'a BusyPollers,
    start: Instant<Monotonic>,
}

impl<'a> BusyPollGuard<'a> {
    fn new(pollers: &'a BusyPollers) -> Self {
        pollers.count.fetch_add(1u32, Full);
        Self {
            pollers,
            start: Instant::now(),
        }
    }
}

impl Drop for BusyPollGuard<'_> {
    fn drop(&mut self) {
        let ns = self.start.elapsed().as_nanos();
        self.pollers.total_ns.fetch_add(ns.unsigned_abs(), Relaxed);
        self.pollers.count.fetch_sub(1u32, Full);
    }
}

/// The naps of the poller thread.
pub(in crate::fabric) struct AdaptiveInterval {
    interval_us: u32,
    /// When it asked last, and for how long others had looked by then.
    last_update: Instant<Monotonic>,
    last_total_ns: u64,
}

impl AdaptiveInterval {
    /// None yet.
    pub(in crate::fabric) fn new() -> Self {
        Self {
            interval_us: MIN_INTERVAL_US,
            last_update: Instant::now(),
            last_total_ns: 0,
        }
    }

    /// How many microseconds the poller may leave to those who look, if it may. If it has something else to
    /// do as well, that is not long.
    pub(in crate::fabric) fn next_interval_us(
        &mut self,
        pollers: &BusyPollers,
        now: Instant<Monotonic>,
        has_other_work: bool,
    ) -> Option<u32> {
        let total_ns = pollers.total_ns.load(Relaxed);
        let polled_ns = total_ns.wrapping_sub(self.last_total_ns) as i64;
        let polls_mostly = polled_ns >= (now - self.last_update).as_nanos() / 2;
        (self.last_update, self.last_total_ns) = (now, total_ns);
        let went_to_sleep = pollers.went_to_sleep.xchg(0u32, Full) != 0;
        if pollers.count.load(Acquire) == 0 && (went_to_sleep || !polls_mostly) {
            self.interval_us = MIN_INTERVAL_US;
            return None;
        }
        let interval_us = if has_other_work {
            MIN_INTERVAL_US
        } else {
            self.interval_us
        };
        self.interval_us = (interval_us * 2).min(MAX_INTERVAL_US);
        Some(interval_us)
    }
}

impl Fabric {
    /// For those who wait for a message: takes what comes for a while, until they are `done`. Returns nothing
    /// if they are; else they are to sleep, and the poller thread looks for them. No lock may be held.
    pub(crate) fn busy_poll<'a>(
        &self,
        spin: &'a AdaptiveSpin,
        mut done: impl FnMut() -> bool,
    ) -> Option<SpinSample<'a>> {
        let guard = BusyPollGuard::new(&self.recv_engine.busy_pollers);
        let sample = spin.spin_until(|| {
            self.try_poll_recv();
            done()
        });
        drop(guard);
        if sample.is_some() {
            self.recv_engine
                .busy_pollers
                .went_to_sleep
                .store(1u32, Release);
            self.poller_waker.event.complete();
        }
        sample
    }
}
