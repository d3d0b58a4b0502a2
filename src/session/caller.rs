// SPDX-License-Identifier: GPL-2.0

//! Who makes a request, and whose memory its pointers are to: the current process, or one, or a module, that left
//! the request in its queue.

use crate::{
    bindings,
    sys::{memory::Memory, pin::Pinned},
};
use kernel::{prelude::*, sync::Arc, task::Kuid};

/// The effective user of the current process, as the initial user namespace numbers it.
pub(super) fn uid() -> u32 {
    Kuid::current_euid().into_raw().val
}

/// Whether the current process may manage the network of this host, and so its RNICs.
///
/// # Errors
///
/// `EPERM` if not.
pub(super) fn check_admin() -> Result {
    // SAFETY: The function has no preconditions.
    let may = unsafe { bindings::capable(bindings::CAP_NET_ADMIN as c_int) };
    may.then_some(()).ok_or(EPERM)
}

/// The user that the kernel acts as.
pub(super) const ROOT: u32 = 0;

/// Memory of a process that stays.
pub(super) struct Arena {
    /// Its first byte, as the process addresses it.
    pub(super) base: usize,
    pub(super) pinned: Arc<Pinned>,
}

/// Who makes a request.
#[derive(Clone, Copy)]
pub(super) enum Caller<'a> {
    /// The current process.
    Current,
    /// A process that need not be: a user, with this memory.
    Queue { uid: u32, arena: &'a Arena },
    /// Another kernel module.
    Module,
}

impl Caller<'_> {
    /// The user.
    pub(super) fn uid(&self) -> u32 {
        match self {
            Self::Current => uid(),
            Self::Queue { uid, .. } => *uid,
            Self::Module => ROOT,
        }
    }

    /// Memory of the caller at an address of the ABI.
    ///
    /// # Errors
    ///
    /// `EFAULT` if there is no such address.
    pub(super) fn memory(&self, addr: u64) -> Result<Memory> {
        let addr = usize::try_from(addr).map_err(|_| EFAULT)?;
        Ok(match self {
            Self::Current => Memory::User(addr),
            // Before the base it is far beyond the end.
            Self::Queue { arena, .. } => {
                Memory::Pinned(arena.pinned.clone(), addr.wrapping_sub(arena.base))
            }
            // SAFETY: Modules keep what their submissions point to until these complete (`kite_submit()`).
            Self::Module => unsafe { Memory::kernel(addr as *mut u8, usize::MAX - addr) },
        })
    }
}
