// SPDX-License-Identifier: GPL-2.0

//! Pool of rendezvous buffers for the next calls of a session: allocation would take longer than a call.
//!
//! The pool holds only buffers of calls with a reply, which the server no longer accesses.
//!
//! # Locking
//!
//! `RendezvousBufferPool::buffers` (mutex) protects the list. A holder may sleep in an allocation, and takes
//! no other lock. Buffers are freed with the mutex unlocked, because freeing is slow.

use super::buffer::RendezvousBuffer;
use crate::sys::memcg::gfp_nowait_account;
use kernel::{new_mutex, prelude::*, sync::Mutex};

/// Maximum number of pooled buffers, and their minimum and maximum length in bytes. For longer buffers the
/// allocation is fast compared with the transfer.
const MAX_POOLED_BUFFERS: usize = 4;
const MIN_POOLED_BUFFER_BYTES: u64 = 16 << 10;
pub(super) const MAX_POOLED_BUFFER_BYTES: u64 = 256 << 10;

/// Returns the length of a buffer to allocate for `len` bytes, such that the pool can keep the buffer.
pub(super) fn size_class(len: u64) -> u64 {
    if len > MAX_POOLED_BUFFER_BYTES {
        len
    } else {
        len.next_power_of_two().max(MIN_POOLED_BUFFER_BYTES)
    }
}

/// Unused rendezvous buffers of a session, the most recently used last.
#[pin_data]
pub(in crate::session) struct RendezvousBufferPool {
    #[pin]
    buffers: Mutex<KVec<RendezvousBuffer>>,
}

impl RendezvousBufferPool {
    /// Returns an empty pool.
    pub(in crate::session) fn new() -> impl PinInit<Self> {
        pin_init!(Self { buffers <- new_mutex!(KVec::new(), "RendezvousBufferPool::buffers") })
    }

    /// Takes the shortest valid buffer of at least `len` bytes. Prefers the most recently used of equal
    /// length, which the server's node has most likely mapped.
    pub(super) fn pop_valid(&self, len: u64) -> Option<RendezvousBuffer> {
        loop {
            let buffer = self.pop_smallest_fitting(len)?;
            // A buffer is invalid if this node left the cluster meanwhile.
            if buffer.is_valid() {
                return Some(buffer);
            }
        }
    }

    fn pop_smallest_fitting(&self, len: u64) -> Option<RendezvousBuffer> {
        let mut buffers = self.buffers.lock();
        let candidates = buffers.iter().enumerate().rev();
        let large_enough = candidates.filter(|(_, buffer)| buffer.len() >= len);
        let (index, _) = large_enough.min_by_key(|(_, spare)| spare.len())?;
        buffers.remove(index).ok()
    }

    /// Adds a buffer, and evicts the oldest if the pool is full. Frees the buffer if the pool is locked or
    /// the buffer is too long. Does not wait for the lock.
    pub(super) fn recycle(&self, buffer: RendezvousBuffer) {
        let Some(mut all) = self
            .buffers
            .try_lock()
            .filter(|_| buffer.len() <= MAX_POOLED_BUFFER_BYTES)
        else {
            return;
        };
        let evicted = (all.len() >= MAX_POOLED_BUFFERS).then(|| all.remove(0));
        let reserved = all.reserve(1, gfp_nowait_account());
        let pushed = reserved
            .is_ok()
            .then(|| all.push(buffer, gfp_nowait_account()));
        // Free buffers without the lock: freeing is slow.
        drop(all);
        drop((evicted, pushed));
    }

    /// Frees all pooled buffers.
    pub(in crate::session) fn clear(&self) {
        let buffers = core::mem::replace(&mut *self.buffers.lock(), KVec::new());
        drop(buffers);
    }
}
