// SPDX-License-Identifier: GPL-2.0

//! Revocable value with guards that may be held while sleeping.
//!
//! Users of an RNIC or of a mapped region hold a guard for the length of one operation.
//! `kernel::revocable::Revocable` gives access in an RCU read-side section, in which users must not sleep,
//! and cannot install a new value. With a sleepable variant in the `kernel` crate this file can be removed.
//!
//! # Operation
//!
//! [`SleepableRevocable::revoke`] rejects new guards, waits for existing guards, and returns the value.
//! [`SleepableRevocable::install`] installs a new value and admits guards again.
//! [`SleepableRevocable::revoke_nosync`] only rejects new guards, and [`SleepableRevocable::unrevoke`] undoes
//! the rejection.
//!
//! # Locking
//!
//! There is no lock. `state` combines the guard count with the flags [`REVOKED`], [`VALUE_TAKEN`] and
//! [`INSTALLING`]. The thread that sets `VALUE_TAKEN` moves the value out, and the thread that sets
//! `INSTALLING` moves a value in. The `Acquire` increment of a new guard pairs with the `Full` exchange that
//! clears the flags.

use super::completion::CountingCompletion;
use crate::errno::{TryError, TryResult};
use core::{cell::UnsafeCell, ops::Deref, ptr::NonNull};
use kernel::{
    prelude::*,
    sync::{
        atomic::{Acquire, Atomic, Full, Relaxed},
        Arc,
    },
};

/// Flag: new guards are rejected.
const REVOKED: u32 = 1 << 31;
/// Flag: the value was moved out.
const VALUE_TAKEN: u32 = 1 << 30;
/// Flag: a thread is installing a new value.
const INSTALLING: u32 = 1 << 29;

/// Interval in milliseconds at which a revoking thread checks the count again. Another waiter may have
/// consumed the wake-up.
const WAIT_SLICE_MS: u32 = 10;

/// Value of type `T` that guards give access to until a thread revokes the value.
///
/// # Invariants
///
/// `value` is `Some` unless [`VALUE_TAKEN`] is set. Only two threads change `value`:
///
/// - the thread that sets `VALUE_TAKEN`, when [`REVOKED`] is set and no guard exists.
/// - the thread that sets [`INSTALLING`] afterwards.
#[pin_data]
pub(crate) struct SleepableRevocable<T> {
    /// Number of guards, and the flags [`REVOKED`], [`VALUE_TAKEN`] and [`INSTALLING`].
    state: Atomic<u32>,
    #[pin]
    drained: CountingCompletion,
    value: UnsafeCell<Option<T>>,
}

// SAFETY: Guards share the value with any thread, and one thread moves the value out.
unsafe impl<T: Send + Sync> Send for SleepableRevocable<T> {}
// SAFETY: See `Send`.
unsafe impl<T: Send + Sync> Sync for SleepableRevocable<T> {}

impl<T> SleepableRevocable<T> {
    /// Initializes a revocable with a value that is accessible.
    pub(crate) fn new(value: T) -> impl PinInit<Self> {
        // INVARIANT: `value` is `Some`, `VALUE_TAKEN` is clear and no guard exists.
        pin_init!(Self {
            state: Atomic::new(0u32),
            drained <- CountingCompletion::new(),
            value: UnsafeCell::new(Some(value)),
        })
    }

    /// Initializes a revoked revocable without a value, for a later [`Self::install`].
    pub(crate) fn new_revoked() -> impl PinInit<Self> {
        // INVARIANT: `value` is `None`, `VALUE_TAKEN` is set and no guard exists.
        pin_init!(Self {
            state: Atomic::new(REVOKED | VALUE_TAKEN),
            drained <- CountingCompletion::new(),
            value: UnsafeCell::new(None),
        })
    }

    /// Returns a guard, or `None` if the value is revoked.
    pub(crate) fn try_access(&self) -> Option<RevocableGuard<'_, T>> {
        if self.state.fetch_add(1u32, Acquire) & REVOKED == 0 {
            return Some(RevocableGuard(self));
        }
        self.release_access();
        None
    }

    fn release_access(&self) {
        if self.state.fetch_sub(1u32, Full) & !VALUE_TAKEN == REVOKED | 1 {
            self.drained.complete();
        }
    }

    /// Rejects new guards without waiting for existing ones. Returns `true` if this call set [`REVOKED`].
    pub(crate) fn revoke_nosync(&self) -> bool {
        self.update_state(|state| state & REVOKED == 0, |state| state | REVOKED)
            .is_ok()
    }

    /// Rejects new guards, waits until no guard exists, and moves the value out.
    ///
    /// If several threads call this function, one of them receives the value. The others wait until the value
    /// is taken.
    pub(crate) fn revoke(&self) -> Option<T> {
        loop {
            if let Ok(value) = self.try_revoke() {
                return value;
            }
            self.drained.wait_timeout_ms(WAIT_SLICE_MS);
        }
    }

    /// Like [`Self::revoke`], but does not wait. New guards are rejected in any case.
    ///
    /// # Errors
    ///
    /// - [`TryError::WouldBlock`]: a guard still exists.
    pub(crate) fn try_revoke(&self) -> TryResult<Option<T>> {
        self.revoke_nosync();
        match self.state.cmpxchg(REVOKED, REVOKED | VALUE_TAKEN, Full) {
            // INVARIANT: `VALUE_TAKEN` is set now. Threads that find `REVOKED` set change only the count.
            // SAFETY: `REVOKED` was set and the count was zero. Only one thread can have set `VALUE_TAKEN`.
            Ok(_) => Ok(unsafe { (*self.value.get()).take() }),
            Err(state) if state & VALUE_TAKEN != 0 => Ok(None),
            Err(_) => Err(TryError::WouldBlock),
        }
    }

    /// Installs a new value after the old one was taken, and admits guards again.
    ///
    /// # Errors
    ///
    /// - `EEXIST`: the old value was not taken, or another thread is installing a value.
    pub(crate) fn install(&self, value: T) -> Result {
        self.update_state(
            |state| state & (VALUE_TAKEN | INSTALLING) == VALUE_TAKEN,
            |state| state | INSTALLING,
        )?;
        // INVARIANT: This thread set `INSTALLING`.
        // SAFETY: `VALUE_TAKEN` was set, so no guard exists. Only one thread can have set `INSTALLING`.
        unsafe { *self.value.get() = Some(value) };
        self.update_state(
            |_| true,
            |state| state & !(REVOKED | VALUE_TAKEN | INSTALLING),
        )
    }

    /// Admits guards again after [`Self::revoke_nosync`], if the value was not taken.
    ///
    /// # Errors
    ///
    /// - `ENOENT`: the value was taken.
    pub(crate) fn unrevoke(&self) -> Result {
        let restored =
            self.update_state(|state| state & VALUE_TAKEN == 0, |state| state & !REVOKED);
        restored.map_err(|_| ENOENT)
    }

    /// Replaces the state by `next(state)` if `is_allowed(state)`.
    ///
    /// # Errors
    ///
    /// - `EEXIST`: the state does not allow the change.
    fn update_state(&self, is_allowed: impl Fn(u32) -> bool, next: impl Fn(u32) -> u32) -> Result {
        let mut state = self.state.load(Relaxed);
        while is_allowed(state) {
            match self.state.cmpxchg(state, next(state), Full) {
                Ok(_) => return Ok(()),
                Err(current) => state = current,
            }
        }
        Err(EEXIST)
    }
}

/// Access to the value of a [`SleepableRevocable`]. The value is not taken while the guard exists.
pub(crate) struct RevocableGuard<'a, T>(&'a SleepableRevocable<T>);

impl<T> Deref for RevocableGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY:
        // - This guard is counted, so no thread changes the value during the borrow.
        // - `REVOKED` was clear when the guard was created, so `VALUE_TAKEN` was clear, too. By the type
        //   invariants, the value is `Some`.
        unsafe { (*self.0.value.get()).as_ref().unwrap_unchecked() }
    }
}

impl<T> Drop for RevocableGuard<'_, T> {
    fn drop(&mut self) {
        self.0.release_access();
    }
}

/// Guard that shares ownership of the object `O` that contains the revocable. Any thread may use and drop the
/// guard.
///
/// # Invariants
///
/// `revocable` is a part of the object behind `owner`, and this guard is counted there.
pub(crate) struct OwnedRevocableGuard<O, T> {
    revocable: NonNull<SleepableRevocable<T>>,
    owner: Arc<O>,
}

// SAFETY: Both fields may be used on any thread, and `owner` may be dropped on any thread.
unsafe impl<O: Send + Sync, T: Send + Sync> Send for OwnedRevocableGuard<O, T> {}
// SAFETY: See `Send`.
unsafe impl<O: Send + Sync, T: Send + Sync> Sync for OwnedRevocableGuard<O, T> {}

impl<O, T> OwnedRevocableGuard<O, T> {
    /// Returns a guard for the revocable that `project` selects in `owner`, or `None` if the value is
    /// revoked.
    pub(crate) fn try_access(
        owner: Arc<O>,
        project: impl FnOnce(&O) -> &SleepableRevocable<T>,
    ) -> Option<Self> {
        let revocable = project(&owner);
        core::mem::forget(revocable.try_access()?);
        // INVARIANT: The revocable that `project` borrows from the owner lives as long as the shared owner.
        // The guard was just counted, and `forget` keeps the count.
        let revocable = NonNull::from(revocable);
        Some(Self { revocable, owner })
    }

    /// Returns the object that contains the revocable.
    pub(crate) fn owner(&self) -> &Arc<O> {
        &self.owner
    }
}

impl<O, T> Deref for OwnedRevocableGuard<O, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY:
        // - By the type invariants, the revocable lives, because this guard holds the owner.
        // - This guard is counted, so no thread changes the value during the borrow.
        // - As for `RevocableGuard`, the value is `Some`.
        unsafe {
            (*self.revocable.as_ref().value.get())
                .as_ref()
                .unwrap_unchecked()
        }
    }
}

impl<O, T> Drop for OwnedRevocableGuard<O, T> {
    fn drop(&mut self) {
        // SAFETY: By the type invariants, the revocable lives, because this guard holds the owner. The count
        // is decremented once.
        unsafe { self.revocable.as_ref() }.release_access();
    }
}
