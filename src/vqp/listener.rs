// SPDX-License-Identifier: GPL-2.0

//! Listeners at ports, and the endpoints that wait there for `accept`.
//!
//! # Operation
//!
//! [`VqpTable`](super::table::VqpTable) has the listeners and their backlogs. A process waits at its listener
//! until a message has created an endpoint.
//!
//! # Locking
//!
//! The `Release` store of `is_closed` pairs with the `Acquire` load in `VqpTable::accept`.

use super::Vqp;
use crate::{
    errno::{TryError, TryResult},
    sys::{
        completion::CountingCompletion, deadline::Deadline, event_counter::EventCounter,
        memcg::Memcg,
    },
};
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    prelude::*,
    sync::{atomic::AtomicFlag, Arc},
};
use kite_core::wire::packet::VqpMessage;

/// Listener at a port.
#[pin_data]
pub(crate) struct Listener {
    pub(super) port: u32,
    pub(super) uid: u32,
    /// Signaled when an endpoint arrives, and when the listener is closed.
    #[pin]
    pub(super) pending_event: CountingCompletion,
    /// Set when the listener is closed.
    pub(super) is_closed: AtomicFlag,
    pub(super) session_events: Arc<EventCounter>,
    /// Cgroup that is charged for endpoints that no process has accepted yet.
    pub(super) memcg: Arc<Memcg>,
}

impl Listener {
    /// Creates a listener, charged to the current memory cgroup.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory.
    pub(super) fn new(port: u32, uid: u32, session_events: Arc<EventCounter>) -> Result<Arc<Self>> {
        let memcg = Arc::new(Memcg::current(), GFP_KERNEL_ACCOUNT)?;
        Arc::pin_init(
            pin_init!(Self { port, uid, pending_event <- CountingCompletion::new(), is_closed: AtomicFlag::new(false), session_events, memcg }),
            GFP_KERNEL_ACCOUNT,
        )
    }

    /// Returns `true` if the listener belongs to the user that a message requires, if any.
    pub(super) fn satisfies(&self, message: &VqpMessage) -> bool {
        message.required_owner.is_none_or(|owner| owner == self.uid)
    }

    /// Calls `f` until the result is not [`TryError::WouldBlock`], and sleeps in between until a new endpoint
    /// arrives.
    ///
    /// # Errors
    ///
    /// - `ETIMEDOUT`, `EINTR`: the deadline passed, or a signal arrived.
    /// - Any other error of `f`.
    pub(crate) fn wait<T>(
        &self,
        deadline: Deadline,
        mut f: impl FnMut() -> TryResult<T>,
    ) -> Result<T> {
        loop {
            match f() {
                Err(TryError::WouldBlock) => deadline.check()?,
                done => return Ok(done?),
            }
            let woken = self
                .pending_event
                .wait_interruptible_timeout_ms(deadline.slice_ms());
            woken.map(drop).or_else(|_| deadline.handle_signal())?;
        }
    }
}

/// New endpoint that no process has accepted yet.
pub(super) struct PendingAccept {
    pub(super) listener: Arc<Listener>,
    pub(super) vqpn: u64,
    pub(super) peer_uid: u32,
}

/// New endpoint that a process has accepted.
pub(crate) struct AcceptedVqp {
    pub(crate) vqp: Arc<Vqp>,
    /// User of the peer endpoint.
    pub(crate) peer_uid: u32,
}
