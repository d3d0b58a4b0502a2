// SPDX-License-Identifier: GPL-2.0

//! Queue of the statuses that a worker sends in place of replies.
//!
//! # Operation
//!
//! A status waits here while the ring at the other end is full ([`crate::rpc::server::reply`]).
//!
//! # Locking
//!
//! `queue` (mutex) protects the statuses, and nests with no other lock.

use kernel::{new_mutex, prelude::*, sync::Mutex};

/// Result of a call that is sent without data.
#[derive(Clone, Copy)]
pub(in crate::rpc) struct DeferredReply {
    pub(in crate::rpc) call_id: u64,
    /// Errno as a positive number, or 0.
    pub(in crate::rpc) errno: u32,
}

/// Results to be sent to the other end, in order.
#[pin_data]
pub(in crate::rpc) struct DeferredReplies {
    #[pin]
    queue: Mutex<KVec<DeferredReply>>,
}

impl DeferredReplies {
    /// Creates an empty queue.
    pub(super) fn new() -> impl PinInit<Self> {
        pin_init!(Self { queue <- new_mutex!(KVec::new(), "DeferredReplies::queue") })
    }

    /// Queues a result. Returns `true` if the queue was empty, so that the caller must schedule the worker.
    pub(in crate::rpc) fn push(&self, reply: DeferredReply) -> Result<bool> {
        let mut replies = self.queue.lock();
        let is_first = replies.is_empty();
        replies.push(reply, GFP_KERNEL)?;
        Ok(is_first)
    }

    /// Returns the first queued result.
    pub(in crate::rpc) fn first(&self) -> Option<DeferredReply> {
        self.queue.lock().first().copied()
    }

    /// Removes the first queued result. The caller has sent the result, or the channel is closed.
    pub(in crate::rpc) fn pop(&self) {
        // Fails only if the queue is empty.
        let _ = self.queue.lock().remove(0);
    }
}
