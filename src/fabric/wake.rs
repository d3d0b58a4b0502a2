// SPDX-License-Identifier: GPL-2.0

//! What an interrupt of the RNIC does: it wakes the poller thread, or who waits for something else.

use crate::{
    sys::{deadline::Deadline, event::Event},
    verbs::cq::Notify,
};
use kernel::{prelude::*, sync::Arc};

/// How long somebody sleeps, in ms, should nobody wake him.
const NAP_MS: u32 = 10;

/// Wakes one thread.
#[pin_data]
pub(crate) struct Wake {
    #[pin]
    pub(crate) event: Event,
}

impl Wake {
    /// Makes one that nobody has woken.
    pub(crate) fn new() -> Result<Arc<Self>> {
        Arc::pin_init(pin_init!(Self { event <- Event::new() }), GFP_KERNEL)
    }

    /// Waits until `look` finds something, of which there is an interrupt after `arm`.
    ///
    /// # Errors
    ///
    /// `ETIMEDOUT` if it finds nothing for so many ms.
    pub(super) fn find<T>(
        &self,
        ms: u32,
        arm: impl Fn(),
        mut look: impl FnMut() -> Option<T>,
    ) -> Result<T> {
        let deadline = Deadline::after_ms(ms);
        self.event.forget();
        loop {
            arm();
            // In this order: who was not run for long looks once more.
            let over = deadline.check();
            if let Some(found) = look() {
                return Ok(found);
            }
            over?;
            self.event.wait_timeout(NAP_MS);
        }
    }
}

impl Notify for Wake {
    fn notify(&self) {
        self.event.signal();
    }
}
