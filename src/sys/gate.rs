// SPDX-License-Identifier: GPL-2.0

//! A value that many may use and one may take away.
//!
//! The users of an RNIC, or of a mapped region, enter the gate for the length of one operation. Who
//! closes it waits for those inside and gets the value: nobody will come back, unless it is opened again, with
//! a value. Unlike with `kernel::revocable::Revocable`, users may sleep inside.

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
/// Set while one is put in its place.
const OPENING: u32 = 1 << 29;

/// Time between looks of somebody who waits for the gate to empty, should a signal have gone to another.
const NAP_MS: u32 = 10;

/// Guards a `T` for its users.
///
/// # Invariants
///
/// `value` is `Some` unless [`TAKEN`] is set, and it changes only by who sets that, when [`SHUT`] is set and
/// nobody is inside, and by who sets [`OPENING`] after that.
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

    /// Makes a gate that is closed, until [`Self::open`].
    pub(crate) fn closed() -> impl PinInit<Self> {
        // INVARIANT: There is no value, and nobody is inside.
        pin_init!(Self {
            state: Atomic::new(SHUT | TAKEN),
            empty <- Event::new(),
            value: UnsafeCell::new(None),
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
        self.change(|seen| seen & SHUT == 0, |seen| seen | SHUT)
            .is_ok()
    }

    /// Shuts the gate, waits until nobody is inside, and takes the value. Of several who close, one gets
    /// it; the others wait until it is taken.
    pub(crate) fn close(&self) -> Option<T> {
        loop {
            if let Ok(taken) = self.try_close() {
                return taken;
            }
            self.empty.wait_timeout(NAP_MS);
        }
    }

    /// As [`Self::close`], but does not wait. The gate is shut in any case.
    ///
    /// # Errors
    ///
    /// `EAGAIN` while somebody is inside.
    pub(crate) fn try_close(&self) -> Result<Option<T>> {
        self.shut();
        match self.state.cmpxchg(SHUT, SHUT | TAKEN, Full) {
            // INVARIANT: `TAKEN` is set now. Users that find the gate shut touch the count only.
            // SAFETY: The gate was shut and empty, and only one can have set `TAKEN`.
            Ok(_) => Ok(unsafe { (*self.value.get()).take() }),
            Err(now) if now & TAKEN != 0 => Ok(None),
            Err(_) => Err(EAGAIN),
        }
    }

    /// Lets users in again to a gate whose value was taken.
    ///
    /// # Errors
    ///
    /// `EEXIST` if it was not, or somebody else is about to open the gate.
    pub(crate) fn open(&self, value: T) -> Result {
        self.change(
            |seen| seen & (TAKEN | OPENING) == TAKEN,
            |seen| seen | OPENING,
        )?;
        // INVARIANT: We set `OPENING`.
        // SAFETY: It was taken, so nobody is inside; and only one can have set `OPENING`.
        unsafe { *self.value.get() = Some(value) };
        self.change(|_| true, |seen| seen & !(SHUT | TAKEN | OPENING))
    }

    /// Lets users in again to a gate that was shut, if the value was not taken.
    ///
    /// # Errors
    ///
    /// `ENOENT` if it was.
    pub(crate) fn unshut(&self) -> Result {
        let unshut = self.change(|seen| seen & TAKEN == 0, |seen| seen & !SHUT);
        unshut.map_err(|_| ENOENT)
    }

    /// Changes the state if it may be.
    fn change(&self, may: impl Fn(u32) -> bool, to: impl Fn(u32) -> u32) -> Result {
        let mut seen = self.state.load(Relaxed);
        while may(seen) {
            match self.state.cmpxchg(seen, to(seen), Full) {
                Ok(_) => return Ok(()),
                Err(now) => seen = now,
            }
        }
        Err(EEXIST)
    }
}

/// Holds the gate open.
pub(crate) struct Inside<'a, T>(&'a Gate<T>);

impl<T> Deref for Inside<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: We are counted, so the value is not changed while we borrow it; and since we were
        // let in, it was not taken then, which the type invariants make `Some`.
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

impl<O, T> Deref for Kept<O, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: By the type invariants it lives, as we hold its owner; we are counted, so that the value is
        // there, as for `Inside`, and not changed while we borrow it.
        unsafe {
            (*self.gate.as_ref().value.get())
                .as_ref()
                .unwrap_unchecked()
        }
    }
}

impl<O, T> Drop for Kept<O, T> {
    fn drop(&mut self) {
        // SAFETY: By the type invariants it lives, as we hold its owner, and we leave once.
        unsafe { self.gate.as_ref() }.leave();
    }
}
