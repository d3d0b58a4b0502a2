// SPDX-License-Identifier: GPL-2.0

//! Priority of deferred work for a peer.

/// Priority of deferred work. Cleanup after an exiting program can be large. Requests with a waiter use
/// separate queues so that they do not wait behind cleanup.
#[derive(Clone, Copy)]
pub(crate) enum WorkPriority {
    /// A thread waits for a lock or at a barrier. Such work must not wait for long operations.
    Lock,
    Foreground,
    Background,
}
