// SPDX-License-Identifier: GPL-2.0

//! Whose memory it is that the kernel allocates on somebody's behalf, in a thread of its own.

use crate::bindings::{self, inline};
use kernel::alloc::{
    flags::{GFP_ATOMIC, GFP_KERNEL, GFP_KERNEL_ACCOUNT, GFP_NOWAIT, __GFP_NOWARN},
    Flags,
};

/// Memory that is accounted to the caller, for who must not wait for it.
pub(crate) fn gfp_nowait_account() -> Flags {
    GFP_NOWAIT | __GFP_NOWARN | (GFP_KERNEL_ACCOUNT & !GFP_KERNEL)
}

/// Memory that is accounted at once, if need be beyond what the cgroup may have: for what comes from elsewhere.
/// A cgroup is full whenever its programs have read many files.
pub(crate) fn gfp_atomic_account() -> Flags {
    GFP_ATOMIC | __GFP_NOWARN | (GFP_KERNEL_ACCOUNT & !GFP_KERNEL)
}

/// A cgroup that pays for memory.
///
/// # Invariants
///
/// The pointer is null, or a memory cgroup of which we hold a reference.
pub(crate) struct Memcg(*mut bindings::mem_cgroup);

// SAFETY: References to cgroups belong to no thread.
unsafe impl Send for Memcg {}
// SAFETY: As above, and nothing of it is changed.
unsafe impl Sync for Memcg {}

impl Memcg {
    /// That of the current process; who is none, as a kernel thread, pays nothing.
    pub(crate) fn current() -> Self {
        // INVARIANT: It takes a reference.
        // SAFETY: The function has no preconditions.
        Self(unsafe { inline::kite_current_memcg() })
    }

    /// Lets it pay for what `f` allocates to be accounted.
    pub(crate) fn with_active<R>(&self, f: impl FnOnce() -> R) -> R {
        // SAFETY: By the type invariants the cgroup lives until the former one is back.
        let previous = unsafe { inline::set_active_memcg(self.0) };
        let result = f();
        // SAFETY: It was the active one.
        unsafe { inline::set_active_memcg(previous) };
        result
    }
}

impl Drop for Memcg {
    fn drop(&mut self) {
        // SAFETY: By the type invariants.
        unsafe { inline::mem_cgroup_put(self.0) };
    }
}
