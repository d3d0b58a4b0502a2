// SPDX-License-Identifier: GPL-2.0

//! Suspicion of unresponsive peers, as input of the failure detector of the daemon.
//!
//! # Operation
//!
//! The daemon decides the membership of the cluster, but the kernel is often the first to detect that a node
//! does not respond. The kernel reports a suspected peer at most once per [`REPORT_INTERVAL_MS`], for as long
//! as requests to the peer fail. The repeated reports let the daemon distinguish a dead node from a node
//! that only this path does not reach.
//!
//! # Locking
//!
//! - `Suspicion::state` and `SuspectListener::counter` are spin locks. Neither is held while the other is
//!   taken, or while the counter is changed.
//! - `PeerTable::peers` may be held when they are taken.

use crate::sys::{deadline::Deadline, event_counter::EventCounter};
use kernel::{
    new_spinlock,
    prelude::*,
    sync::{Arc, SpinLock},
};

/// Receiver of suspicions: the event counter of the daemon's session.
#[pin_data]
pub(crate) struct SuspectListener {
    #[pin]
    counter: SpinLock<Option<Arc<EventCounter>>>,
}

impl SuspectListener {
    /// Creates a listener without a counter.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory.
    pub(crate) fn new() -> Result<Arc<Self>> {
        Arc::pin_init(
            pin_init!(Self { counter <- new_spinlock!(None, "SuspectListener::counter") }),
            GFP_KERNEL,
        )
    }

    /// Sets the counter that later suspicions raise. With `None`, they raise none.
    pub(crate) fn set_counter(&self, counter: Option<Arc<EventCounter>>) {
        let old = core::mem::replace(&mut *self.counter.lock(), counter);
        drop(old);
    }

    fn counter(&self) -> Option<Arc<EventCounter>> {
        self.counter.lock().clone()
    }
}

/// Time in ms after a report in which the peer is not reported again.
const REPORT_INTERVAL_MS: u32 = 1000;

struct SuspicionState {
    /// The peer is suspected, and the suspicion is not reported yet.
    pending: bool,
    /// End of the interval after the last report.
    quiet_until: Option<Deadline>,
    /// The peer left the view, and is not suspected again.
    closed: bool,
}

/// Suspicion of one peer.
#[pin_data]
pub(crate) struct Suspicion {
    #[pin]
    state: SpinLock<SuspicionState>,
    listener: Arc<SuspectListener>,
}

impl Suspicion {
    /// Creates the state of a peer that is not suspected.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory.
    pub(crate) fn new(listener: Arc<SuspectListener>) -> Result<Arc<Self>> {
        let state = SuspicionState {
            pending: false,
            quiet_until: None,
            closed: false,
        };
        let init = pin_init!(Self { state <- new_spinlock!(state, "Suspicion::state"), listener });
        Arc::pin_init(init, GFP_KERNEL)
    }

    /// Suspects the peer, because it does not respond.
    pub(crate) fn raise(&self) {
        let mut state = self.state.lock();
        let is_quiet = state.quiet_until.is_some_and(|until| !until.has_expired());
        if state.closed || is_quiet || core::mem::replace(&mut state.pending, true) {
            return;
        }
        drop(state);
        if let Some(counter) = self.listener.counter() {
            counter.raise();
        }
    }

    /// Clears an unreported suspicion, because the peer responded.
    pub(crate) fn clear(&self) {
        self.update_and_clear(|_| {});
    }

    /// Clears the suspicion permanently, because the peer left the view.
    pub(crate) fn close(&self) {
        self.update_and_clear(|state| state.closed = true);
    }

    /// Returns `true` if a suspicion must be reported, and marks it as reported.
    pub(crate) fn consume(&self) -> bool {
        self.update_and_clear(|state| {
            if state.pending {
                state.quiet_until = Some(Deadline::after_ms(REPORT_INTERVAL_MS));
            }
        })
    }

    /// Applies `update` and clears an unreported suspicion. Returns `true` if there was one.
    fn update_and_clear(&self, update: impl FnOnce(&mut SuspicionState)) -> bool {
        let mut state = self.state.lock();
        update(&mut state);
        let raised = core::mem::take(&mut state.pending);
        drop(state);
        if let Some(counter) = self.listener.counter().filter(|_| raised) {
            counter.consume();
        }
        raised
    }
}
