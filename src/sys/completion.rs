// SPDX-License-Identifier: GPL-2.0

//! A wake-up that may come from a hard interrupt and is never lost.
//!
//! `kernel::sync::CondVar` needs a lock on the side that wakes, which an interrupt cannot take, and
//! `kernel::sync::Completion` cannot be consumed. This is `struct completion` with both.

use crate::bindings::{self, inline};
use kernel::{
    prelude::*,
    time::{msecs_to_jiffies, Msecs},
    types::Opaque,
};

/// Counts wake-ups; each wait consumes one.
#[pin_data]
pub(crate) struct CountingCompletion {
    #[pin]
    inner: Opaque<bindings::completion>,
}

// SAFETY: `struct completion` may be used from any context.
unsafe impl Send for CountingCompletion {}
// SAFETY: As above; it is locked inside.
unsafe impl Sync for CountingCompletion {}

impl CountingCompletion {
    /// Makes an event with no wake-up pending.
    pub(crate) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            // SAFETY: `init_completion` initialises the slot it is given, which is pinned.
            inner <- Opaque::ffi_init(|slot| unsafe { bindings::init_completion(slot) }),
        })
    }

    /// Wakes one waiter, now or when it comes. May be called from any context.
    pub(crate) fn complete(&self) {
        // SAFETY: Initialised in `new`.
        unsafe { bindings::complete(self.inner.get()) };
    }

    /// Wakes all waiters, now and in future. May be called from any context.
    pub(crate) fn complete_all(&self) {
        // SAFETY: Initialised in `new`.
        unsafe { bindings::complete_all(self.inner.get()) };
    }

    /// Forgets all wake-ups so far: who looks for what they are about from now on needs none of them.
    pub(crate) fn reinit(&self) {
        // SAFETY: Initialised in `new`.
        unsafe { inline::kite_reinit_completion(self.inner.get()) };
    }

    /// Waits for as long as it takes, as an idle kernel thread does.
    pub(crate) fn wait_idle(&self) {
        // SAFETY: Initialised in `new`; the caller may sleep.
        unsafe {
            bindings::wait_for_completion_state(self.inner.get(), bindings::TASK_IDLE);
        }
    }

    /// Waits at most `ms` milliseconds. Returns whether there was a wake-up.
    pub(crate) fn wait_timeout_ms(&self, ms: Msecs) -> bool {
        let jiffies = msecs_to_jiffies(ms);
        // SAFETY: Initialised in `new`; the caller may sleep.
        unsafe { bindings::wait_for_completion_timeout(self.inner.get(), jiffies) != 0 }
    }

    /// Waits at most about `us` microseconds, as an idle kernel thread does.
    pub(crate) fn wait_timeout_us(&self, us: u32) {
        // SAFETY: Initialised in `new`; the caller may sleep.
        unsafe { inline::kite_wait_for_completion_us(self.inner.get(), us) };
    }

    /// As [`Self::wait_timeout`], but a signal ends the wait too.
    ///
    /// # Errors
    ///
    /// `EINTR` if a signal is pending.
    pub(crate) fn wait_interruptible_timeout_ms(&self, ms: Msecs) -> Result<bool> {
        let jiffies = msecs_to_jiffies(ms);
        // SAFETY: Initialised in `new`; the caller may sleep.
        match unsafe {
            bindings::wait_for_completion_interruptible_timeout(self.inner.get(), jiffies)
        } {
            0 => Ok(false),
            left if left > 0 => Ok(true),
            _ => Err(EINTR),
        }
    }
}
