// SPDX-License-Identifier: GPL-2.0

//! Quality of service (LITE, section 7): who of those who share an RNIC goes first, and how fast.
//!
//! `kite_core::policy::qos` decides; here it meets clock, locks and sessions. A session asks as a [`tenant`] before it
//! posts, and then has its part go, by its priority and by the [`limits`] of its user and cgroups. What requests
//! of high priority meet is measured until completion ([`Measure`]), while anybody has low priority.

pub(crate) mod limits;
pub(crate) mod tenant;

use self::{limits::TenantLimits, tenant::RequestCost};
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

/// How long who is held back sleeps before it looks whether it still is.
const WAIT_SLICE_MS: u64 = 10;

/// How low priority is kept from disturbing high.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum QosPolicy {
    /// Not at all.
    None = bindings::KITE_QOS_NONE,
    /// At the sender, by rate (SW-Pri).
    Sw = bindings::KITE_QOS_SW,
    /// By queue pairs of its own (HW-Sep).
    Hw = bindings::KITE_QOS_HW,
}

impl QosPolicy {
    /// That of a number of the ABI.
    pub(crate) fn new(value: u32) -> Option<Self> {
        [Self::None, Self::Sw, Self::Hw]
            .into_iter()
            .find(|policy| *policy as u32 == value)
    }
}

/// Which of the connections to a peer may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConnSubset {
    All,
    /// All but the last, if there is another.
    High,
    /// The last.
    Low,
}

impl ConnSubset {
    /// The first of `count` connections that are in it, and how many.
    pub(crate) fn range(self, count: usize) -> (usize, usize) {
        match self {
            Self::High if count > 1 => (0, count - 1),
            Self::Low if count > 1 => (count - 1, 1),
            _ => (0, count.max(1)),
        }
    }
}

/// How fast low priority may go.
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

    fn update(&mut self, now: u64) {
        if self.controller.update(now) {
            self.bucket.set_rate(now, self.controller.low_rate());
        }
    }
}

/// What those who share an RNIC agree on.
#[pin_data]
pub(crate) struct Qos {
    policy: Atomic<u32>,
    /// Sessions of low priority.
    low_tenants: Atomic<u32>,
    #[pin]
    low_limiter: SpinLock<LowClassLimiter>,
    #[pin]
    limits: TenantLimits,
    /// Signalled when the RNIC goes.
    #[pin]
    removed: CountingCompletion,
    stats: Arc<Stats>,
}

impl Qos {
    /// Nobody has low priority, or a limit.
    pub(crate) fn new(stats: Arc<Stats>) -> Result<Arc<Self>> {
        Arc::pin_init(
            pin_init!(Self {
                policy: Atomic::new(QosPolicy::Sw as u32),
                low_tenants: Atomic::new(0u32),
                low_limiter <- new_spinlock!(LowClassLimiter::new()),
                limits <- TenantLimits::new(),
                removed <- CountingCompletion::new(),
                stats,
            }),
            GFP_KERNEL,
        )
    }

    /// How low priority is kept from disturbing high.
    pub(crate) fn policy(&self) -> QosPolicy {
        QosPolicy::new(self.policy.load(Relaxed)).unwrap_or(QosPolicy::None)
    }

    /// Changes that.
    pub(crate) fn set_policy(&self, policy: QosPolicy) {
        let mut low = self.low_limiter.lock();
        self.policy.store(policy as u32, Relaxed);
        *low = LowClassLimiter::new();
    }

    /// Sessions of low priority.
    pub(crate) fn low_tenants(&self) -> u32 {
        self.low_tenants.load(Relaxed)
    }

    /// What low priority may have in a second now; 0 is any.
    pub(crate) fn low_rate(&self) -> u64 {
        if !self.is_throttling_low() {
            return 0;
        }
        let mut low = self.low_limiter.lock();
        low.update(monotonic_ns());
        low.bucket.rate()
    }

    /// The connections to a peer that requests of low priority, or others, may use.
    pub(crate) fn conn_subset(&self, is_low: bool) -> ConnSubset {
        match self.policy() {
            QosPolicy::Hw if is_low => ConnSubset::Low,
            QosPolicy::Hw => ConnSubset::High,
            _ => ConnSubset::All,
        }
    }

    /// The limits of users and cgroups.
    pub(crate) fn limits(&self) -> &TenantLimits {
        &self.limits
    }

    /// The RNIC goes: nobody is held back any more.
    pub(crate) fn on_device_removed(&self) {
        self.removed.complete_all();
    }

    /// Whether low priority is held back while high priority needs that.
    fn is_throttling_low(&self) -> bool {
        self.low_tenants.load(Relaxed) != 0 && self.policy.load(Relaxed) == QosPolicy::Sw as u32
    }

    /// When the next of low priority may go.
    fn low_ready_at(&self, now: u64) -> u64 {
        let mut low = self.low_limiter.lock();
        low.update(now);
        low.bucket.next_ready_at(now)
    }

    /// So much of low priority goes.
    fn charge_low(&self, cost: RequestCost) {
        self.low_limiter.lock().bucket.charge(cost.tokens());
    }

    /// So much of low priority does not go after all.
    fn refund_low(&self, cost: RequestCost) {
        self.low_limiter.lock().bucket.refund(cost.tokens());
    }

    /// So much of low priority goes, and nobody measures how long it takes.
    fn charge_low_unmeasured(&self, bytes: u64) {
        self.low_limiter.lock().controller.record_low(bytes);
    }

    /// Measures a request of so many bytes that is about to be posted.
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

    /// Sleeps until `at`, or for a moment.
    ///
    /// # Errors
    ///
    /// `ENODEV` if the RNIC goes; those of the deadline.
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

/// How long a request takes.
pub(crate) struct LatencyProbe {
    qos: Arc<Qos>,
    bytes: u64,
    is_low: bool,
    start_ns: u64,
}

impl LatencyProbe {
    /// It has completed.
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
