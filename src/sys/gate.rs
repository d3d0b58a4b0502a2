// SPDX-License-Identifier: GPL-2.0

//! A value that many may use and one may take away.
//!
//! The users of an RNIC, or of a mapped region, enter the gate for the length of one operation. Who
//! closes it waits for those inside and gets the value: nobody will come back. Unlike with
//! `kernel::revocable::Revocable`, users may sleep inside.

use crate::sys::event::Event;
use core::{cell::UnsafeCell, ops::Deref, ptr::NonNull};
use kernel::{
    prelude::*,
    sync::{
        atomic::{Acquire, Atomic, Full, Relaxed},
        Arc,
    },
};

/// Set once nobody may enter.
const SHUT: u32 = 1 << 31;
/// Set once the value was taken.
const TAKEN: u32 = 1 << 30;

/// Time between looks of somebody who waits for the gate to empty, should a signal have gone to another.
const NAP_MS: u32 = 10;

/// Guards a `T` for its users.
///
/// # Invariants
///
/// `value` is `Some` until [`TAKEN`] is set, and it changes only then: when [`SHUT`] is set and nobody
/// is inside.
#[pin_data]
pub(crate) struct Gate<T> {
    /// Users inside, [`SHUT`] and [`TAKEN`].
    state: Atomic<u32>,
    #[pin]
    empty: Event,
    value: UnsafeCell<Option<T>>,
}

// SAFETY: The value is shared with users on any thread, and moved out by one.
unsafe impl<T: Send + Sync> Send for Gate<T> {}
// SAFETY: As above.
unsafe impl<T: Send + Sync> Sync for Gate<T> {}

impl<T> Gate<T> {
    /// Makes an open gate.
    pub(crate) fn new(value: T) -> impl PinInit<Self> {
        // INVARIANT: The value is there, and nobody is inside.
        pin_init!(Self {
            state: Atomic::new(0u32),
            empty <- Event::new(),
            value: UnsafeCell::new(Some(value)),
        })
    }

    /// Enters, unless the gate is shut.
    pub(crate) fn enter(&self) -> Option<Inside<'_, T>> {
        if self.state.fetch_add(1u32, Acquire) & SHUT == 0 {
            return Some(Inside(self));
        }
        self.leave();
        None
    }

    fn leave(&self) {
        if self.state.fetch_sub(1u32, Full) & !TAKEN == SHUT | 1 {
            self.empty.signal();
        }
    }

    /// Lets nobody in any more. Returns whether this call did that.
    pub(crate) fn shut(&self) -> bool {
        let mut seen = self.state.load(Relaxed);
        while seen & SHUT == 0 {
            match self.state.cmpxchg(seen, seen | SHUT, Full) {
                Ok(_) => return true,
                Err(now) => seen = now,
            }
        }
        false
    }

    /// Shuts the gate, waits until nobody is inside, and takes the value. Of several who close, one gets
    /// it; the others wait until it is taken.
    pub(crate) fn close(&self) -> Option<T> {
        self.shut();
        loop {
            match self.state.cmpxchg(SHUT, SHUT | TAKEN, Full) {
                // INVARIANT: `TAKEN` is set now. Users that find the gate shut touch the count only.
                // SAFETY: The gate was shut and empty, and only one can have set `TAKEN`.
                Ok(_) => return unsafe { (*self.value.get()).take() },
                Err(now) if now & TAKEN != 0 => return None,
                Err(_) => {}
            }
            self.empty.wait_timeout(NAP_MS);
        }
    }
}

/// Holds the gate open.
pub(crate) struct Inside<'a, T>(&'a Gate<T>);

impl<T> Deref for Inside<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: We are counted, so the value is not changed while we borrow it; and since we were
        // let in, it had not been taken before, which the type invariants make `Some`.
        unsafe { (*self.0.value.get()).as_ref().unwrap_unchecked() }
    }
}

impl<T> Drop for Inside<'_, T> {
    fn drop(&mut self) {
        self.0.leave();
    }
}

/// Holds the gate of `O` open for as long as its owner likes, on whichever thread.
///
/// # Invariants
///
/// `gate` is a part of what `owner` points to, and we are counted as one who is inside.
pub(crate) struct Kept<O, T> {
    gate: NonNull<Gate<T>>,
    owner: Arc<O>,
}

// SAFETY: Both may be used, and the latter dropped, on any thread.
unsafe impl<O: Send + Sync, T: Send + Sync> Send for Kept<O, T> {}
// SAFETY: As above.
unsafe impl<O: Send + Sync, T: Send + Sync> Sync for Kept<O, T> {}

impl<O, T> Kept<O, T> {
    /// Enters the gate that `find` finds in its owner, unless that is shut.
    pub(crate) fn enter(owner: Arc<O>, find: impl FnOnce(&O) -> &Gate<T>) -> Option<Self> {
        let gate = find(&owner);
        core::mem::forget(gate.enter()?);
        // INVARIANT: What `find` borrows from the owner lives for as long as that is shared, and we just entered.
        let gate = NonNull::from(gate);
        Some(Self { gate, owner })
    }

    /// Whose gate it is.
    pub(crate) fn owner(&self) -> &Arc<O> {
        &self.owner
    }
}

impl<O, T> Drop for Kept<O, T> {
    fn drop(&mut self) {
        // SAFETY: By the type invariants it lives, as we hold its owner, and we leave once.
        unsafe { self.gate.as_ref() }.leave();
    }
}
