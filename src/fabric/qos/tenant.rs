// SPDX-License-Identifier: GPL-2.0

//! One who shares an RNIC with others: a session, or a kernel user.
//!
//! Before each part of a read or write, and each other request, it asks whether it may go ([`Tenant::may_go`])
//! or waits until then ([`Tenant::wait`]). Who has to wait has its turn booked, so that those of one limit go in
//! the order in which they came; who would be too late books nothing.

use super::{
    limits::{ApplicableLimits, TenantCreds, TenantLimit},
    ConnSubset, LatencyProbe, Qos,
};
use crate::{
    bindings,
    sys::{
        deadline::{monotonic_ns, Deadline},
        thread::is_wq_worker,
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
use kite_core::policy::qos::request_cost;

/// What goes at a time.
#[derive(Clone, Copy)]
pub(crate) struct RequestCost {
    pub(crate) requests: u64,
    pub(crate) bytes: u64,
}

impl RequestCost {
    /// What it costs, as `kite_core::policy::qos` counts.
    pub(super) fn tokens(self) -> u64 {
        let Self { requests, bytes } = self;
        request_cost(bytes)
            .saturating_add(request_cost(0).saturating_mul(requests.saturating_sub(1)))
    }
}

/// A request of so many bytes.
impl From<u64> for RequestCost {
    fn from(bytes: u64) -> Self {
        Self { requests: 1, bytes }
    }
}

/// When a request may go, once that was booked.
#[derive(Default)]
pub(crate) struct AdmissionTicket(Option<AdmissionBooking>);

impl AdmissionTicket {
    /// Whether it was booked, and is over or now.
    fn is_due(&self, now: u64) -> bool {
        self.0
            .as_ref()
            .is_some_and(|booking| booking.start_at <= now)
    }
}

struct AdmissionBooking {
    start_at: u64,
    cost: RequestCost,
    /// The limits by which it goes are those of this generation.
    limits_generation: u32,
    /// It counts for what low priority may have.
    charges_low: bool,
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
    limits: Mutex<Option<ApplicableLimits>>,
}

impl Tenant {
    /// One of high priority.
    pub(crate) fn new(qos: Arc<Qos>, creds: Option<TenantCreds>) -> impl PinInit<Self> {
        pin_init!(Self {
            qos,
            priority: Atomic::new(bindings::KITE_PRIORITY_HIGH),
            is_process: creds.is_some(),
            limits <- new_mutex!(creds.map(ApplicableLimits::new)),
        })
    }

    /// Changes its priority.
    pub(crate) fn set_low_priority(&self, is_low: bool) {
        let (priority, count): (u32, i32) = match is_low {
            true => (bindings::KITE_PRIORITY_LOW, 1),
            false => (bindings::KITE_PRIORITY_HIGH, -1),
        };
        if self.priority.xchg(priority, Full) != priority {
            self.qos.low_tenants.fetch_add(count as u32, Full);
        }
    }

    /// Whether it has low priority.
    pub(crate) fn is_low_priority(&self) -> bool {
        self.priority.load(Relaxed) == bindings::KITE_PRIORITY_LOW
    }

    /// The connections that it may use.
    pub(crate) fn conn_subset(&self) -> ConnSubset {
        self.qos.conn_subset(self.is_low_priority())
    }

    /// Measures a request that is about to be posted, if that is of use.
    pub(crate) fn start_probe(&self, bytes: usize) -> Option<LatencyProbe> {
        self.qos.start_probe(bytes, self.is_low_priority())
    }

    fn is_low_throttled(&self) -> bool {
        self.is_low_priority() && self.qos.is_throttling_low()
    }

    /// Whether nothing holds it back.
    fn is_unlimited(&self) -> bool {
        self.qos.limits.generation() == 0 && !self.is_low_throttled()
    }

    /// Whether what is done here was asked for before: what a worker does for a queue of a process has waited
    /// there, so that the worker is there for others.
    fn is_already_admitted(&self) -> bool {
        self.is_process && is_wq_worker()
    }

    /// Whether so much, whose turn that is, may go now, for who does not wait. Its turn is booked at the first look
    /// that finds it in time.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn try_admit(
        &self,
        ticket: &mut AdmissionTicket,
        cost: impl Into<RequestCost>,
        deadline: Deadline,
    ) -> Result<bool> {
        if self.is_unlimited() || ticket.is_due(monotonic_ns()) {
            return Ok(true);
        }
        self.try_admit_until(ticket, cost.into(), latest_start(deadline))
    }

    /// Whether a request of so many bytes may go at this moment; if so it goes.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn try_admit_now(&self, bytes: u64) -> Result<bool> {
        if self.is_unlimited() || self.is_already_admitted() {
            return Ok(true);
        }
        self.try_admit_until(&mut AdmissionTicket::default(), bytes.into(), 0)
    }

    fn try_admit_until(
        &self,
        ticket: &mut AdmissionTicket,
        cost: RequestCost,
        deadline_ns: u64,
    ) -> Result<bool> {
        match self.limits.try_lock() {
            Some(mut applicable) => {
                self.admit_or_reserve(&mut applicable, ticket, cost, deadline_ns)
            }
            None => Ok(false),
        }
    }

    fn admit_or_reserve(
        &self,
        applicable: &mut Option<ApplicableLimits>,
        ticket: &mut AdmissionTicket,
        cost: RequestCost,
        deadline_ns: u64,
    ) -> Result<bool> {
        let now = monotonic_ns();
        if ticket.is_due(now) {
            return Ok(true);
        }
        if let Some(applicable) = applicable {
            applicable.refresh(&self.qos.limits)?;
        }
        // Of one whose turn was booked that is later, unless somebody lifts what holds it back.
        let start_at = self.earliest_start(applicable.as_ref(), now);
        if ticket.0.is_none() && start_at <= deadline_ns.max(now) {
            ticket.0 = Some(self.reserve(applicable.as_ref(), start_at, cost));
        }
        if start_at > now {
            self.qos.stats.throttled.add(1);
            let exceeded =
                each_limit(applicable.as_ref()).filter(|limit| limit.ready_at(now) > now);
            exceeded.for_each(|limit| limit.count_throttled());
        }
        Ok(start_at <= now)
    }

    fn reserve(
        &self,
        applicable: Option<&ApplicableLimits>,
        start_at: u64,
        cost: RequestCost,
    ) -> AdmissionBooking {
        each_limit(applicable).for_each(|limit| limit.charge(cost));
        let charges_low = self.is_low_throttled();
        if charges_low {
            self.qos.charge_low(cost);
        }
        AdmissionBooking {
            start_at,
            cost,
            limits_generation: applicable.map_or(0, ApplicableLimits::generation),
            charges_low,
        }
    }

    /// When its next request may go.
    fn earliest_start(&self, applicable: Option<&ApplicableLimits>, now: u64) -> u64 {
        let start_at =
            each_limit(applicable).fold(now, |start_at, limit| start_at.max(limit.ready_at(now)));
        match self.is_low_throttled() {
            true => start_at.max(self.qos.low_ready_at(now)),
            false => start_at,
        }
    }

    /// Who booked a turn gives up. Others need not wait for it, unless it has come.
    pub(crate) fn cancel(&self, ticket: AdmissionTicket) {
        let Some(booking) = ticket.0.filter(|booking| booking.start_at > monotonic_ns()) else {
            return;
        };
        let applicable = self.limits.lock();
        // It may be by others by now, which know nothing of it.
        let unchanged = applicable
            .as_ref()
            .filter(|applicable| applicable.generation() == booking.limits_generation);
        each_limit(unchanged).for_each(|limit| limit.refund(booking.cost));
        if booking.charges_low {
            self.qos.refund_low(booking.cost);
        }
    }

    /// So much goes, and nobody measures how long that takes.
    pub(crate) fn charge_unmeasured(&self, cost: impl Into<RequestCost>) {
        if self.is_low_throttled() {
            self.qos.charge_low_unmeasured(cost.into().bytes);
        }
    }

    /// Waits until so much may go, all of it. Nothing that others need may be held.
    ///
    /// # Errors
    ///
    /// `ETIMEDOUT`; `EINTR` as the deadline says; `ENODEV` if the RNIC goes; `ENOMEM`.
    pub(crate) fn admit(&self, cost: impl Into<RequestCost>, deadline: Deadline) -> Result {
        if self.is_unlimited() || self.is_already_admitted() {
            return Ok(());
        }
        let (cost, mut ticket, deadline_ns) = (
            cost.into(),
            AdmissionTicket::default(),
            latest_start(deadline),
        );
        while !self.admit_or_reserve(&mut self.limits.lock(), &mut ticket, cost, deadline_ns)? {
            let until_ns = ticket
                .0
                .as_ref()
                .map_or(u64::MAX, |booking| booking.start_at);
            if let Err(error) = self.qos.wait_until(until_ns, deadline) {
                self.cancel(ticket);
                return Err(error);
            }
        }
        Ok(())
    }
}

/// The last moment at which what has a deadline may go.
fn latest_start(deadline: Deadline) -> u64 {
    monotonic_ns().saturating_add(u64::from(deadline.remaining_ms()) * 1_000_000)
}

/// The limits that were found.
fn each_limit(applicable: Option<&ApplicableLimits>) -> impl Iterator<Item = &Arc<TenantLimit>> {
    applicable
        .into_iter()
        .flat_map(|applicable| applicable.limits.iter())
}

#[pinned_drop]
impl PinnedDrop for Tenant {
    fn drop(self: Pin<&mut Self>) {
        self.set_low_priority(false);
    }
}
