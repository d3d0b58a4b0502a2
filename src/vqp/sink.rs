// SPDX-License-Identifier: GPL-2.0

//! Interface of the receivers of completions.
//!
//! An I/O queue implements [`CompletionSink`] and passes itself with its requests
//! ([`crate::vqp::send::push_builder`]).
//!
//! # Locking
//!
//! A sink is called with `Vqp::state` held, so an implementation must not block.

use kernel::prelude::*;

/// Receiver of completions. Called with `Vqp::state` held, so an implementation must not block.
pub(crate) trait CompletionSink: Send + Sync {
    /// Reports the result of the request with this tag.
    fn push_completion(&self, tag: u64, result: Result);

    /// Wakes the consumer after the last completion of a round.
    fn wake_consumer(&self);
}
