// SPDX-License-Identifier: GPL-2.0

//! Evidence that a peer is dead, on its way up to the daemon.
//!
//! The kernel does not decide who is in the cluster, but it is often the first to notice that a node no
//! longer answers. Each peer is reported once, until it answers again.

use crate::sys::watch::Watch;
use kernel::{
    new_spinlock,
    prelude::*,
    sync::{
        atomic::{Atomic, Full},
        Arc, SpinLock,
    },
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

/// No suspicion.
const NONE: u32 = 0;
/// Raised, and not reported yet.
const RAISED: u32 = 1;
/// Reported.
const REPORTED: u32 = 2;

/// The peer left: nothing more is said of it.
const CLOSED: u32 = 3;

/// Whether a peer is suspected.
pub(crate) struct Suspicion {
    state: Atomic<u32>,
    daemon: Arc<Daemon>,
}

impl Suspicion {
    /// None so far.
    pub(crate) fn new(daemon: Arc<Daemon>) -> Result<Arc<Self>> {
        Ok(Arc::new(
            Self {
                state: Atomic::new(NONE),
                daemon,
            },
            GFP_KERNEL,
        )?)
    }

    /// The peer does not answer.
    pub(crate) fn raise(&self) {
        if self.state.cmpxchg(NONE, RAISED, Full).is_ok() {
            if let Some(watch) = self.daemon.watch() {
                watch.raise();
            }
        }
    }

    /// The peer answers.
    pub(crate) fn clear(&self) {
        if self.state.cmpxchg(RAISED, NONE, Full).is_ok() {
            self.settle();
        } else {
            let _ = self.state.cmpxchg(REPORTED, NONE, Full);
        }
    }

    /// Takes back what was raised.
    fn settle(&self) {
        if let Some(watch) = self.daemon.watch() {
            watch.settle();
        }
    }

    /// The peer left the view.
    pub(crate) fn close(&self) {
        if self.state.xchg(CLOSED, Full) == RAISED {
            self.settle();
        }
    }

    /// Takes the suspicion, if it was not reported yet.
    pub(crate) fn report(&self) -> bool {
        let fresh = self.state.cmpxchg(RAISED, REPORTED, Full).is_ok();
        if fresh {
            self.settle();
        }
        fresh
    }
}
