// SPDX-License-Identifier: GPL-2.0

//! Memory cgroup to which a kernel thread charges allocations on behalf of a process.
//!
//! The `kernel` crate has no type for `struct mem_cgroup` and does not wrap `set_active_memcg`. With such an
//! abstraction this file can be removed.

use crate::bindings::{self, inline};
use kernel::alloc::{
    flags::{GFP_ATOMIC, GFP_KERNEL, GFP_KERNEL_ACCOUNT, GFP_NOWAIT, __GFP_NOWARN},
    Flags,
};

/// Returns flags for an allocation that is charged to the active cgroup and never sleeps. The allocation
/// fails if the cgroup has reached its limit.
pub(crate) fn gfp_nowait_account() -> Flags {
    GFP_NOWAIT | __GFP_NOWARN | (GFP_KERNEL_ACCOUNT & !GFP_KERNEL)
}

/// Returns flags for an allocation that never sleeps and is charged even beyond the limit of the cgroup.
///
/// Use these flags for data that another node sends. A cgroup often is at its limit, because the page cache
/// of files that its programs read counts too.
pub(crate) fn gfp_atomic_account() -> Flags {
    GFP_ATOMIC | __GFP_NOWARN | (GFP_KERNEL_ACCOUNT & !GFP_KERNEL)
}

/// Reference to a memory cgroup that is charged for memory.
///
/// # Invariants
///
/// The pointer is null, or a memory cgroup of which this value holds a reference.
pub(crate) struct Memcg(*mut bindings::mem_cgroup);

// SAFETY: A reference to a cgroup is not tied to a thread.
unsafe impl Send for Memcg {}
// SAFETY: See `Send`. A shared reference allows no change of the cgroup.
unsafe impl Sync for Memcg {}

impl Memcg {
    /// Returns the cgroup of the current process. A kernel thread has none, so its allocations are charged to
    /// no cgroup.
    pub(crate) fn current() -> Self {
        // INVARIANT: The call returns null, or a cgroup with a reference for this value.
        // SAFETY: The function has no preconditions.
        Self(unsafe { inline::kite_current_memcg() })
    }

    /// Runs `f` with this cgroup active, so accounted allocations of `f` are charged to this cgroup.
    pub(crate) fn with_active<R>(&self, f: impl FnOnce() -> R) -> R {
        // SAFETY: By the type invariants, the cgroup lives until the previous one is active again.
        let previous = unsafe { inline::set_active_memcg(self.0) };
        let result = f();
        // SAFETY: `previous` was the active cgroup before the call above, so `previous` is valid.
        unsafe { inline::set_active_memcg(previous) };
        result
    }
}

impl Drop for Memcg {
    fn drop(&mut self) {
        // SAFETY: By the type invariants, the pointer is null or this value holds a reference, which is
        // dropped once.
        unsafe { inline::mem_cgroup_put(self.0) };
    }
}
