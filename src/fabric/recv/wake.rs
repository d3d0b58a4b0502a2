// SPDX-License-Identifier: GPL-2.0

//! Completion interrupt handler: wakes the poller thread, the connector thread, or a thread that waits for
//! one completion.

use crate::{
    sys::{completion::CountingCompletion, deadline::Deadline},
    verbs::cq::CompletionHandler,
};
use kernel::{prelude::*, sync::Arc};

/// Longest sleep between two polls in [`ThreadWaker::wait_for`], in ms, in case a wake-up was lost.
const WAIT_SLICE_MS: u32 = 10;

/// Wakes one thread. [`CompletionHandler::notify`] may run in hard interrupt context.
#[pin_data]
pub(crate) struct ThreadWaker {
    #[pin]
    pub(crate) event: CountingCompletion,
}

impl ThreadWaker {
    /// Creates a waker without a pending wake-up.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: no memory.
    pub(crate) fn new() -> Result<Arc<Self>> {
        Arc::pin_init(
            pin_init!(Self { event <- CountingCompletion::new() }),
            GFP_KERNEL,
        )
    }

    /// Sleeps until `poll` returns a value, and returns that value. `arm` requests the interrupt that signals
    /// it.
    ///
    /// # Errors
    ///
    /// - `ETIMEDOUT`: `poll` returned no value within `timeout_ms` milliseconds.
    pub(in crate::fabric) fn wait_for<T>(
        &self,
        timeout_ms: u32,
        arm: impl Fn(),
        mut poll: impl FnMut() -> Option<T>,
    ) -> Result<T> {
        let deadline = Deadline::after_ms(timeout_ms);
        self.event.reinit();
        loop {
            arm();
            // Check the deadline before the last poll: a thread that was not scheduled for long must poll
            // once more.
            let expired = deadline.check();
            if let Some(found) = poll() {
                return Ok(found);
            }
            expired?;
            self.event.wait_timeout_ms(WAIT_SLICE_MS);
        }
    }
}

impl CompletionHandler for ThreadWaker {
    fn notify(&self) {
        self.event.complete();
    }
}
