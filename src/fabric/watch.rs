// SPDX-License-Identifier: GPL-2.0

//! Who waits for a message looks for it, and takes everybody's meanwhile.
//!
//! An interrupt and a thread to be woken for each cost several times what a message does. So the poller thread
//! naps, without an interrupt, while somebody looks, or did most of the time.

use super::Fabric;
use crate::sys::patience::{Impatient, Patience};
use kernel::{
    sync::atomic::{Acquire, Atomic, Full, Relaxed, Release},
    time::{Instant, Monotonic},
};

/// How long the poller naps while others look: longer the longer they do. If all of them end at once, that is
/// how late it may find out.
const NAP_MIN_US: u32 = 100;
const NAP_MAX_US: u32 = 1000;

/// Those who look.
pub(super) struct Watchers {
    /// How many there are.
    now: Atomic<u32>,
    /// For how many ns each has looked, all together.
    ns: Atomic<u64>,
    /// One has gone to sleep, and the poller does not know.
    slept: Atomic<u32>,
}

impl Watchers {
    /// Nobody.
    pub(super) const fn new() -> Self {
        Self {
            now: Atomic::new(0),
            ns: Atomic::new(0),
            slept: Atomic::new(0),
        }
    }
}

/// Somebody looks, until this is dropped.
struct Watching<'a> {
    watchers: &'a Watchers,
    since: Instant<Monotonic>,
}

impl<'a> Watching<'a> {
    fn new(watchers: &'a Watchers) -> Self {
        watchers.now.fetch_add(1u32, Full);
        Self {
            watchers,
            since: Instant::now(),
        }
    }
}

impl Drop for Watching<'_> {
    fn drop(&mut self) {
        let ns = self.since.elapsed().as_nanos();
        self.watchers.ns.fetch_add(ns.unsigned_abs(), Relaxed);
        self.watchers.now.fetch_sub(1u32, Full);
    }
}

/// The naps of the poller thread.
pub(super) struct Naps {
    us: u32,
    /// When it asked last, and for how long others had looked by then.
    asked: Instant<Monotonic>,
    ns: u64,
}

impl Naps {
    /// None yet.
    pub(super) fn new() -> Self {
        Self {
            us: NAP_MIN_US,
            asked: Instant::now(),
            ns: 0,
        }
    }

    /// How many microseconds the poller may leave to those who look, if it may. If it has something else to
    /// do as well, that is not long.
    pub(super) fn next(
        &mut self,
        watchers: &Watchers,
        now: Instant<Monotonic>,
        has_other: bool,
    ) -> Option<u32> {
        let ns = watchers.ns.load(Relaxed);
        let looked = ns.wrapping_sub(self.ns) as i64;
        let mostly = looked >= (now - self.asked).as_nanos() / 2;
        (self.asked, self.ns) = (now, ns);
        let slept = watchers.slept.xchg(0u32, Full) != 0;
        if watchers.now.load(Acquire) == 0 && (slept || !mostly) {
            self.us = NAP_MIN_US;
            return None;
        }
        let us = if has_other { NAP_MIN_US } else { self.us };
        self.us = (us * 2).min(NAP_MAX_US);
        Some(us)
    }
}

impl Fabric {
    /// For those who wait for a message: takes what comes for a while, until they are `done`. Returns nothing
    /// if they are; else they are to sleep, and the poller thread looks for them. No lock may be held.
    pub(crate) fn watch<'a>(
        &self,
        patience: &'a Patience,
        mut done: impl FnMut() -> bool,
    ) -> Option<Impatient<'a>> {
        let watching = Watching::new(&self.receiver.watchers);
        let impatient = patience.poll(|| {
            self.poll_received();
            done()
        });
        drop(watching);
        if impatient.is_some() {
            self.receiver.watchers.slept.store(1u32, Release);
            self.poller.event.signal();
        }
        impatient
    }
}
