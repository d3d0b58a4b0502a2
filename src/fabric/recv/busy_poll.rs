// SPDX-License-Identifier: GPL-2.0

//! Busy polling of the receive queues by threads that wait for a message.
//!
//! # Operation
//!
//! An interrupt and a thread wake-up per message cost several times as much as the message.
//! A waiting thread therefore polls the receive queues first ([`RecvEngine::busy_poll`]).
//! The waiter processes every message found, including messages for other threads.
//! While waiters poll, the poller thread sleeps for 100 µs to 1 ms at a time, with interrupts disarmed
//! ([`AdaptiveInterval`]). The thread also does so if waiters polled for at least half of its last interval.
//! A waiter that gets no result within its spin time wakes the poller thread and then sleeps.
//!
//! # Locking
//!
//! [`BusyPollers`] has only atomics. A busy poll takes the locks of [`RecvEngine::try_poll`].
//!
//! [`RecvEngine::busy_poll`]: super::engine::RecvEngine::busy_poll
//! [`RecvEngine::try_poll`]: super::engine::RecvEngine::try_poll

use kernel::{
    sync::atomic::{Acquire, Atomic, Full, Relaxed, Release},
    time::{Instant, Monotonic},
};

/// Shortest sleep of the poller thread while waiters poll, in µs.
const MIN_INTERVAL_US: u32 = 100;
/// Longest sleep of the poller thread while waiters poll, in µs. The interval doubles with each sleep.
///
/// If all waiters stop at once, a message may wait for one interval.
const MAX_INTERVAL_US: u32 = 1000;

/// Threads that busy-poll the receive queues of one RNIC.
pub(super) struct BusyPollers {
    /// Number of threads that poll now.
    count: Atomic<u32>,
    /// Total duration of all finished busy polls, in ns; may wrap.
    total_ns: Atomic<u64>,
    /// 1 if a waiter stopped polling to sleep. The poller thread clears the flag when it reads it.
    went_to_sleep: Atomic<u32>,
}

impl BusyPollers {
    /// Creates the record without any polling thread.
    pub(super) const fn new() -> Self {
        Self {
            count: Atomic::new(0),
            total_ns: Atomic::new(0),
            went_to_sleep: Atomic::new(0),
        }
    }

    /// Runs `poll`, and counts the current thread as a busy poller meanwhile.
    pub(super) fn count_while<T>(&self, poll: impl FnOnce() -> T) -> T {
        let _guard = BusyPollGuard::new(self);
        poll()
    }

    /// Records that a waiter stopped polling to sleep.
    pub(super) fn note_sleep(&self) {
        self.went_to_sleep.store(1u32, Release);
    }
}

/// Counts the current thread as a busy poller until dropped.
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

/// Sleep interval of the poller thread while waiters poll.
pub(super) struct AdaptiveInterval {
    /// Next sleep, in µs: [`MIN_INTERVAL_US`] to [`MAX_INTERVAL_US`].
    interval_us: u32,
    /// Time of the last call of [`Self::next_interval_us`].
    last_update: Instant<Monotonic>,
    /// Value of [`BusyPollers::total_ns`] at `last_update`.
    last_total_ns: u64,
}

impl AdaptiveInterval {
    /// Starts with the shortest interval.
    pub(super) fn new() -> Self {
        Self {
            interval_us: MIN_INTERVAL_US,
            last_update: Instant::now(),
            last_total_ns: 0,
        }
    }

    /// Returns how long the poller thread may sleep, in µs, while waiters poll in its place.
    ///
    /// Returns `None` if no waiter polls, unless waiters polled for at least half of the time since the last
    /// call and none went to sleep. With `has_other_work` the sleep is [`MIN_INTERVAL_US`].
    pub(super) fn next_interval_us(
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
