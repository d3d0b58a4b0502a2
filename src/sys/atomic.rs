// SPDX-License-Identifier: GPL-2.0

//! Atomic operations of `kite_core::atomic` on a word in memory.
//!
//! `kernel::sync::atomic` has no function that retries a compare-and-exchange until the word is updated. With
//! this abstraction this file can be removed.

use kernel::sync::atomic::{Atomic, Full, Relaxed};
use kite_core::atomic::AtomicOp as Change;

/// Applies an atomic operation to a word, atomically to all processors. Returns the old value.
pub(super) fn apply_atomic(word: &Atomic<u64>, atomic: Change) -> u64 {
    let mut old = word.load(Relaxed);
    while let Some(new) = atomic.apply(old) {
        match word.cmpxchg(old, new, Full) {
            Ok(_) => break,
            Err(now) => old = now,
        }
    }
    old
}
