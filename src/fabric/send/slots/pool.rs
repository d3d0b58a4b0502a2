// SPDX-License-Identifier: GPL-2.0

//! Free slots, one list for each class.
//!
//! # Locking
//!
//! - `FreeList::free` (spin lock) protects the indices of the free slots. No lock is taken while it is held,
//!   and `Conn::state` may be held when it is taken.
//! - A waiter increments `waiters` before it takes `free`, and [`FreeList::push`] reads `waiters` after it
//!   has released `free`. Either the push finds the waiter, or the waiter finds the slot.

use crate::sys::{completion::CountingCompletion, deadline::Deadline};
use kernel::{
    new_spinlock,
    prelude::*,
    sync::{
        atomic::{Acquire, Atomic, Full},
        SpinLock,
    },
};

/// Class of a slot, by purpose.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum SlotClass {
    /// Reads and writes.
    Data,
    /// Control messages between kernels.
    Control,
}

/// Free slots of one class.
#[pin_data]
pub(super) struct FreeList {
    /// Indices of the free slots.
    #[pin]
    pub(super) free: SpinLock<KVec<u32>>,
    /// Completed when a slot is freed while a thread waits.
    #[pin]
    freed: CountingCompletion,
    /// Number of threads that wait for `freed`.
    waiters: Atomic<u32>,
}

impl FreeList {
    /// Creates the list with all `slots` free.
    pub(super) fn new(slots: core::ops::Range<u32>) -> Result<Pin<KBox<Self>>> {
        let mut free = KVec::with_capacity(slots.len(), GFP_KERNEL)?;
        for slot in slots {
            free.push(slot, GFP_KERNEL)?;
        }
        KBox::pin_init(
            pin_init!(Self {
                free <- new_spinlock!(free, "FreeList::free"),
                freed <- CountingCompletion::new(),
                waiters: Atomic::new(0u32),
            }),
            GFP_KERNEL,
        )
    }

    pub(super) fn pop(&self) -> Option<u32> {
        self.free.lock().pop()
    }

    pub(super) fn push(&self, slot: u32) {
        // The list has capacity for all its slots, so the push does not allocate.
        let _ = self.free.lock().push(slot, GFP_ATOMIC);
        // A thread in `wait_free` that took the lock before the push incremented `waiters` earlier, so the
        // load sees the increment. A thread that takes the lock after the push finds the slot.
        if self.waiters.load(Acquire) != 0 {
            self.freed.complete();
        }
    }

    /// Waits for at most [`Deadline::slice_ms`] until a slot is free.
    ///
    /// # Errors
    ///
    /// - `EINTR`: a signal arrived that ends the wait according to the deadline.
    pub(super) fn wait_free(&self, deadline: Deadline) -> Result {
        self.waiters.fetch_add(1u32, Full);
        if !self.free.lock().is_empty() {
            // A slot was freed before `waiters` was incremented, so no wake-up was sent.
            self.freed.complete();
        }
        let result = self
            .freed
            .wait_interruptible_timeout_ms(deadline.slice_ms());
        self.waiters.fetch_sub(1u32, Full);
        result.map(|_| ()).or_else(|_| deadline.handle_signal())
    }
}
