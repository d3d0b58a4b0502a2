// SPDX-License-Identifier: GPL-2.0

//! Charge of long-term pins to the `RLIMIT_MEMLOCK` of a user.
//!
//! The charge is separate from `pinned_vm` of the address space, which `kite_account_pinned` accounts. The
//! `kernel` crate does not wrap `locked_vm` of `struct user_struct`. With this abstraction this file can be
//! removed.

use crate::bindings::{self, inline};
use kernel::{error::from_err_ptr, prelude::*};

/// Number of pages charged to the memory lock limit of a user.
///
/// # Invariants
///
/// This value holds a reference to `user` and has charged `pages` pages to that user. A null pointer stands
/// for a user without limit.
pub(super) struct MemlockCharge {
    user: *mut bindings::user_struct,
    pages: usize,
}

impl MemlockCharge {
    /// Charges `pages` pages to the current user.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: the limit of the user would be exceeded.
    pub(super) fn new(pages: usize) -> Result<Self> {
        // SAFETY: The function has no preconditions.
        let user = from_err_ptr(unsafe { inline::kite_account_long(pages) })?;
        // INVARIANT: The pages were just charged, and the call took the reference.
        Ok(Self { user, pages })
    }
}

impl Drop for MemlockCharge {
    fn drop(&mut self) {
        // SAFETY: By the type invariants, the pages are charged and the reference is held. Both are released
        // once.
        unsafe { inline::kite_unaccount_long(self.user, self.pages) };
    }
}
