// SPDX-License-Identifier: GPL-2.0

//! Quality of service (LITE, section 7): priorities and rate limits of the tenants of one RNIC.
//!
//! # Operation
//!
//! `kite_core::policy::qos` has the algorithms; this module adds the clock, the locks and the tenants. A
//! session is a [`tenant`]. Before the session posts a request, the tenant must admit the request according
//! to its priority and to the [`limits`] of its user and cgroups. While a tenant has low priority, the
//! latency of high-priority requests is measured until completion ([`LatencyProbe`]). The [`RateController`]
//! derives the rate of low-priority requests from the latency.
//!
//! # Locking
//!
//! `Qos::low_limiter` (spin lock) protects the rate controller and the token bucket of the low-priority
//! class. The lock also orders changes of `policy` with the reset of both. No other lock is taken while it is
//! held.

pub(crate) mod cost;
pub(crate) mod limits;
pub(crate) mod tenant;

use self::{cost::RequestCost, limits::TenantLimits};
use crate::{
    bindings,
    stats::Stats,
    sys::{
        completion::CountingCompletion,
        deadline::{monotonic_ns, Deadline},
    },
};
use kernel::{
    new_spinlock,
    prelude::*,
    sync::{
        atomic::{Atomic, Relaxed},
        Arc, SpinLock,
    },
};
use kite_core::policy::qos::{RateController, TokenBucket};

/// Longest sleep of a throttled request before admission is checked again, in ms.
const WAIT_SLICE_MS: u64 = 10;

/// Policy that protects high-priority requests from low-priority requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum QosPolicy {
    /// No protection.
    None = bindings::KITE_QOS_NONE,
    /// Rate limit of low-priority requests at the sender (SW-Pri).
    Sw = bindings::KITE_QOS_SW,
    /// Separate QPs for low-priority requests (HW-Sep).
    Hw = bindings::KITE_QOS_HW,
}

impl QosPolicy {
    /// Returns the policy for a `KITE_QOS_*` value of the ABI.
    pub(crate) fn new(value: u32) -> Option<Self> {
        [Self::None, Self::Sw, Self::Hw]
            .into_iter()
            .find(|policy| *policy as u32 == value)
    }
}

/// Subset of the connections to a peer that a tenant may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConnSubset {
    /// All connections.
    All,
    /// All connections except the last, or the only one.
    High,
    /// The last connection.
    Low,
}

impl ConnSubset {
    /// Returns the index of the first of `count` connections in the subset, and the number of connections in
    /// it.
    pub(crate) fn range(self, count: usize) -> (usize, usize) {
        match self {
            Self::High if count > 1 => (0, count - 1),
            Self::Low if count > 1 => (count - 1, 1),
            _ => (0, count.max(1)),
        }
    }
}

/// Rate limiter of the low-priority class.
struct LowClassLimiter {
    controller: RateController,
    bucket: TokenBucket,
}

impl LowClassLimiter {
    const fn new() -> Self {
        Self {
            controller: RateController::new(),
            bucket: TokenBucket::new(),
        }
    }

    /// Closes the measurement window if it has ended at `now`, and applies the new rate.
    fn update(&mut self, now: u64) {
        if self.controller.update(now) {
            self.bucket.set_rate(now, self.controller.low_rate());
        }
    }
}

/// QoS state of one RNIC, shared by all its tenants.
#[pin_data]
pub(crate) struct Qos {
    /// Current [`QosPolicy`]. Written under `low_limiter`, read without the lock.
    policy: Atomic<u32>,
    /// Number of low-priority tenants.
    low_tenants: Atomic<u32>,
    #[pin]
    low_limiter: SpinLock<LowClassLimiter>,
    #[pin]
    limits: TenantLimits,
    /// Completed for all waiters when the RNIC is removed.
    #[pin]
    removed: CountingCompletion,
    stats: Arc<Stats>,
}

impl Qos {
    /// Creates the state with [`QosPolicy::Sw`], without low-priority tenants or limits.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: no memory.
    pub(crate) fn new(stats: Arc<Stats>) -> Result<Arc<Self>> {
        Arc::pin_init(
            pin_init!(Self {
                policy: Atomic::new(QosPolicy::Sw as u32),
                low_tenants: Atomic::new(0u32),
                low_limiter <- new_spinlock!(LowClassLimiter::new(), "Qos::low_limiter"),
                limits <- TenantLimits::new(),
                removed <- CountingCompletion::new(),
                stats,
            }),
            GFP_KERNEL,
        )
    }

    /// Returns the current policy.
    pub(crate) fn policy(&self) -> QosPolicy {
        QosPolicy::new(self.policy.load(Relaxed)).unwrap_or(QosPolicy::None)
    }

    /// Sets the policy, and restarts the measurement of the low-priority class.
    pub(crate) fn set_policy(&self, policy: QosPolicy) {
        let mut low = self.low_limiter.lock();
        self.policy.store(policy as u32, Relaxed);
        *low = LowClassLimiter::new();
    }

    /// Returns the number of low-priority tenants.
    pub(crate) fn low_tenants(&self) -> u32 {
        self.low_tenants.load(Relaxed)
    }

    /// Returns the current rate of the low-priority class per second, in the units of
    /// [`kite_core::policy::qos::request_cost`]. Returns 0 if the class is unlimited.
    pub(crate) fn low_rate(&self) -> u64 {
        if !self.is_throttling_low() {
            return 0;
        }
        let mut low = self.low_limiter.lock();
        low.update(monotonic_ns());
        low.bucket.rate()
    }

    /// Returns the connections to a peer that low-priority or high-priority requests may use.
    pub(crate) fn conn_subset(&self, is_low: bool) -> ConnSubset {
        match self.policy() {
            QosPolicy::Hw if is_low => ConnSubset::Low,
            QosPolicy::Hw => ConnSubset::High,
            _ => ConnSubset::All,
        }
    }

    /// Returns the limits of users and cgroups.
    pub(crate) fn limits(&self) -> &TenantLimits {
        &self.limits
    }

    /// Ends all waits for admission with `ENODEV`: the RNIC is being removed.
    pub(crate) fn on_device_removed(&self) {
        self.removed.complete_all();
    }

    /// Returns `true` if the low-priority class is throttled: policy [`QosPolicy::Sw`], and a low-priority
    /// tenant.
    fn is_throttling_low(&self) -> bool {
        self.low_tenants.load(Relaxed) != 0 && self.policy.load(Relaxed) == QosPolicy::Sw as u32
    }

    /// Returns the earliest time at which the next low-priority request may be posted, in ns.
    fn low_ready_at(&self, now: u64) -> u64 {
        let mut low = self.low_limiter.lock();
        low.update(now);
        low.bucket.next_ready_at(now)
    }

    /// Charges requests to the bucket of the low-priority class.
    fn charge_low(&self, cost: RequestCost) {
        self.low_limiter.lock().bucket.charge(cost.tokens());
    }

    /// Reverts [`Self::charge_low`] for requests that are not posted.
    fn refund_low(&self, cost: RequestCost) {
        self.low_limiter.lock().bucket.refund(cost.tokens());
    }

    /// Records low-priority bytes for the rate controller, for requests without a [`LatencyProbe`].
    fn charge_low_unmeasured(&self, bytes: u64) {
        self.low_limiter.lock().controller.record_low(bytes);
    }

    /// Starts measuring a request of `bytes` bytes that is about to be posted. Returns `None` if the
    /// low-priority class is not throttled, so that no measurement is needed.
    pub(crate) fn start_probe(
        self: &Arc<Self>,
        bytes: usize,
        is_low: bool,
    ) -> Option<LatencyProbe> {
        self.is_throttling_low().then(|| LatencyProbe {
            qos: self.clone(),
            bytes: bytes as u64,
            is_low,
            start_ns: monotonic_ns(),
        })
    }

    /// Sleeps until `until_ns`, but for at most [`WAIT_SLICE_MS`].
    ///
    /// # Errors
    ///
    /// - `ENODEV`: the RNIC is being removed.
    /// - `ETIMEDOUT`: the deadline has passed.
    /// - `EINTR`: a signal arrived that ends the wait according to the deadline.
    fn wait_until(&self, until_ns: u64, deadline: Deadline) -> Result {
        let ms = until_ns.saturating_sub(monotonic_ns()).div_ceil(1_000_000);
        let result = self
            .removed
            .wait_interruptible_timeout_ms(ms.clamp(1, WAIT_SLICE_MS) as u32);
        match result {
            Ok(true) => Err(ENODEV),
            Ok(false) => deadline.check(),
            Err(_) => deadline.handle_signal(),
        }
    }
}

/// Latency measurement of one request.
pub(crate) struct LatencyProbe {
    qos: Arc<Qos>,
    bytes: u64,
    is_low: bool,
    /// Time at which the measurement started, in ns.
    start_ns: u64,
}

impl LatencyProbe {
    /// Records the completed request in the rate controller: the latency of a high-priority request, the
    /// bytes of a low-priority request.
    pub(crate) fn finish(self) {
        let now = monotonic_ns();
        let mut low = self.qos.low_limiter.lock();
        match self.is_low {
            true => low.controller.record_low(self.bytes),
            false => low
                .controller
                .record_high(self.bytes, now.saturating_sub(self.start_ns)),
        }
        low.update(now);
    }
}
