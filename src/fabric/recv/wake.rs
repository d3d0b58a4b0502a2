// SPDX-License-Identifier: GPL-2.0

//! What an interrupt of the RNIC does: it wakes the poller thread, or who waits for something else.

use crate::{
    sys::{completion::CountingCompletion, deadline::Deadline},
    verbs::cq::CompletionHandler,
};
use kernel::{prelude::*, sync::Arc};

/// How long somebody sleeps, in ms, should nobody wake him.
const WAIT_SLICE_MS: u32 = 10;

/// Wakes one thread.
#[pin_data]
pub(crate) struct ThreadWaker {
    #[pin]
    pub(crate) event: CountingCompletion,
}

impl ThreadWaker {
    /// Makes one that nobody has woken.
    pub(crate) fn new() -> Result<Arc<Self>> {
        Arc::pin_init(
            pin_init!(Self { event <- CountingCompletion::new() }),
            GFP_KERNEL,
        )
    }

    /// Waits until `look` finds something, of which there is an interrupt after `arm`.
    ///
    /// # Errors
    ///
    /// `ETIMEDOUT` if it finds nothing for so many ms.
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
            // In this order: who was not run for long looks once more.
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
