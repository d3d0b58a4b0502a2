// SPDX-License-Identifier: GPL-2.0

//! Delivery of completions: kept for [`pop`](crate::vqp::Vqp::pop), or passed to the
//! [`CompletionSink`](crate::vqp::sink::CompletionSink) of an I/O queue.
//!
//! # Operation
//!
//! Completions to be popped are stored in the VQP. A sink receives each completion immediately, and is then
//! woken.
//!
//! # Locking
//!
//! Completions are stored, and sinks called, under `Vqp::state`.

use super::{batch::VqpBatch, request::VqpRequest};
use crate::{errno, vqp::VqpCompletion};
use kernel::prelude::*;
use kite_core::proto::window::SendWindow;

impl VqpBatch {
    /// Delivers completions of requests in order, up to the first without a result. `closed_with` fails
    /// messages that the peer has not acknowledged.
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

    /// Delivers completions of all requests left in a batch that has ended. The first fails with the error of
    /// the batch, the others with `ECANCELED`.
    pub(in crate::vqp) fn complete_remaining(&self, completions: &mut KVec<VqpCompletion>) {
        let mut error = self.error.unwrap_or(errno::canceled());
        for request in self.remaining() {
            self.report(request, Err(error), completions);
            error = errno::canceled();
        }
        self.wake_sink();
    }

    /// Fails all requests without a completion, with `ECANCELED`, if the batch has a sink. A closed VQP is
    /// not popped.
    pub(in crate::vqp) fn cancel_unreported(&self) {
        if let Some(sink) = &self.sink {
            for request in &self.requests[self.reported_count..] {
                sink.push_completion(request.tag, Err(errno::canceled()));
            }
        }
        self.wake_sink();
    }

    fn report(&self, request: &VqpRequest, result: Result, completions: &mut KVec<VqpCompletion>) {
        match &self.sink {
            Some(sink) => sink.push_completion(request.tag, result),
            // Capacity was reserved, since [`VQP_DEPTH`](super::VQP_DEPTH) bounds the pending requests, so
            // this does not allocate.
            None if request.signaled || result.is_err() => {
                let _ = completions.push((request.tag, result), GFP_ATOMIC);
            }
            None => {}
        }
    }

    fn wake_sink(&self) {
        if let Some(sink) = &self.sink {
            sink.wake_consumer();
        }
    }
}
