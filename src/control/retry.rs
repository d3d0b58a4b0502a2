// SPDX-License-Identifier: GPL-2.0

//! Timeout and retry intervals of control requests and deferred work.

use kernel::{
    prelude::*,
    time::{delay::fsleep, Delta},
};

/// Timeout of control requests for which the caller sets no deadline, in ms.
pub(crate) const CONTROL_TIMEOUT_MS: u32 = 10_000;

/// Interval in ms between attempts to reach a node that does not reply.
pub(crate) const RETRY_MS: i64 = 100;

/// Interval in ms between checks for packets that may still arrive. Other items of the queue wait meanwhile.
pub(crate) const DRAIN_POLL_MS: i64 = 10;

/// Calls `f` until it succeeds. Used for allocations that must not fail.
pub(crate) fn retry_alloc<T>(mut f: impl FnMut() -> Result<T>) -> T {
    loop {
        match f() {
            Ok(done) => return done,
            Err(_) => fsleep(Delta::from_millis(RETRY_MS)),
        }
    }
}
