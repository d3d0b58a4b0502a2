// SPDX-License-Identifier: GPL-2.0

//! One who shares an RNIC with others: a session, or a kernel user.
//!
//! Before each part of a read or write, and each other request, it asks whether it may go ([`Tenant::may_go`])
//! or waits until then ([`Tenant::wait`]). Who has to wait has its turn booked, so that those of one limit go in
//! the order in which they came; who would be too late books nothing.

use super::{
    limits::{Found, Limit, Who},
    Measure, Qos, Share,
};
use crate::{
    bindings,
    sys::{
        deadline::{now, Deadline},
        thread::is_worker,
    },
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::{
        atomic::{Atomic, Full, Relaxed},
        Arc, Mutex,
    },
};
use kite_core::qos::cost;

/// What goes at a time.
#[derive(Clone, Copy)]
pub(crate) struct Load {
    pub(crate) requests: u64,
    pub(crate) bytes: u64,
}

impl Load {
    /// What it costs, as `kite_core::qos` counts.
    pub(super) fn cost(self) -> u64 {
        let Self { requests, bytes } = self;
        cost(bytes).saturating_add(cost(0).saturating_mul(requests.saturating_sub(1)))
    }
}

/// A request of so many bytes.
impl From<u64> for Load {
    fn from(bytes: u64) -> Self {
        Self { requests: 1, bytes }
    }
}

/// When a request may go, once that was booked.
#[derive(Default)]
pub(crate) struct Turn(Option<Booking>);

impl Turn {
    /// Whether it was booked, and is over or now.
    fn has_come(&self, now: u64) -> bool {
        self.0.as_ref().is_some_and(|booking| booking.at <= now)
    }
}

struct Booking {
    at: u64,
    load: Load,
    /// The limits by which it goes are those of this generation.
    limits: u32,
    /// It counts for what low priority may have.
    governed: bool,
}

/// A tenant.
#[pin_data(PinnedDrop)]
pub(crate) struct Tenant {
    qos: Arc<Qos>,
    priority: Atomic<u32>,
    /// It is a process, for which workers do nothing but what its queues ask for.
    is_process: bool,
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
            is_process: who.is_some(),
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
        self.qos.measure(bytes, self.is_low())
    }

    fn is_governed(&self) -> bool {
        self.is_low() && self.qos.is_governing()
    }

    /// Whether nothing holds it back.
    fn is_free(&self) -> bool {
        self.qos.limits.generation() == 0 && !self.is_governed()
    }

    /// Whether what is done here was asked for before: what a worker does for a queue of a process has waited
    /// there, so that the worker is there for others.
    fn has_asked(&self) -> bool {
        self.is_process && is_worker()
    }

    /// Whether so much, whose turn that is, may go now, for who does not wait. Its turn is booked at the first look
    /// that finds it in time.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn may_go(
        &self,
        turn: &mut Turn,
        load: impl Into<Load>,
        deadline: Deadline,
    ) -> Result<bool> {
        if self.is_free() || turn.has_come(now()) {
            return Ok(true);
        }
        self.try_ask(turn, load.into(), latest(deadline))
    }

    /// Whether a request of so many bytes may go at this moment; if so it goes.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn goes_now(&self, bytes: u64) -> Result<bool> {
        if self.is_free() || self.has_asked() {
            return Ok(true);
        }
        self.try_ask(&mut Turn::default(), bytes.into(), 0)
    }

    fn try_ask(&self, turn: &mut Turn, load: Load, latest: u64) -> Result<bool> {
        match self.found.try_lock() {
            Some(mut found) => self.ask(&mut found, turn, load, latest),
            None => Ok(false),
        }
    }

    fn ask(
        &self,
        found: &mut Option<Found>,
        turn: &mut Turn,
        load: Load,
        latest: u64,
    ) -> Result<bool> {
        let now = now();
        if turn.has_come(now) {
            return Ok(true);
        }
        if let Some(found) = found {
            found.refresh(&self.qos.limits)?;
        }
        // Of one whose turn was booked that is later, unless somebody lifts what holds it back.
        let ready = self.ready(found.as_ref(), now);
        if turn.0.is_none() && ready <= latest.max(now) {
            turn.0 = Some(self.book(found.as_ref(), ready, load));
        }
        if ready > now {
            self.qos.stats.pace_waits.add(1);
            let holding = limits(found.as_ref()).filter(|limit| limit.ready(now) > now);
            holding.for_each(|limit| limit.waited());
        }
        Ok(ready <= now)
    }

    fn book(&self, found: Option<&Found>, at: u64, load: Load) -> Booking {
        limits(found).for_each(|limit| limit.goes(load));
        let governed = self.is_governed();
        if governed {
            self.qos.low_goes(load);
        }
        Booking {
            at,
            load,
            limits: found.map_or(0, Found::generation),
            governed,
        }
    }

    /// When its next request may go.
    fn ready(&self, found: Option<&Found>, now: u64) -> u64 {
        let ready = limits(found).fold(now, |ready, limit| ready.max(limit.ready(now)));
        match self.is_governed() {
            true => ready.max(self.qos.low_ready(now)),
            false => ready,
        }
    }

    /// Who booked a turn gives up. Others need not wait for it, unless it has come.
    pub(crate) fn give_back(&self, turn: Turn) {
        let Some(booking) = turn.0.filter(|booking| booking.at > now()) else {
            return;
        };
        let found = self.found.lock();
        // It may be by others by now, which know nothing of it.
        let same = found
            .as_ref()
            .filter(|found| found.generation() == booking.limits);
        limits(same).for_each(|limit| limit.give_back(booking.load));
        if booking.governed {
            self.qos.low_gives_back(booking.load);
        }
    }

    /// So much goes, and nobody measures how long that takes.
    pub(crate) fn passes(&self, load: impl Into<Load>) {
        if self.is_governed() {
            self.qos.low_passes(load.into().bytes);
        }
    }

    /// Waits until so much may go, all of it. Nothing that others need may be held.
    ///
    /// # Errors
    ///
    /// `ETIMEDOUT`; `EINTR` as the deadline says; `ENODEV` if the RNIC goes; `ENOMEM`.
    pub(crate) fn wait(&self, load: impl Into<Load>, deadline: Deadline) -> Result {
        if self.is_free() || self.has_asked() {
            return Ok(());
        }
        let (load, mut turn, latest) = (load.into(), Turn::default(), latest(deadline));
        while !self.ask(&mut self.found.lock(), &mut turn, load, latest)? {
            let until = turn.0.as_ref().map_or(u64::MAX, |booking| booking.at);
            if let Err(error) = self.qos.nap(until, deadline) {
                self.give_back(turn);
                return Err(error);
            }
        }
        Ok(())
    }
}

/// The last moment at which what has a deadline may go.
fn latest(deadline: Deadline) -> u64 {
    now().saturating_add(u64::from(deadline.left_ms()) * 1_000_000)
}

/// The limits that were found.
fn limits(found: Option<&Found>) -> impl Iterator<Item = &Arc<Limit>> {
    found.into_iter().flat_map(|found| found.mine.iter())
}

#[pinned_drop]
impl PinnedDrop for Tenant {
    fn drop(self: Pin<&mut Self>) {
        self.set_low(false);
    }
}
