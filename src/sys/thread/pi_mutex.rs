// SPDX-License-Identifier: GPL-2.0

//! Mutex with priority inheritance, for data that user threads share with the poller thread.
//!
//! # Operation
//!
//! A user thread with little processor time, for example of `SCHED_IDLE`, may be preempted while it holds a
//! lock. With `Mutex` all waiters then wait until the scheduler selects the holder, which can take seconds.
//! [`PiMutex`] is a `struct rt_mutex`. A kernel thread that waits for it runs under `SCHED_FIFO` meanwhile, and
//! the holder inherits this priority until it unlocks. So the wait lasts as long as the code of the holder.
//! The holder of several [`PiMutex`]es passes the priority on to the holder of the one for which it waits.
//!
//! A lock for which the poller thread may wait must be a [`PiMutex`] or a spinlock. The priority of a user
//! thread is never changed for its own wait.
//!
//! # Locking
//!
//! Context and rules are those of `Mutex`: the holder may sleep. The holder inherits no priority while it
//! waits for a `Mutex`.
//!
//! The `kernel` crate has no backend for `struct rt_mutex`. With such a backend this file can be removed.

use crate::bindings::{self, inline};
use kernel::{
    prelude::*,
    sync::lock::{Backend, Guard, Lock},
};

/// Mutex with priority inheritance. `new_pi_mutex!` creates it.
pub(crate) type PiMutex<T> = Lock<T, RtMutexBackend>;

/// Guard of a [`PiMutex`].
pub(crate) type PiMutexGuard<'a, T> = Guard<'a, T, RtMutexBackend>;

/// Returns an initializer of a [`PiMutex`] with its content and its name for lockdep.
macro_rules! new_pi_mutex {
    ($inner:expr, $name:literal) => {
        $crate::sys::thread::pi_mutex::PiMutex::new(
            $inner,
            kernel::c_str!($name),
            kernel::static_lock_class!(),
        )
    };
}
pub(crate) use new_pi_mutex;

/// Backend of [`PiMutex`]: `struct rt_mutex`.
pub(crate) struct RtMutexBackend;

// SAFETY: `struct rt_mutex` ensures mutual exclusion, and `relock` is `lock`.
unsafe impl Backend for RtMutexBackend {
    type State = bindings::rt_mutex;
    type GuardState = ();

    unsafe fn init(ptr: *mut Self::State, name: *const c_char, key: *mut bindings::lock_class_key) {
        // SAFETY: By the safety requirements, `ptr` is valid for writes, `name` and `key` are valid forever.
        unsafe { bindings::__rt_mutex_init(ptr, name, key) };
    }

    unsafe fn lock(ptr: *mut Self::State) {
        // SAFETY: By the safety requirements, the lock was initialized. The caller may sleep.
        unsafe { inline::kite_pi_mutex_lock(ptr) };
    }

    unsafe fn try_lock(ptr: *mut Self::State) -> Option<()> {
        // SAFETY: By the safety requirements, the lock was initialized.
        (unsafe { bindings::rt_mutex_trylock(ptr) } != 0).then_some(())
    }

    unsafe fn unlock(ptr: *mut Self::State, _guard_state: &()) {
        // SAFETY: By the safety requirements, the caller holds the lock.
        unsafe { bindings::rt_mutex_unlock(ptr) };
    }

    unsafe fn assert_is_held(ptr: *mut Self::State) {
        // SAFETY: By the safety requirements, the lock was initialized.
        unsafe { inline::kite_assert_pi_mutex_held(ptr) };
    }
}
