// SPDX-License-Identifier: GPL-2.0

//! Evidence that a peer is dead, on its way up to the daemon.
//!
//! The kernel does not decide who is in the cluster, but it is often the first to notice that a node no
//! longer answers. It says so each second for as long as it tries the peer in vain: the daemon tells by
//! that a peer that is dead from one that only this way does not lead to.

use crate::sys::{deadline::Deadline, watch::Watch};
use kernel::{
    new_spinlock,
    prelude::*,
    sync::{Arc, SpinLock},
};

/// Who hears of suspicions: the daemon's session, if there is one.
#[pin_data]
pub(crate) struct Daemon {
    #[pin]
    watch: SpinLock<Option<Arc<Watch>>>,
}

impl Daemon {
    /// Nobody listens yet.
    pub(crate) fn new() -> Result<Arc<Self>> {
        Arc::pin_init(pin_init!(Self { watch <- new_spinlock!(None) }), GFP_KERNEL)
    }

    /// From now on `watch` is raised, or nobody's.
    pub(crate) fn listen(&self, watch: Option<Arc<Watch>>) {
        let before = core::mem::replace(&mut *self.watch.lock(), watch);
        drop(before);
    }

    fn watch(&self) -> Option<Arc<Watch>> {
        self.watch.lock().clone()
    }
}

/// Milliseconds after a report in which the peer is not reported again.
const QUIET_MS: u32 = 1000;

struct State {
    /// Suspected, and not reported yet.
    raised: bool,
    /// Since the last report.
    quiet: Option<Deadline>,
    /// The peer left: nothing more is said of it.
    closed: bool,
}

/// Whether a peer is suspected.
#[pin_data]
pub(crate) struct Suspicion {
    #[pin]
    state: SpinLock<State>,
    daemon: Arc<Daemon>,
}

impl Suspicion {
    /// None so far.
    pub(crate) fn new(daemon: Arc<Daemon>) -> Result<Arc<Self>> {
        let state = State {
            raised: false,
            quiet: None,
            closed: false,
        };
        let init = pin_init!(Self { state <- new_spinlock!(state), daemon });
        Arc::pin_init(init, GFP_KERNEL)
    }

    /// The peer does not answer.
    pub(crate) fn raise(&self) {
        let mut state = self.state.lock();
        let quiet = state.quiet.is_some_and(|quiet| !quiet.passed());
        if state.closed || quiet || core::mem::replace(&mut state.raised, true) {
            return;
        }
        drop(state);
        if let Some(watch) = self.daemon.watch() {
            watch.raise();
        }
    }

    /// The peer answers.
    pub(crate) fn clear(&self) {
        self.take(|_| {});
    }

    /// The peer left the view.
    pub(crate) fn close(&self) {
        self.take(|state| state.closed = true);
    }

    /// Takes the suspicion, if there is one to report.
    pub(crate) fn report(&self) -> bool {
        self.take(|state| {
            if state.raised {
                state.quiet = Some(Deadline::after_ms(QUIET_MS));
            }
        })
    }

    /// Does `change`, then takes back what was raised; says whether anything was.
    fn take(&self, change: impl FnOnce(&mut State)) -> bool {
        let mut state = self.state.lock();
        change(&mut state);
        let raised = core::mem::take(&mut state.raised);
        drop(state);
        if let Some(watch) = self.daemon.watch().filter(|_| raised) {
            watch.settle();
        }
        raised
    }
}
