// SPDX-License-Identifier: GPL-2.0

//! User namespaces, in which processes name users.
//!
//! Rights, limits and messages between nodes name users by their UIDs in the initial user namespace.
//! [`UserNamespace`] translates these UIDs from and to the namespace of a process, such as that of a
//! container. The `kernel` crate has no type for `struct user_namespace`. With such an abstraction this file
//! can be removed.

use crate::bindings::{self, inline};
use core::ptr::NonNull;
use kernel::{prelude::*, sync::aref::AlwaysRefCounted, types::Opaque};

/// User namespace.
///
/// # Invariants
///
/// A shared reference exists only while the namespace has a reference.
#[repr(transparent)]
pub(super) struct UserNamespace(Opaque<bindings::user_namespace>);

// SAFETY: A reference to a user namespace is not tied to a thread.
unsafe impl Send for UserNamespace {}
// SAFETY: The methods only read the mappings of the namespace, which the kernel synchronizes.
unsafe impl Sync for UserNamespace {}

// SAFETY: By the type invariants the namespace is reference counted. `get_user_ns` keeps the namespace until
// `put_user_ns`.
unsafe impl AlwaysRefCounted for UserNamespace {
    fn inc_ref(&self) {
        // SAFETY: By the type invariants the namespace has a reference.
        unsafe { inline::get_user_ns(self.0.get()) };
    }

    unsafe fn dec_ref(obj: NonNull<Self>) {
        // SAFETY: By the safety requirements of this function the caller owns a reference. The type is a
        // transparent wrapper of `struct user_namespace`.
        unsafe { inline::put_user_ns(obj.cast().as_ptr()) };
    }
}

impl UserNamespace {
    /// Runs `f` with the namespace of the current process.
    pub(super) fn with_current<R>(f: impl FnOnce(&Self) -> R) -> R {
        // SAFETY: The function has no preconditions.
        let current_ns = unsafe { bindings::current_user_ns() };
        // SAFETY: The credentials of the current process hold a reference to the namespace, and do not change
        // during the call of `f`. The type is a transparent wrapper of `struct user_namespace`.
        f(unsafe { &*current_ns.cast() })
    }

    /// Returns the UID in the initial namespace of the user with `uid` in this namespace.
    ///
    /// # Errors
    ///
    /// - `EINVAL`: this namespace has no such user.
    pub(super) fn to_initial_uid(&self, uid: u32) -> Result<u32> {
        // SAFETY: By the type invariants the namespace is valid during the call.
        let kuid = unsafe { bindings::make_kuid(self.0.get(), uid) };
        (kuid.val != u32::MAX).then_some(kuid.val).ok_or(EINVAL)
    }

    /// Returns the UID in this namespace of the user with `initial_uid` in the initial namespace. Returns the
    /// overflow UID (`/proc/sys/kernel/overflowuid`) if this namespace has no such user.
    pub(super) fn to_local_uid(&self, initial_uid: u32) -> u32 {
        let kuid = bindings::kuid_t { val: initial_uid };
        // SAFETY: By the type invariants the namespace is valid during the call.
        unsafe { bindings::from_kuid_munged(self.0.get(), kuid) }
    }
}
