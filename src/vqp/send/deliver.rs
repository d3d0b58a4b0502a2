// SPDX-License-Identifier: GPL-2.0

//! Who hears what became of requests: who pops, or the queue by which they came ([`super::push_builder`]).
//!
//! What is popped waits in the queue pair. A queue is told at once, of each request, and then that there is more to take.

use super::{
    batch::{VqpBatch, VqpRequest},
    VqpCompletion,
};
use crate::errno;
use kernel::prelude::*;
use kite_core::proto::window::SendWindow;

/// A queue. It is told while the queue pair is locked, so it waits for nothing.
pub(crate) trait CompletionSink: Send + Sync {
    /// This came of the request of that tag.
    fn push_completion(&self, tag: u64, result: Result);

    /// That was all for now.
    fn wake_consumer(&self);
}

impl VqpBatch {
    /// Says what became of requests, in their order, as far as that is known.
    pub(in crate::vqp) fn deliver_completions(
        &mut self,
        send_window: &SendWindow,
        closed_with: Option<Error>,
        completions: &mut KVec<VqpCompletion>,
    ) {
        let reported_before = self.reported_count;
        while let Some(request) = self.requests[self.reported_count..self.done_count].first() {
            let result = match (request.is_acknowledged(send_window), closed_with) {
                (true, _) => Ok(()),
                (false, Some(error)) => Err(error),
                (false, None) => break,
            };
            self.report(request, result, completions);
            self.reported_count += 1;
        }
        if self.reported_count != reported_before {
            self.wake_sink();
        }
    }

    /// It has ended. What is not done of it never will be.
    pub(in crate::vqp) fn complete_remaining(&self, completions: &mut KVec<VqpCompletion>) {
        let mut error = self.error.unwrap_or(errno::canceled());
        for request in self.remaining() {
            self.report(request, Err(error), completions);
            error = errno::canceled();
        }
        self.wake_sink();
    }

    /// Nobody pops any more what is not said yet, but a queue is told.
    pub(in crate::vqp) fn cancel_unreported(&self) {
        if let Some(outlet) = &self.sink {
            for request in &self.requests[self.reported_count..] {
                outlet.push_completion(request.tag, Err(errno::canceled()));
            }
        }
        self.wake_sink();
    }

    fn report(&self, request: &VqpRequest, result: Result, completions: &mut KVec<VqpCompletion>) {
        match &self.sink {
            Some(outlet) => outlet.push_completion(request.tag, result),
            // There is room: no more are admitted.
            None if request.signaled || result.is_err() => {
                let _ = completions.push((request.tag, result), GFP_ATOMIC);
            }
            None => {}
        }
    }

    fn wake_sink(&self) {
        if let Some(outlet) = &self.sink {
            outlet.wake_consumer();
        }
    }
}
