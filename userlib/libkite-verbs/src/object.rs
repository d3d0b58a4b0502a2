// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Objects that programs know by pointers to structures of the header, with what we keep behind those.

use std::cell::UnsafeCell;

/// A structure of the header, and what is behind it.
pub(crate) trait CStruct {
    /// What is behind it.
    type Inner;
}

/// A pointer that is only handed to the program.
pub(crate) struct SendPtr<R>(pub(crate) *mut R);

impl<R> Clone for SendPtr<R> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<R> Copy for SendPtr<R> {}

// SAFETY: whoever has it cannot use it without the program's, or its own, promise that it may.
unsafe impl<R> Send for SendPtr<R> {}
// SAFETY: likewise.
unsafe impl<R> Sync for SendPtr<R> {}

/// Both. The structure is the program's as well, which may write it.
#[repr(C)]
struct Object<R: CStruct> {
    raw: UnsafeCell<R>,
    inner: R::Inner,
}

/// Gives a new object to the program.
pub(crate) fn into_raw<R: CStruct>(raw: R, inner: R::Inner) -> *mut R {
    let raw = UnsafeCell::new(raw);
    Box::into_raw(Box::new(Object { raw, inner })).cast()
}

/// What is behind a structure.
///
/// # Safety
/// The program got it from [`give`], and has it still for as long as the result is used.
pub(crate) unsafe fn inner<'a, R: CStruct>(raw: *mut R) -> &'a R::Inner {
    // SAFETY: it is the first field of an object, as the caller vouches; that is never borrowed mutably.
    unsafe { &(*raw.cast::<Object<R>>()).inner }
}

/// Takes an object from the program.
///
/// # Safety
/// The program got it from [`give`], and uses it no more.
pub(crate) unsafe fn from_raw<R: CStruct>(raw: *mut R) -> R::Inner {
    // SAFETY: a box gave it away, as the caller vouches.
    unsafe { Box::from_raw(raw.cast::<Object<R>>()) }.inner
}
