// SPDX-License-Identifier: GPL-2.0

//! Work requests and bytes in flight on the send queue of a DCI or of an RC connection.
//!
//! # Locking
//!
//! The owner of a [`SendQueueUsage`] protects it by its own lock.

use kernel::time::{Instant, Monotonic};

/// Use of a send queue by all credits.
pub(in crate::fabric) struct SendQueueUsage {
    wr_count: u32,
    bytes: u64,
    /// Time at which a credit was last returned, the queue stopped being idle, or the QP was connected.
    last_progress: Instant<Monotonic>,
}

impl SendQueueUsage {
    /// Returns the usage of an idle queue.
    pub(in crate::fabric) fn new() -> Self {
        Self {
            wr_count: 0,
            bytes: 0,
            last_progress: Instant::now(),
        }
    }

    /// Returns the number of work requests of all credits.
    pub(in crate::fabric) fn wr_count(&self) -> u32 {
        self.wr_count
    }

    /// Returns `true` if there are no credits for work requests.
    pub(in crate::fabric) fn is_idle(&self) -> bool {
        self.wr_count == 0
    }

    /// Returns the time of the last progress, and the bytes in flight.
    pub(in crate::fabric) fn last_progress(&self) -> (Instant<Monotonic>, u64) {
        (self.last_progress, self.bytes)
    }

    /// Returns `true` if `bytes` more stay within `max_bytes`. While no bytes are in flight, a larger request
    /// fits, too.
    pub(in crate::fabric) fn has_room_for(&self, bytes: u64, max_bytes: u64) -> bool {
        bytes == 0 || self.bytes == 0 || self.bytes + bytes <= max_bytes
    }

    /// Records progress: a new QP was connected.
    pub(in crate::fabric) fn note_progress(&mut self) {
        self.last_progress = Instant::now();
    }

    /// Adds a credit.
    pub(in crate::fabric) fn add(&mut self, wr_count: u32, bytes: u64) {
        if self.is_idle() {
            self.last_progress = Instant::now();
        }
        self.wr_count += wr_count;
        self.bytes += bytes;
    }

    /// Returns work requests of a credit that will not be posted.
    pub(in crate::fabric) fn remove_unposted(&mut self, wr_count: u32) {
        self.wr_count -= wr_count;
    }

    /// Returns a credit, or a part of it, whose work requests have completed.
    pub(in crate::fabric) fn remove_completed(&mut self, wr_count: u32, bytes: u64) {
        self.wr_count -= wr_count;
        self.bytes -= bytes;
        self.last_progress = Instant::now();
    }
}
