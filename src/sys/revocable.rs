// SPDX-License-Identifier: GPL-2.0

//! A value that many may use and one may take away.
//!
//! The users of an RNIC, or of a mapped region, enter the gate for the length of one operation. Who
//! closes it waits for those inside and gets the value: nobody will come back, unless it is opened again, with
//! a value. Unlike with `kernel::revocable::Revocable`, users may sleep inside.

use super::completion::CountingCompletion;
use core::{cell::UnsafeCell, ops::Deref, ptr::NonNull};
use kernel::{
    prelude::*,
    sync::{
        atomic::{Acquire, Atomic, Full, Relaxed},
        Arc,
    },
};

/// Set once nobody may enter.
const REVOKED: u32 = 1 << 31;
/// Set once the value was taken.
const VALUE_TAKEN: u32 = 1 << 30;
/// Set while one is put in its place.
const INSTALLING: u32 = 1 << 29;

/// Time between looks of somebody who waits for the gate to empty, should a signal have gone to another.
const WAIT_SLICE_MS: u32 = 10;

/// Guards a `T` for its users.
///
/// # Invariants
///
/// `value` is `Some` unless [`TAKEN`] is set, and it changes only by who sets that, when [`SHUT`] is set and
/// nobody is inside, and by who sets [`OPENING`] after that.
#[pin_data]
pub(crate) struct SleepableRevocable<T> {
    /// Users inside, [`SHUT`] and [`TAKEN`].
    state: Atomic<u32>,
    #[pin]
    drained: CountingCompletion,
    value: UnsafeCell<Option<T>>,
}

// SAFETY: The value is shared with users on any thread, and moved out by one.
unsafe impl<T: Send + Sync> Send for SleepableRevocable<T> {}
// SAFETY: As above.
unsafe impl<T: Send + Sync> Sync for SleepableRevocable<T> {}

impl<T> SleepableRevocable<T> {
    /// Makes an open gate.
    pub(crate) fn new(value: T) -> impl PinInit<Self> {
        // INVARIANT: The value is there, and nobody is inside.
        pin_init!(Self {
            state: Atomic::new(0u32),
            drained <- CountingCompletion::new(),
            value: UnsafeCell::new(Some(value)),
        })
    }

    /// Makes a gate that is closed, until [`Self::open`].
    pub(crate) fn new_revoked() -> impl PinInit<Self> {
        // INVARIANT: There is no value, and nobody is inside.
        pin_init!(Self {
            state: Atomic::new(REVOKED | VALUE_TAKEN),
            drained <- CountingCompletion::new(),
            value: UnsafeCell::new(None),
        })
    }

    /// Enters, unless the gate is shut.
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

    /// Lets nobody in any more. Returns whether this call did that.
    pub(crate) fn revoke_nosync(&self) -> bool {
        self.update_state(|state| state & REVOKED == 0, |state| state | REVOKED)
            .is_ok()
    }

    /// Shuts the gate, waits until nobody is inside, and takes the value. Of several who close, one gets
    /// it; the others wait until it is taken.
    pub(crate) fn revoke(&self) -> Option<T> {
        loop {
            if let Ok(value) = self.try_revoke() {
                return value;
            }
            self.drained.wait_timeout_ms(WAIT_SLICE_MS);
        }
    }

    /// As [`Self::close`], but does not wait. The gate is shut in any case.
    ///
    /// # Errors
    ///
    /// `EAGAIN` while somebody is inside.
    pub(crate) fn try_revoke(&self) -> Result<Option<T>> {
        self.revoke_nosync();
        match self.state.cmpxchg(REVOKED, REVOKED | VALUE_TAKEN, Full) {
            // INVARIANT: `TAKEN` is set now. Users that find the gate shut touch the count only.
            // SAFETY: The gate was shut and empty, and only one can have set `TAKEN`.
            Ok(_) => Ok(unsafe { (*self.value.get()).take() }),
            Err(state) if state & VALUE_TAKEN != 0 => Ok(None),
            Err(_) => Err(EAGAIN),
        }
    }

    /// Lets users in again to a gate whose value was taken.
    ///
    /// # Errors
    ///
    /// `EEXIST` if it was not, or somebody else is about to open the gate.
    pub(crate) fn install(&self, value: T) -> Result {
        self.update_state(
            |state| state & (VALUE_TAKEN | INSTALLING) == VALUE_TAKEN,
            |state| state | INSTALLING,
        )?;
        // INVARIANT: We set `OPENING`.
        // SAFETY: It was taken, so nobody is inside; and only one can have set `OPENING`.
        unsafe { *self.value.get() = Some(value) };
        self.update_state(
            |_| true,
            |state| state & !(REVOKED | VALUE_TAKEN | INSTALLING),
        )
    }

    /// Lets users in again to a gate that was shut, if the value was not taken.
    ///
    /// # Errors
    ///
    /// `ENOENT` if it was.
    pub(crate) fn unrevoke(&self) -> Result {
        let restored =
            self.update_state(|state| state & VALUE_TAKEN == 0, |state| state & !REVOKED);
        restored.map_err(|_| ENOENT)
    }

    /// Changes the state if it may be.
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

/// Holds the gate open.
pub(crate) struct RevocableGuard<'a, T>(&'a SleepableRevocable<T>);

impl<T> Deref for RevocableGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: We are counted, so the value is not changed while we borrow it; and since we were
        // let in, it was not taken then, which the type invariants make `Some`.
        unsafe { (*self.0.value.get()).as_ref().unwrap_unchecked() }
    }
}

impl<T> Drop for RevocableGuard<'_, T> {
    fn drop(&mut self) {
        self.0.release_access();
    }
}

/// Holds the gate of `O` open for as long as its owner likes, on whichever thread.
///
/// # Invariants
///
/// `gate` is a part of what `owner` points to, and we are counted as one who is inside.
pub(crate) struct OwnedRevocableGuard<O, T> {
    revocable: NonNull<SleepableRevocable<T>>,
    owner: Arc<O>,
}

// SAFETY: Both may be used, and the latter dropped, on any thread.
unsafe impl<O: Send + Sync, T: Send + Sync> Send for OwnedRevocableGuard<O, T> {}
// SAFETY: As above.
unsafe impl<O: Send + Sync, T: Send + Sync> Sync for OwnedRevocableGuard<O, T> {}

impl<O, T> OwnedRevocableGuard<O, T> {
    /// Enters the gate that `find` finds in its owner, unless that is shut.
    pub(crate) fn try_access(
        owner: Arc<O>,
        project: impl FnOnce(&O) -> &SleepableRevocable<T>,
    ) -> Option<Self> {
        let revocable = project(&owner);
        core::mem::forget(revocable.try_access()?);
        // INVARIANT: What `find` borrows from the owner lives for as long as that is shared, and we just entered.
        let revocable = NonNull::from(revocable);
        Some(Self { revocable, owner })
    }

    /// Whose gate it is.
    pub(crate) fn owner(&self) -> &Arc<O> {
        &self.owner
    }
}

impl<O, T> Deref for OwnedRevocableGuard<O, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: By the type invariants it lives, as we hold its owner; we are counted, so that the value is
        // there, as for `Inside`, and not changed while we borrow it.
        unsafe {
            (*self.revocable.as_ref().value.get())
                .as_ref()
                .unwrap_unchecked()
        }
    }
}

impl<O, T> Drop for OwnedRevocableGuard<O, T> {
    fn drop(&mut self) {
        // SAFETY: By the type invariants it lives, as we hold its owner, and we leave once.
        unsafe { self.revocable.as_ref() }.release_access();
    }
}
