// SPDX-License-Identifier: GPL-2.0

//! Count of pending events of a session, with a wait queue for `poll`.
//!
//! No abstraction is missing: the file combines an atomic counter with [`PollCondVar`]. `pending` is an
//! atomic, so no lock is needed to raise an event. The `Full` updates pair with the `Acquire` load in
//! [`EventCounter::has_pending`].

use kernel::{
    new_poll_condvar,
    prelude::*,
    sync::{
        atomic::{Acquire, Atomic, Full},
        poll::PollCondVar,
        Arc,
    },
};

/// Counter of pending events. The code that raises an event keeps the event itself.
#[pin_data]
pub(crate) struct EventCounter {
    pending: Atomic<u32>,
    #[pin]
    pub(crate) poll_condvar: PollCondVar,
}

impl EventCounter {
    /// Allocates a counter without pending events.
    pub(crate) fn new() -> Result<Arc<Self>> {
        let init =
            pin_init!(Self { pending: Atomic::new(0u32), poll_condvar <- new_poll_condvar!() });
        Arc::pin_init(init, GFP_KERNEL)
    }

    /// Adds one event and wakes all pollers.
    pub(crate) fn raise(&self) {
        self.pending.fetch_add(1u32, Full);
        self.poll_condvar.notify_all();
    }

    /// Removes one event, because the event was reported or became obsolete.
    pub(crate) fn consume(&self) {
        self.pending.fetch_sub(1u32, Full);
    }

    /// Returns `true` if at least one event is pending.
    pub(crate) fn has_pending(&self) -> bool {
        self.pending.load(Acquire) != 0
    }
}
