// SPDX-License-Identifier: GPL-2.0

//! Log messages of an RNIC, limited in rate.
//!
//! # Operation
//!
//! The macros print `infiniband RNIC: kite: MESSAGE`. A peer or a user can cause many messages, so each place
//! in the code prints at most one per [`INTERVAL_NS`]. The next message states how many were dropped.

use crate::sys::deadline::monotonic_ns;
use kernel::sync::atomic::{Atomic, Relaxed};

/// Minimum time in ns between two messages of one place in the code.
const INTERVAL_NS: u64 = 5_000_000_000;

/// Rate limit of one place in the code.
pub(crate) struct RateLimit {
    /// Monotonic time in ns from which the next message is admitted.
    next_ns: Atomic<u64>,
    /// Messages dropped since the last one.
    dropped: Atomic<u64>,
}

impl RateLimit {
    /// Creates a limit that admits the first message.
    pub(crate) const fn new() -> Self {
        Self {
            next_ns: Atomic::new(0),
            dropped: Atomic::new(0),
        }
    }

    /// Returns the number of dropped messages if a message is admitted now.
    pub(crate) fn admit(&self) -> Option<u64> {
        let (now, next) = (monotonic_ns(), self.next_ns.load(Relaxed));
        // One of several concurrent callers changes the time, and is admitted.
        let is_admitted = now >= next
            && self
                .next_ns
                .cmpxchg(next, now + INTERVAL_NS, Relaxed)
                .is_ok();
        if is_admitted {
            return Some(self.dropped.xchg(0, Relaxed));
        }
        self.dropped.add(1, Relaxed);
        None
    }
}

/// Prints a message with a macro of the `kernel` crate: `dev_err`, `dev_warn`, `dev_info` or `dev_dbg`.
macro_rules! rnic_log {
    ($level:ident, $device:expr, $($message:tt)+) => {{
        static LIMIT: $crate::verbs::log::RateLimit = $crate::verbs::log::RateLimit::new();
        if let Some(dropped) = LIMIT.admit() {
            let rnic: $crate::verbs::device::IbDevice = $device;
            let device = rnic.as_device();
            if dropped != 0 {
                ::kernel::$level!(device, "kite: {dropped} messages of the next kind were dropped\n");
            }
            ::kernel::$level!(device, "kite: {}", ::kernel::prelude::fmt!($($message)+));
        }
    }};
}

/// Prints an error that no peer, user or network can cause.
macro_rules! rnic_err {
    ($($arguments:tt)+) => { $crate::verbs::log::rnic_log!(dev_err, $($arguments)+) };
}

/// Prints a warning.
macro_rules! rnic_warn {
    ($($arguments:tt)+) => { $crate::verbs::log::rnic_log!(dev_warn, $($arguments)+) };
}

/// Prints an event.
macro_rules! rnic_info {
    ($($arguments:tt)+) => { $crate::verbs::log::rnic_log!(dev_info, $($arguments)+) };
}

/// Prints details for dynamic debug.
macro_rules! rnic_debug {
    ($($arguments:tt)+) => { $crate::verbs::log::rnic_log!(dev_dbg, $($arguments)+) };
}

pub(crate) use {rnic_debug, rnic_err, rnic_info, rnic_log, rnic_warn};
