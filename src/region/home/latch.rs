// SPDX-License-Identifier: GPL-2.0

//! Latch: a thread waits until operations of other threads have ended.
//!
//! # Operation
//!
//! Each operation holds a [`LatchGuard`]. A wait has no limit of its own: the operations must have deadlines.

use crate::sys::{completion::CountingCompletion, deadline::WAIT_SLICE_MS};
use kernel::{
    prelude::*,
    sync::{
        atomic::{Acquire, Atomic, Full},
        Arc,
    },
};

#[pin_data]
struct LatchState {
    /// Operations that have not ended.
    count: Atomic<u32>,
    /// Signaled when the count becomes 0.
    #[pin]
    ended: CountingCompletion,
}

/// Counter of operations to wait for. [`LatchGuard`] decrements it.
pub(in crate::region) struct Latch(Arc<LatchState>);

impl Latch {
    /// Creates a latch without operations.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: no memory.
    pub(in crate::region) fn new() -> Result<Self> {
        let state = pin_init!(LatchState {
            count: Atomic::new(0),
            ended <- CountingCompletion::new(),
        });
        Ok(Self(Arc::pin_init(state, GFP_KERNEL)?))
    }

    /// Adds an operation, which lasts until the guard is dropped.
    pub(in crate::region) fn add(&self) -> LatchGuard {
        self.0.count.fetch_add(1, Full);
        LatchGuard(self.0.clone())
    }

    /// Waits for all operations.
    pub(in crate::region) fn wait(&self) {
        self.wait_while(|| true);
    }

    /// Waits for all operations, while `keep_waiting` returns `true`. The acquire load pairs with the decrement of
    /// [`LatchGuard`].
    pub(in crate::region) fn wait_while(&self, keep_waiting: impl Fn() -> bool) {
        while self.0.count.load(Acquire) != 0 && keep_waiting() {
            self.0.ended.wait_timeout_ms(WAIT_SLICE_MS);
        }
    }
}

/// Operation that a [`Latch`] counts.
pub(in crate::region) struct LatchGuard(Arc<LatchState>);

impl Drop for LatchGuard {
    fn drop(&mut self) {
        if self.0.count.fetch_sub(1, Full) == 1 {
            self.0.ended.complete();
        }
    }
}
