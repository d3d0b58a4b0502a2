// SPDX-License-Identifier: GPL-2.0

//! Counters and gauges of one RNIC, reported in `struct kite_stats`.
//!
//! All accesses are relaxed atomics: the values order no other memory accesses. `CONTRIBUTING.md` lists the
//! places of a new counter: `include/uapi/kite.h`, the list of `stats!`, the crate `kite`, and
//! `docs/operations.md`.

use crate::bindings;
use kernel::sync::atomic::{Atomic, Relaxed};

/// Counter or gauge that many threads update.
pub(crate) struct Counter(Atomic<u64>);

impl Counter {
    /// Creates a counter with value 0.
    pub(crate) const fn new() -> Self {
        Self(Atomic::new(0))
    }

    /// Adds `n`.
    pub(crate) fn add(&self, n: u64) {
        self.0.add(n, Relaxed);
    }

    /// Adds `n` to a gauge unless the sum would exceed `limit`. Adding 0 always succeeds. Returns `true` on
    /// success.
    pub(crate) fn try_add(&self, n: u64, limit: u64) -> bool {
        let before = self.0.fetch_add(n, Relaxed);
        let fits = n == 0 || before.saturating_add(n) <= limit;
        if !fits {
            self.sub(n);
        }
        fits
    }

    /// Subtracts `n` from a gauge.
    pub(crate) fn sub(&self, n: u64) {
        self.0.fetch_sub(n, Relaxed);
    }

    /// Returns the current value.
    pub(crate) fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// Defines [`Stats`] with the fields of `struct kite_stats`. A field missing on either side fails to compile.
macro_rules! stats {
    ($($name:ident)*) => {
        /// Statistics of one RNIC. `struct kite_stats` in `include/uapi/kite.h` documents each field.
        pub(crate) struct Stats { $(#[allow(missing_docs)] pub(crate) $name: Counter,)* }

        impl Stats {
            /// Creates statistics with all fields 0.
            pub(crate) const fn new() -> Self {
                Self { $($name: Counter::new(),)* }
            }

            /// Returns a copy of all fields. Fields are read one by one, so the copy is not a consistent
            /// snapshot.
            pub(crate) fn snapshot(&self) -> bindings::kite_stats {
                bindings::kite_stats { $($name: self.$name.get(),)* }
            }
        }
    };
}

stats! {
    reads read_bytes writes write_bytes fills fill_bytes copies copy_bytes migrations migrated_bytes atomics rpcs rpcs_served locks barriers lock_waits local_bytes errors sqes retries work_requests blocked_waits
    slot_waits credit_waits ring_waits throttled unmatched_completions ctrl_requests ctrl_requests_served malformed_messages duplicate_messages qp_connects
    qp_errors qp_evictions dci_errors dc_replays vqp_requests vqp_rc_requests transport_switches promotions vqp_messages_received directory_hits directory_reads directory_misses wakeups lent_bytes regions open_handles connected_qps promoted_peers dcis inflight sessions io_queues
}
