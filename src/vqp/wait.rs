// SPDX-License-Identifier: GPL-2.0

//! Waits of processes for completions and messages.
//!
//! # Operation
//!
//! A process polls for the adaptive spin time, then sleeps until events arrive. While a process polls, and
//! for a grace time afterwards, the poller thread leaves the VQP to that process ([`super::poll`]).
//!
//! # Locking
//!
//! The sleep is on `Vqp::event_cv` with `Vqp::state`. [`UserPollWindow`] is relaxed, since it is only a hint.

use super::{table::VqpTable, Vqp, VqpEvent};
use crate::{
    errno::{TryError, TryResult},
    sys::deadline::{monotonic_ns, Deadline},
};
use core::ops::Deref;
use kernel::{
    prelude::*,
    sync::{
        atomic::{Atomic, Relaxed},
        Arc, CondVarTimeoutResult,
    },
    time::msecs_to_jiffies,
};

/// Nanoseconds for which the poller leaves a VQP to a process that is polling, and to a process that has just
/// received what it polled for.
const USER_POLL_NS: u64 = 10_000_000;
const USER_POLL_GRACE_NS: u64 = 100_000;

/// Time in which a process polls a VQP, or is about to poll it again.
pub(super) struct UserPollWindow {
    /// End of the window: monotonic time in nanoseconds.
    until_ns: Atomic<u64>,
}

impl UserPollWindow {
    /// Creates a closed window.
    pub(super) const fn new() -> Self {
        Self {
            until_ns: Atomic::new(0),
        }
    }

    /// Leaves the VQP to the polling process for `ns` nanoseconds from now.
    fn set(&self, ns: u64) {
        self.until_ns.store(monotonic_ns() + ns, Relaxed);
    }

    /// Returns `true` if the poller must leave the VQP to a process.
    pub(super) fn is_open(&self) -> bool {
        monotonic_ns() < self.until_ns.load(Relaxed)
    }
}

impl Vqp {
    /// Calls `f` until the result is not [`TryError::WouldBlock`]. Polls for the adaptive spin time at first,
    /// then sleeps until events arrive.
    ///
    /// # Errors
    ///
    /// - `ETIMEDOUT`, `EINTR`: the deadline passed, or a signal arrived.
    /// - Any other error of `f`.
    pub(crate) fn wait<T>(
        &self,
        event: VqpEvent,
        deadline: Deadline,
        mut f: impl FnMut() -> TryResult<T>,
    ) -> Result<T> {
        let mut result = Err(TryError::WouldBlock);
        let mut is_ready = || {
            result = f();
            !matches!(&result, Err(TryError::WouldBlock))
        };
        self.user_poll_window.set(USER_POLL_NS);
        let spin_sample = self.adaptive_spin.spin_until(&mut is_ready);
        // A process that uses the VQP steadily calls again within the grace time.
        self.user_poll_window.set(if spin_sample.is_none() {
            USER_POLL_GRACE_NS
        } else {
            0
        });
        if spin_sample.is_some() {
            while !is_ready() {
                deadline.check()?;
                self.sleep_slice(event, deadline)?;
            }
        }
        Ok(result?)
    }

    /// Calls `f`, and calls `f` once more after polling the receive queue if the result was
    /// [`TryError::WouldBlock`].
    ///
    /// # Errors
    ///
    /// Any error of `f`.
    pub(crate) fn try_or_poll<T>(
        &self,
        table: impl Deref<Target = Arc<VqpTable>>,
        event: VqpEvent,
        mut f: impl FnMut() -> TryResult<T>,
    ) -> Result<T> {
        match f() {
            Err(TryError::WouldBlock) if self.depends_on_peer_packets(event) => {
                // A process that polls without pause then does not depend on the wake-up of the poller.
                table.fabric().try_poll_recv();
                Ok(f()?)
            }
            done => Ok(done?),
        }
    }

    /// Returns `true` if `event` can depend on packets of the peer endpoint. A message has to arrive, and the
    /// completion of a sent message needs the acknowledgment of the peer.
    fn depends_on_peer_packets(&self, event: VqpEvent) -> bool {
        event == VqpEvent::Message || self.vqp_numbers().0 != 0
    }

    /// Sleeps until an event arrives, for at most [`Deadline::slice_ms`].
    fn sleep_slice(&self, event: VqpEvent, deadline: Deadline) -> Result {
        let mut state = self.state.lock();
        if state.is_ready_for(event) {
            return Ok(());
        }
        let slice = msecs_to_jiffies(deadline.slice_ms());
        let woken = self.event_cv.wait_interruptible_timeout(&mut state, slice);
        drop(state);
        match woken {
            CondVarTimeoutResult::Signal { .. } => deadline.handle_signal(),
            _ => Ok(()),
        }
    }
}
