// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Locks.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex. Poison is ignored: no code panics under a lock, so the data is consistent.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
