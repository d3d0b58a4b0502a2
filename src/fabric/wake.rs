// SPDX-License-Identifier: GPL-2.0

//! What an interrupt of the RNIC does: it wakes the poller thread.

use crate::{sys::event::Event, verbs::cq::Notify};
use kernel::{prelude::*, sync::Arc};

/// Wakes the poller thread of one RNIC.
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
}

impl Notify for Wake {
    fn notify(&self) {
        self.event.signal();
    }
}
