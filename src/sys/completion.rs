// SPDX-License-Identifier: GPL-2.0

//! Counting completion: a wake-up that a hard interrupt can send and that is never lost.
//!
//! `kernel::sync::CondVar` needs a lock on the waking side, which an interrupt handler cannot take.
//! `kernel::sync::Completion` lacks `complete`, waits with a timeout, interruptible waits, idle waits and
//! `reinit_completion`. With these methods this file can be removed.
//!
//! `struct completion` has an internal raw spinlock, so all methods that wake are callable from any context.

use crate::bindings::{self, inline};
use kernel::{
    prelude::*,
    time::{msecs_to_jiffies, Msecs},
    types::Opaque,
};

/// `struct completion` that counts wake-ups. Each wait consumes one wake-up.
#[pin_data]
pub(crate) struct CountingCompletion {
    #[pin]
    inner: Opaque<bindings::completion>,
}

// SAFETY: `struct completion` may be used from any context.
unsafe impl Send for CountingCompletion {}
// SAFETY: See `Send`. `struct completion` has an internal lock.
unsafe impl Sync for CountingCompletion {}

impl CountingCompletion {
    /// Initializes a completion without pending wake-ups.
    pub(crate) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            // SAFETY: `init_completion` initializes the given slot, which is pinned.
            inner <- Opaque::ffi_init(|slot| unsafe { bindings::init_completion(slot) }),
        })
    }

    /// Wakes one waiter: a present one, or else the next to wait. Callable from any context.
    pub(crate) fn complete(&self) {
        // SAFETY: `inner` was initialized in `new`.
        unsafe { bindings::complete(self.inner.get()) };
    }

    /// Wakes all present and future waiters. Callable from any context.
    pub(crate) fn complete_all(&self) {
        // SAFETY: `inner` was initialized in `new`.
        unsafe { bindings::complete_all(self.inner.get()) };
    }

    /// Discards all pending wake-ups. The caller must afterwards check for the events that these wake-ups
    /// announced.
    pub(crate) fn reinit(&self) {
        // SAFETY: `inner` was initialized in `new`.
        unsafe { inline::kite_reinit_completion(self.inner.get()) };
    }

    /// Waits for a wake-up without a time limit, in state `TASK_IDLE`.
    pub(crate) fn wait_idle(&self) {
        // SAFETY: `inner` was initialized in `new`. The caller may sleep.
        unsafe {
            bindings::wait_for_completion_state(self.inner.get(), bindings::TASK_IDLE);
        }
    }

    /// Waits at most `ms` milliseconds. Returns `true` if there was a wake-up.
    pub(crate) fn wait_timeout_ms(&self, ms: Msecs) -> bool {
        let jiffies = msecs_to_jiffies(ms);
        // SAFETY: `inner` was initialized in `new`. The caller may sleep.
        unsafe { bindings::wait_for_completion_timeout(self.inner.get(), jiffies) != 0 }
    }

    /// Waits in state `TASK_IDLE` for at most about `us` microseconds. The timer slack is a quarter of `us`.
    pub(crate) fn wait_timeout_us(&self, us: u32) {
        // SAFETY: `inner` was initialized in `new`. The caller may sleep.
        unsafe { inline::kite_wait_for_completion_us(self.inner.get(), us) };
    }

    /// Waits at most `ms` milliseconds or until a signal arrives. Returns `true` if there was a wake-up.
    ///
    /// # Errors
    ///
    /// - `EINTR`: a signal is pending.
    pub(crate) fn wait_interruptible_timeout_ms(&self, ms: Msecs) -> Result<bool> {
        let jiffies = msecs_to_jiffies(ms);
        // SAFETY: `inner` was initialized in `new`. The caller may sleep.
        match unsafe {
            bindings::wait_for_completion_interruptible_timeout(self.inner.get(), jiffies)
        } {
            0 => Ok(false),
            left if left > 0 => Ok(true),
            _ => Err(EINTR),
        }
    }
}
