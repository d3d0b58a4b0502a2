// SPDX-License-Identifier: GPL-2.0

//! One who shares an RNIC with others: a session, or a kernel user.
//!
//! Before each part of a read or write, and each other request, it asks whether it may go ([`Tenant::is_ready`])
//! or waits until then ([`Tenant::wait`]). Who waits has its turn booked, so that those of one limit go in the
//! order in which they came; who would be too late books nothing.

use super::{
    limits::{Found, Who},
    now, Measure, Qos, Share, NAP_MS,
};
use crate::{bindings, sys::deadline::Deadline};
use kernel::{
    new_mutex,
    prelude::*,
    sync::{
        atomic::{Atomic, Full, Relaxed},
        Arc, Mutex,
    },
};

/// A tenant.
#[pin_data(PinnedDrop)]
pub(crate) struct Tenant {
    qos: Arc<Qos>,
    priority: Atomic<u32>,
    /// Its limits; nobody has any if it is the kernel.
    #[pin]
    found: Mutex<Option<Found>>,
}

impl Tenant {
    /// One of high priority.
    pub(crate) fn new(qos: Arc<Qos>, who: Option<Who>) -> impl PinInit<Self> {
        pin_init!(Self {
            qos,
            priority: Atomic::new(bindings::KITE_PRIORITY_HIGH),
            found <- new_mutex!(who.map(Found::new)),
        })
    }

    /// Changes its priority.
    pub(crate) fn set_low(&self, low: bool) {
        let (to, count): (u32, i32) = match low {
            true => (bindings::KITE_PRIORITY_LOW, 1),
            false => (bindings::KITE_PRIORITY_HIGH, -1),
        };
        if self.priority.xchg(to, Full) != to {
            self.qos.tenants.fetch_add(count as u32, Full);
        }
    }

    /// Whether it has low priority.
    pub(crate) fn is_low(&self) -> bool {
        self.priority.load(Relaxed) == bindings::KITE_PRIORITY_LOW
    }

    /// The connections that it may use.
    pub(crate) fn share(&self) -> Share {
        self.qos.share(self.is_low())
    }

    /// Measures a request that is about to be posted, if that is of use.
    pub(crate) fn measure(&self, bytes: usize) -> Option<Measure> {
        let measure = || self.qos.measure(bytes);
        (!self.is_low()).then(measure).flatten()
    }

    fn is_governed(&self) -> bool {
        self.is_low() && self.qos.is_governing()
    }

    /// Whether nothing holds it back.
    fn is_free(&self) -> bool {
        self.qos.limits.generation() == 0 && !self.is_governed()
    }

    /// Whether its next request may go now.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn is_ready(&self) -> Result<bool> {
        if self.is_free() {
            return Ok(true);
        }
        let now = now();
        let ready = self.ready(now)? <= now;
        if !ready {
            self.held_back();
        }
        Ok(ready)
    }

    /// One goes, of so many bytes, that was ready.
    pub(crate) fn goes(&self, bytes: u64) {
        if self.is_free() {
            return;
        }
        if let Some(found) = &*self.found.lock() {
            found.mine.iter().for_each(|limit| limit.goes(bytes));
        }
        if self.is_governed() {
            self.qos.low_goes(bytes);
        }
    }

    /// When its next request may go.
    fn ready(&self, now: u64) -> Result<u64> {
        let mut ready = now;
        if let Some(found) = &mut *self.found.lock() {
            found.refresh(&self.qos.limits)?;
            let limits = found.mine.iter().map(|limit| limit.ready(now));
            ready = limits.fold(ready, u64::max);
        }
        if self.is_governed() {
            ready = ready.max(self.qos.low_ready(now));
        }
        Ok(ready)
    }

    /// Takes note that it is held back.
    fn held_back(&self) {
        self.qos.stats.pace_waits.add(1);
        if let Some(found) = &*self.found.lock() {
            let now = now();
            let limits = found.mine.iter();
            let holding = limits.filter(|limit| limit.ready(now) > now);
            holding.for_each(|limit| limit.waited());
        }
    }

    /// Waits until one of so many bytes may go, and lets it go. Nothing that others need may be held.
    ///
    /// # Errors
    ///
    /// `ETIMEDOUT`; `EINTR` as the deadline says; `ENODEV` if the RNIC goes; `ENOMEM`.
    pub(crate) fn wait(&self, bytes: u64, deadline: Deadline) -> Result {
        if self.is_ready()? {
            self.goes(bytes);
            return Ok(());
        }
        let latest = now().saturating_add(u64::from(deadline.left_ms()) * 1_000_000);
        let at = loop {
            let now = now();
            let at = self.ready(now)?;
            if at <= latest {
                break at;
            }
            // Unless somebody lifts what holds it back, it will be too late.
            self.qos.nap(now + NAP_MS * 1_000_000, deadline)?;
        };
        self.goes(bytes);
        // Unless somebody lifts what holds it back, it is ready only after that.
        loop {
            let now = now();
            if now >= at || self.ready(now)? <= now {
                return Ok(());
            }
            self.qos.nap(at, deadline)?;
        }
    }
}

#[pinned_drop]
impl PinnedDrop for Tenant {
    fn drop(self: Pin<&mut Self>) {
        self.set_low(false);
    }
}
