// SPDX-License-Identifier: GPL-2.0

//! How many events wait for a session, and whoever polls for them.

use kernel::{
    new_poll_condvar,
    prelude::*,
    sync::{
        atomic::{Acquire, Atomic, Full},
        poll::PollCondVar,
        Arc,
    },
};

/// A count of events. What they are, whoever raised them knows.
#[pin_data]
pub(crate) struct EventCounter {
    pending: Atomic<u32>,
    #[pin]
    pub(crate) poll_condvar: PollCondVar,
}

impl EventCounter {
    /// Makes a watch without events.
    pub(crate) fn new() -> Result<Arc<Self>> {
        let init =
            pin_init!(Self { pending: Atomic::new(0u32), poll_condvar <- new_poll_condvar!() });
        Arc::pin_init(init, GFP_KERNEL)
    }

    /// Adds an event.
    pub(crate) fn raise(&self) {
        self.pending.fetch_add(1u32, Full);
        self.poll_condvar.notify_all();
    }

    /// Takes one event back: it was reported, or it no longer matters.
    pub(crate) fn consume(&self) {
        self.pending.fetch_sub(1u32, Full);
    }

    /// Whether there is an event.
    pub(crate) fn has_pending(&self) -> bool {
        self.pending.load(Acquire) != 0
    }
}
