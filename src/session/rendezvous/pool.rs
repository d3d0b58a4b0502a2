// SPDX-License-Identifier: GPL-2.0

//! Relays that a session keeps for its next calls: to make one takes longer than the call.
//!
//! Only those of calls that were answered, which nobody reaches for any more.

use super::RendezvousBuffer;
use crate::sys::memcg::gfp_nowait_account;
use kernel::{new_mutex, prelude::*, sync::Mutex};

/// How many a session keeps, and bytes of them. What is longer does not take long compared with its data.
const MAX_POOLED_BUFFERS: usize = 4;
const MIN_POOLED_BUFFER_BYTES: u64 = 16 << 10;
pub(in crate::session) const MAX_POOLED_BUFFER_BYTES: u64 = 256 << 10;

/// Bytes of a relay that is to be made for `len` bytes, and may be kept.
pub(in crate::session) fn size_class(len: u64) -> u64 {
    if len > MAX_POOLED_BUFFER_BYTES {
        len
    } else {
        len.next_power_of_two().max(MIN_POOLED_BUFFER_BYTES)
    }
}

/// The relays of a session that no call has. The one that came last is at the end.
#[pin_data]
pub(in crate::session) struct RendezvousBufferPool {
    #[pin]
    buffers: Mutex<KVec<RendezvousBuffer>>,
}

impl RendezvousBufferPool {
    /// None.
    pub(in crate::session) fn new() -> impl PinInit<Self> {
        pin_init!(Self { buffers <- new_mutex!(KVec::new()) })
    }

    /// One for `len` bytes: the shortest, and of several the one that came last, of which the server's node is most
    /// likely to have a mapping.
    pub(in crate::session) fn pop_valid(&self, len: u64) -> Option<RendezvousBuffer> {
        loop {
            let buffer = self.pop_smallest_fitting(len)?;
            // Else this node has left the cluster meanwhile.
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

    /// Keeps one, in the place of the oldest if there are as many as may be. Waits for nobody.
    pub(in crate::session) fn recycle(&self, buffer: RendezvousBuffer) {
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
        // To end one takes its time.
        drop(all);
        drop((evicted, pushed));
    }

    /// Keeps none of those that there are.
    pub(in crate::session) fn clear(&self) {
        let buffers = core::mem::replace(&mut *self.buffers.lock(), KVec::new());
        drop(buffers);
    }
}
