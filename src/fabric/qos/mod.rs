// SPDX-License-Identifier: GPL-2.0

//! Quality of service (LITE, section 7): who of those who share an RNIC goes first, and how fast.
//!
//! `kite_core::qos` decides; here it meets clock, locks and sessions. A session asks as a [`tenant`] before it
//! posts, and then has its part go, by its priority and by the [`limits`] of its user and cgroups. What requests
//! of high priority meet is measured until completion ([`Measure`]), while anybody has low priority.

pub(crate) mod limits;
pub(crate) mod tenant;

use crate::{
    bindings,
    stats::Stats,
    sys::{
        deadline::{now, Deadline},
        event::Event,
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
use kite_core::qos::{Governor, Pace};
use limits::Limits;
use tenant::Load;

/// How long who is held back sleeps before it looks whether it still is.
const NAP_MS: u64 = 10;

/// How low priority is kept from disturbing high.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Policy {
    /// Not at all.
    None = bindings::KITE_QOS_NONE,
    /// At the sender, by rate (SW-Pri).
    Sw = bindings::KITE_QOS_SW,
    /// By queue pairs of its own (HW-Sep).
    Hw = bindings::KITE_QOS_HW,
}

impl Policy {
    /// That of a number of the ABI.
    pub(crate) fn new(number: u32) -> Option<Self> {
        [Self::None, Self::Sw, Self::Hw]
            .into_iter()
            .find(|policy| *policy as u32 == number)
    }
}

/// Which of the connections to a peer may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Share {
    All,
    /// All but the last, if there is another.
    High,
    /// The last.
    Low,
}

impl Share {
    /// The first of `count` connections that are in it, and how many.
    pub(crate) fn of(self, count: usize) -> (usize, usize) {
        match self {
            Self::High if count > 1 => (0, count - 1),
            Self::Low if count > 1 => (count - 1, 1),
            _ => (0, count.max(1)),
        }
    }
}

/// How fast low priority may go.
struct Low {
    governor: Governor,
    pace: Pace,
}

impl Low {
    const fn new() -> Self {
        Self {
            governor: Governor::new(),
            pace: Pace::new(),
        }
    }

    fn look(&mut self, now: u64) {
        if self.governor.look(now) {
            self.pace.set(now, self.governor.rate());
        }
    }
}

/// What those who share an RNIC agree on.
#[pin_data]
pub(crate) struct Qos {
    policy: Atomic<u32>,
    /// Sessions of low priority.
    tenants: Atomic<u32>,
    #[pin]
    low: SpinLock<Low>,
    #[pin]
    limits: Limits,
    /// Signalled when the RNIC goes.
    #[pin]
    over: Event,
    stats: Arc<Stats>,
}

impl Qos {
    /// Nobody has low priority, or a limit.
    pub(crate) fn new(stats: Arc<Stats>) -> Result<Arc<Self>> {
        Arc::pin_init(
            pin_init!(Self {
                policy: Atomic::new(Policy::Sw as u32),
                tenants: Atomic::new(0u32),
                low <- new_spinlock!(Low::new()),
                limits <- Limits::new(),
                over <- Event::new(),
                stats,
            }),
            GFP_KERNEL,
        )
    }

    /// How low priority is kept from disturbing high.
    pub(crate) fn policy(&self) -> Policy {
        Policy::new(self.policy.load(Relaxed)).unwrap_or(Policy::None)
    }

    /// Changes that.
    pub(crate) fn set_policy(&self, policy: Policy) {
        let mut low = self.low.lock();
        self.policy.store(policy as u32, Relaxed);
        *low = Low::new();
    }

    /// Sessions of low priority.
    pub(crate) fn low_tenants(&self) -> u32 {
        self.tenants.load(Relaxed)
    }

    /// What low priority may have in a second now; 0 is any.
    pub(crate) fn low_rate(&self) -> u64 {
        if !self.is_governing() {
            return 0;
        }
        let mut low = self.low.lock();
        low.look(now());
        low.pace.rate()
    }

    /// The connections to a peer that requests of low priority, or others, may use.
    pub(crate) fn share(&self, low: bool) -> Share {
        match self.policy() {
            Policy::Hw if low => Share::Low,
            Policy::Hw => Share::High,
            _ => Share::All,
        }
    }

    /// The limits of users and cgroups.
    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The RNIC goes: nobody is held back any more.
    pub(crate) fn end(&self) {
        self.over.signal_all();
    }

    /// Whether low priority is held back while high priority needs that.
    fn is_governing(&self) -> bool {
        self.tenants.load(Relaxed) != 0 && self.policy.load(Relaxed) == Policy::Sw as u32
    }

    /// When the next of low priority may go.
    fn low_ready(&self, now: u64) -> u64 {
        let mut low = self.low.lock();
        low.look(now);
        low.pace.ready(now)
    }

    /// So much of low priority goes.
    fn low_goes(&self, load: Load) {
        self.low.lock().pace.take(load.cost());
    }

    /// So much of low priority does not go after all.
    fn low_gives_back(&self, load: Load) {
        self.low.lock().pace.give_back(load.cost());
    }

    /// So much of low priority goes, and nobody measures how long it takes.
    fn low_passes(&self, bytes: u64) {
        self.low.lock().governor.low_done(bytes);
    }

    /// Measures a request of so many bytes that is about to be posted.
    pub(crate) fn measure(self: &Arc<Self>, bytes: usize, low: bool) -> Option<Measure> {
        self.is_governing().then(|| Measure {
            qos: self.clone(),
            bytes: bytes as u64,
            low,
            since: now(),
        })
    }

    /// Sleeps until `at`, or for a moment.
    ///
    /// # Errors
    ///
    /// `ENODEV` if the RNIC goes; those of the deadline.
    fn nap(&self, until: u64, deadline: Deadline) -> Result {
        let ms = until.saturating_sub(now()).div_ceil(1_000_000);
        let nap = self.over.wait_interruptible(ms.clamp(1, NAP_MS) as u32);
        match nap {
            Ok(true) => Err(ENODEV),
            Ok(false) => deadline.check(),
            Err(_) => deadline.on_signal(),
        }
    }
}

/// How long a request takes.
pub(crate) struct Measure {
    qos: Arc<Qos>,
    bytes: u64,
    low: bool,
    since: u64,
}

impl Measure {
    /// It has completed.
    pub(crate) fn end(self) {
        let now = now();
        let mut low = self.qos.low.lock();
        match self.low {
            true => low.governor.low_done(self.bytes),
            false => low
                .governor
                .high_done(self.bytes, now.saturating_sub(self.since)),
        }
        low.look(now);
    }
}
