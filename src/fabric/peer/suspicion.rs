// SPDX-License-Identifier: GPL-2.0

//! Evidence that a peer is dead, on its way up to the daemon.
//!
//! The kernel does not decide who is in the cluster, but it is often the first to notice that a node no
//! longer answers. It says so each second for as long as it tries the peer in vain: the daemon tells by
//! that a peer that is dead from one that only this way does not lead to.

use crate::sys::{deadline::Deadline, event_counter::EventCounter};
use kernel::{
    new_spinlock,
    prelude::*,
    sync::{Arc, SpinLock},
};

/// Who hears of suspicions: the daemon's session, if there is one.
#[pin_data]
pub(crate) struct SuspectListener {
    #[pin]
    counter: SpinLock<Option<Arc<EventCounter>>>,
}

impl SuspectListener {
    /// Nobody listens yet.
    pub(crate) fn new() -> Result<Arc<Self>> {
        Arc::pin_init(
            pin_init!(Self { counter <- new_spinlock!(None) }),
            GFP_KERNEL,
        )
    }

    /// From now on `watch` is raised, or nobody's.
    pub(crate) fn set_counter(&self, counter: Option<Arc<EventCounter>>) {
        let old = core::mem::replace(&mut *self.counter.lock(), counter);
        drop(old);
    }

    fn counter(&self) -> Option<Arc<EventCounter>> {
        self.counter.lock().clone()
    }
}

/// Milliseconds after a report in which the peer is not reported again.
const REPORT_INTERVAL_MS: u32 = 1000;

struct SuspicionState {
    /// Suspected, and not reported yet.
    pending: bool,
    /// Since the last report.
    quiet_until: Option<Deadline>,
    /// The peer left: nothing more is said of it.
    closed: bool,
}

/// Whether a peer is suspected.
#[pin_data]
pub(crate) struct Suspicion {
    #[pin]
    state: SpinLock<SuspicionState>,
    listener: Arc<SuspectListener>,
}

impl Suspicion {
    /// None so far.
    pub(crate) fn new(listener: Arc<SuspectListener>) -> Result<Arc<Self>> {
        let state = SuspicionState {
            pending: false,
            quiet_until: None,
            closed: false,
        };
        let init = pin_init!(Self { state <- new_spinlock!(state), listener });
        Arc::pin_init(init, GFP_KERNEL)
    }

    /// The peer does not answer.
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

    /// The peer answers.
    pub(crate) fn clear(&self) {
        self.update_and_clear(|_| {});
    }

    /// The peer left the view.
    pub(crate) fn close(&self) {
        self.update_and_clear(|state| state.closed = true);
    }

    /// Takes the suspicion, if there is one to report.
    pub(crate) fn consume(&self) -> bool {
        self.update_and_clear(|state| {
            if state.pending {
                state.quiet_until = Some(Deadline::after_ms(REPORT_INTERVAL_MS));
            }
        })
    }

    /// Does `change`, then takes back what was raised; says whether anything was.
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
