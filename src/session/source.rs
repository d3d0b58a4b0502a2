// SPDX-License-Identifier: GPL-2.0

//! Who makes a request, and whose memory its pointers are to: the current process, or one, or a module, that left
//! the request in its queue.

use crate::{
    bindings,
    sys::{buffer::Buffer, pin::PinnedPages},
};
use kernel::{prelude::*, sync::Arc, task::Kuid};

/// The effective user of the current process, as the initial user namespace numbers it.
pub(super) fn current_euid() -> u32 {
    Kuid::current_euid().into_raw().val
}

/// Whether the current process may manage the network of this host, and so its RNICs.
///
/// # Errors
///
/// `EPERM` if not.
pub(super) fn check_net_admin() -> Result {
    // SAFETY: The function has no preconditions.
    let is_capable = unsafe { bindings::capable(bindings::CAP_NET_ADMIN as c_int) };
    is_capable.then_some(()).ok_or(EPERM)
}

/// The user that the kernel acts as.
pub(super) const ROOT_UID: u32 = 0;

/// Memory of a process that stays.
pub(super) struct QueueMemory {
    /// Its first byte, as the process addresses it.
    pub(super) user_addr: usize,
    pub(super) pinned: Arc<PinnedPages>,
}

/// Who makes a request.
#[derive(Clone, Copy)]
pub(super) enum Requester<'a> {
    /// The current process.
    CurrentProcess,
    /// A process that need not be: a user, with this memory.
    QueueOwner { uid: u32, memory: &'a QueueMemory },
    /// Another kernel module.
    KernelModule,
}

impl Requester<'_> {
    /// The user.
    pub(super) fn uid(&self) -> u32 {
        match self {
            Self::CurrentProcess => current_euid(),
            Self::QueueOwner { uid, .. } => *uid,
            Self::KernelModule => ROOT_UID,
        }
    }

    /// Memory of the caller at an address of the ABI.
    ///
    /// # Errors
    ///
    /// `EFAULT` if there is no such address.
    pub(super) fn buffer_at(&self, addr: u64) -> Result<Buffer> {
        let addr = usize::try_from(addr).map_err(|_| EFAULT)?;
        Ok(match self {
            Self::CurrentProcess => Buffer::User(addr),
            // Before the base it is far beyond the end.
            Self::QueueOwner { memory, .. } => {
                Buffer::Pinned(memory.pinned.clone(), addr.wrapping_sub(memory.user_addr))
            }
            // SAFETY: Modules keep what their submissions point to until these complete (`kite_submit()`).
            Self::KernelModule => unsafe {
                Buffer::from_kernel(addr as *mut u8, usize::MAX - addr)
            },
        })
    }
}
