// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Objects that programs address by pointers to structures of the header, with private data behind the structures.

use std::cell::UnsafeCell;

/// Structure of the header that has private data behind it.
pub(crate) trait CStruct {
    /// Private data.
    type Inner;
}

/// Pointer that is stored for the program, and not dereferenced without a separate proof.
pub(crate) struct SendPtr<R>(pub(crate) *mut R);

impl<R> Clone for SendPtr<R> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<R> Copy for SendPtr<R> {}

// SAFETY: each dereference is unsafe, and has its own proof that the object is live.
unsafe impl<R> Send for SendPtr<R> {}
// SAFETY: likewise.
unsafe impl<R> Sync for SendPtr<R> {}

/// Structure and private data. The program may write the structure.
#[repr(C)]
struct Object<R: CStruct> {
    raw: UnsafeCell<R>,
    inner: R::Inner,
}

/// Creates an object that the program owns.
pub(crate) fn into_raw<R: CStruct>(raw: R, inner: R::Inner) -> *mut R {
    let raw = UnsafeCell::new(raw);
    Box::into_raw(Box::new(Object { raw, inner })).cast()
}

/// Returns the private data behind a structure.
///
/// # Safety
/// The structure comes from [`into_raw`], and the program does not destroy it while the result is in use.
pub(crate) unsafe fn inner<'a, R: CStruct>(raw: *mut R) -> &'a R::Inner {
    // SAFETY: the structure is the first field of an object, as the caller guarantees. Objects are never borrowed
    // mutably.
    unsafe { &(*raw.cast::<Object<R>>()).inner }
}

/// Takes the ownership of an object back from the program.
///
/// # Safety
/// The structure comes from [`into_raw`], and is not used afterwards.
pub(crate) unsafe fn from_raw<R: CStruct>(raw: *mut R) -> R::Inner {
    // SAFETY: [`into_raw`] leaked the box, as the caller guarantees.
    unsafe { Box::from_raw(raw.cast::<Object<R>>()) }.inner
}
