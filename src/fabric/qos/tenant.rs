// SPDX-License-Identifier: GPL-2.0

//! Tenant of an RNIC: a session, or a kernel user.
//!
//! # Operation
//!
//! Each segment of a read or write, and each other request, must be admitted before it is posted.
//! [`Tenant::try_admit`] and [`Tenant::try_admit_now`] do not wait; [`Tenant::admit`] waits. A request is
//! charged when its start time is reserved in an [`AdmissionTicket`]; the start time may be later. Requests
//! under one limit therefore start in the order of arrival. A request that could not start before its
//! deadline is not charged.
//!
//! # Locking
//!
//! - `Tenant::limits` (mutex) protects the cached limits, and serializes admission for one tenant.
//! - Order: `Tenant::limits`, then `TenantLimits::entries`, then `TenantLimit::state`.
//! - Order: `Tenant::limits`, then `Qos::low_limiter`.
//! - No lock is held while [`Tenant::admit`] sleeps.

use super::{
    cost::RequestCost,
    limits::{ApplicableLimits, TenantCreds, TenantLimit},
    ConnSubset, LatencyProbe, Qos,
};
use crate::{
    bindings,
    sys::{
        deadline::{monotonic_ns, Deadline},
        thread::is_wq_worker,
        thread::pi_mutex::{new_pi_mutex, PiMutex},
    },
};
use kernel::{
    prelude::*,
    sync::{
        atomic::{Atomic, Full, Relaxed},
        Arc,
    },
};

/// Start time of a delayed request, once reserved.
#[derive(Default)]
pub(crate) struct AdmissionTicket(Option<AdmissionBooking>);

impl AdmissionTicket {
    /// Returns `true` if a start time is reserved and has been reached.
    fn is_due(&self, now: u64) -> bool {
        self.0
            .as_ref()
            .is_some_and(|booking| booking.start_at <= now)
    }
}

/// Reserved start time, and the limits that were charged.
struct AdmissionBooking {
    /// Start time, in ns.
    start_at: u64,
    cost: RequestCost,
    /// Generation of the limits that were charged.
    limits_generation: u32,
    /// `true` if the cost was also charged to the low-priority class.
    charges_low: bool,
}

/// Tenant of an RNIC, with a priority and limits.
#[pin_data(PinnedDrop)]
pub(crate) struct Tenant {
    qos: Arc<Qos>,
    /// `KITE_PRIORITY_HIGH` or `KITE_PRIORITY_LOW`.
    priority: Atomic<u32>,
    /// `true` for a process. Workqueue workers execute only I/O queue requests for a process.
    is_process: bool,
    /// Cached limits; `None` for a kernel user, to which no limit applies.
    #[pin]
    limits: PiMutex<Option<ApplicableLimits>>,
}

impl Tenant {
    /// Creates a high-priority tenant. `creds` is `None` for a kernel user.
    pub(crate) fn new(qos: Arc<Qos>, creds: Option<TenantCreds>) -> impl PinInit<Self> {
        pin_init!(Self {
            qos,
            priority: Atomic::new(bindings::KITE_PRIORITY_HIGH),
            is_process: creds.is_some(),
            limits <- new_pi_mutex!(creds.map(ApplicableLimits::new), "Tenant::limits"),
        })
    }

    /// Sets the priority to low or high.
    pub(crate) fn set_low_priority(&self, is_low: bool) {
        let (priority, count): (u32, i32) = match is_low {
            true => (bindings::KITE_PRIORITY_LOW, 1),
            false => (bindings::KITE_PRIORITY_HIGH, -1),
        };
        // Adding -1 as `u32` wraps, which decrements the counter.
        if self.priority.xchg(priority, Full) != priority {
            self.qos.low_tenants.fetch_add(count as u32, Full);
        }
    }

    /// Returns `true` if the tenant has low priority.
    pub(crate) fn is_low_priority(&self) -> bool {
        self.priority.load(Relaxed) == bindings::KITE_PRIORITY_LOW
    }

    /// Returns the connections to a peer that the tenant may use.
    pub(crate) fn conn_subset(&self) -> ConnSubset {
        self.qos.conn_subset(self.is_low_priority())
    }

    /// Starts measuring a request that is about to be posted. See [`Qos::start_probe`].
    pub(crate) fn start_probe(&self, bytes: usize) -> Option<LatencyProbe> {
        self.qos.start_probe(bytes, self.is_low_priority())
    }

    fn is_low_throttled(&self) -> bool {
        self.is_low_priority() && self.qos.is_throttling_low()
    }

    /// Returns `true` if neither a limit of the RNIC nor the priority can delay the tenant.
    fn is_unlimited(&self) -> bool {
        self.qos.limits.generation() == 0 && !self.is_low_throttled()
    }

    /// Returns `true` if the current thread executes a request that was admitted before: a worker on behalf
    /// of an I/O queue. The queue delays such requests itself, so that throttled requests do not occupy
    /// workers.
    fn is_already_admitted(&self) -> bool {
        self.is_process && is_wq_worker()
    }

    /// Returns `true` if the request of `ticket` may be posted now. Does not wait.
    ///
    /// The first call that finds a start time before the deadline charges the request and stores the time in
    /// `ticket`. The caller passes the same ticket to later calls, or to [`Self::cancel`].
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: no memory for the cached limits.
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

    /// Returns `true` if a request of `bytes` bytes may be posted now, and charges the request in this case.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: no memory for the cached limits.
    pub(crate) fn try_admit_now(&self, bytes: u64) -> Result<bool> {
        if self.is_unlimited() || self.is_already_admitted() {
            return Ok(true);
        }
        self.try_admit_until(&mut AdmissionTicket::default(), bytes.into(), 0)
    }

    /// As [`Self::admit_or_reserve`], but returns `false` if another thread holds the lock.
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

    /// Returns `true` if the request may be posted now. Reserves a start time if `ticket` has none and the
    /// start time is not after `deadline_ns`.
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
        // The buckets include the charge of a reserved request. `start_at` is therefore after its reserved
        // time, unless a limit was raised or removed since: then the request may start early.
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

    /// Charges the request to all limits, and to the low-priority class if throttled.
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

    /// Returns the earliest time at which the next request of the tenant may be posted, in ns.
    fn earliest_start(&self, applicable: Option<&ApplicableLimits>, now: u64) -> u64 {
        let start_at =
            each_limit(applicable).fold(now, |start_at, limit| start_at.max(limit.ready_at(now)));
        match self.is_low_throttled() {
            true => start_at.max(self.qos.low_ready_at(now)),
            false => start_at,
        }
    }

    /// Cancels a request. Refunds the charge if the reserved start time has not been reached, so that other
    /// requests may start earlier.
    pub(crate) fn cancel(&self, ticket: AdmissionTicket) {
        let Some(booking) = ticket.0.filter(|booking| booking.start_at > monotonic_ns()) else {
            return;
        };
        let applicable = self.limits.lock();
        // If the generation has changed, the cached limits may be different ones, which were not charged.
        let unchanged = applicable
            .as_ref()
            .filter(|applicable| applicable.generation() == booking.limits_generation);
        each_limit(unchanged).for_each(|limit| limit.refund(booking.cost));
        if booking.charges_low {
            self.qos.refund_low(booking.cost);
        }
    }

    /// Records requests without a [`LatencyProbe`] for the rate controller, if the tenant is throttled as low
    /// priority.
    pub(crate) fn charge_unmeasured(&self, cost: impl Into<RequestCost>) {
        if self.is_low_throttled() {
            self.qos.charge_low_unmeasured(cost.into().bytes);
        }
    }

    /// Waits until all of `cost` may be posted. The caller must not hold resources that other requests need.
    ///
    /// # Errors
    ///
    /// - `ETIMEDOUT`: the deadline passed before the start time.
    /// - `EINTR`: a signal arrived that ends the wait according to the deadline.
    /// - `ENODEV`: the RNIC is being removed.
    /// - `ENOMEM`: no memory for the cached limits.
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

/// Returns the latest start time of a request with this deadline, in ns.
fn latest_start(deadline: Deadline) -> u64 {
    monotonic_ns().saturating_add(u64::from(deadline.remaining_ms()) * 1_000_000)
}

/// Returns the cached limits.
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
