// SPDX-License-Identifier: GPL-2.0

//! Origin of a request, and the memory that its pointers refer to.
//!
//! A request comes from the current process, or from an I/O queue of a process or of a kernel module.

use super::user_ns::UserNamespace;
use crate::{
    bindings,
    sys::{buffer::Buffer, pin::PinnedPages},
};
use kernel::{
    prelude::*,
    sync::{aref::ARef, Arc},
    task::Kuid,
};
use kite_core::rights::acting_uid;

/// Returns the effective UID of the current process, in the initial user namespace.
pub(super) fn current_euid() -> u32 {
    Kuid::current_euid().into_raw().val
}

/// Returns the UID that determines the rights of the current process, in the initial user namespace. Without
/// `CAP_SYS_ADMIN` in that namespace, root acts as [`kite_core::rights::SQUASHED_ROOT_UID`].
pub(super) fn current_uid() -> u32 {
    acting_uid(current_euid(), has_sys_admin)
}

/// Returns `true` if the current process has `CAP_SYS_ADMIN` in the initial user namespace. A missing
/// capability is no failed request, so the check is not audited.
fn has_sys_admin() -> bool {
    let initial_ns = &raw mut bindings::init_user_ns;
    // SAFETY: The initial user namespace always exists.
    unsafe { bindings::ns_capable_noaudit(initial_ns, bindings::CAP_SYS_ADMIN as c_int) }
}

/// Checks that the current process has `CAP_NET_ADMIN`, and so may manage the RNICs of this host.
///
/// # Errors
///
/// - `EPERM`: the process lacks the capability.
pub(super) fn check_net_admin() -> Result {
    // SAFETY: `capable` has no preconditions.
    let is_capable = unsafe { bindings::capable(bindings::CAP_NET_ADMIN as c_int) };
    is_capable.then_some(()).ok_or(EPERM)
}

/// UID of requests from the kernel.
pub(super) const ROOT_UID: u32 = 0;

/// Pinned memory of a process, used by the requests of an I/O queue.
pub(super) struct QueueMemory {
    /// User address of the first byte.
    pub(super) user_addr: usize,
    pub(super) pinned: Arc<PinnedPages>,
}

/// Process that created an I/O queue.
pub(super) struct QueueProcess {
    pub(super) uid: u32,
    /// Namespace in which the process names users.
    user_ns: ARef<UserNamespace>,
    pub(super) memory: QueueMemory,
}

impl QueueProcess {
    /// Returns the current process, with `memory` for its requests.
    pub(super) fn current(memory: QueueMemory) -> Self {
        Self {
            uid: current_uid(),
            user_ns: UserNamespace::with_current(|ns| ns.into()),
            memory,
        }
    }
}

/// Origin of a request.
#[derive(Clone, Copy)]
pub(super) enum Requester<'a> {
    /// Current process.
    CurrentProcess,
    /// Owner of an I/O queue, which need not be the current process.
    QueueOwner(&'a QueueProcess),
    /// Another kernel module.
    KernelModule,
}

impl Requester<'_> {
    /// Returns the UID.
    pub(super) fn uid(&self) -> u32 {
        match self {
            Self::CurrentProcess => current_uid(),
            Self::QueueOwner(process) => process.uid,
            Self::KernelModule => ROOT_UID,
        }
    }

    /// Returns the UID in the initial namespace of the user that the requester names `uid`.
    ///
    /// # Errors
    ///
    /// - `EINVAL`: the user namespace of the requester has no such user.
    pub(super) fn to_initial_uid(self, uid: u32) -> Result<u32> {
        match self {
            Self::CurrentProcess => UserNamespace::with_current(|ns| ns.to_initial_uid(uid)),
            Self::QueueOwner(process) => process.user_ns.to_initial_uid(uid),
            Self::KernelModule => Ok(uid),
        }
    }

    /// Returns the UID by which the requester names the user with `initial_uid` in the initial namespace. See
    /// [`UserNamespace::to_local_uid`].
    pub(super) fn to_local_uid(self, initial_uid: u32) -> u32 {
        match self {
            Self::CurrentProcess => UserNamespace::with_current(|ns| ns.to_local_uid(initial_uid)),
            Self::QueueOwner(process) => process.user_ns.to_local_uid(initial_uid),
            Self::KernelModule => initial_uid,
        }
    }

    /// Returns the buffer of `len` bytes at an address of the ABI. Accesses to the memory of a process check
    /// each address themselves, so `len` limits only the buffers of kernel modules.
    ///
    /// # Errors
    ///
    /// - `EFAULT`: a value does not fit into an address.
    pub(super) fn buffer_at(&self, addr: u64, len: u64) -> Result<Buffer> {
        let addr = usize::try_from(addr).map_err(|_| EFAULT)?;
        Ok(match self {
            Self::CurrentProcess => Buffer::User(addr),
            // An address below the base wraps around to an offset far beyond the end, which every access
            // rejects.
            Self::QueueOwner(QueueProcess { memory, .. }) => {
                Buffer::Pinned(memory.pinned.clone(), addr.wrapping_sub(memory.user_addr))
            }
            Self::KernelModule => {
                let len = usize::try_from(len).map_err(|_| EFAULT)?;
                // SAFETY: By the contract of `include/kite.h`, modules keep the memory that a request points
                // to valid for its length until the request completes.
                unsafe { Buffer::from_kernel(addr as *mut u8, len) }
            }
        })
    }
}
