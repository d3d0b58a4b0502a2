// SPDX-License-Identifier: GPL-2.0

//! Locks and barriers of a session's regions.

use super::Session;
use crate::{
    bindings,
    lmr::tickets::{Ticket, Wanted},
    sys::deadline::Deadline,
};
use kernel::{alloc::flags::GFP_KERNEL_ACCOUNT, prelude::*, rbtree::RBTreeNodeReservation};
use kite_core::{
    rights::Rights,
    ticket::{Said, Wish},
};

/// A lock that the session has.
pub(super) struct Locked {
    ticket: Ticket,
    /// The handle by which it took it.
    by: u64,
}

/// What was taken of a region's locks.
pub(crate) struct Taken {
    /// The number to unlock it by.
    pub(crate) lock: u64,
    /// Whether another died with it.
    pub(crate) died: bool,
}

/// A lock as `struct kite_lock` describes it.
///
/// # Errors
///
/// `EINVAL` if there are other flags.
pub(super) fn wanted(number: u64, flags: u32, deadline: Deadline) -> Result<Wanted> {
    if flags & !(bindings::KITE_LOCK_SHARED | bindings::KITE_LOCK_TRY) != 0 {
        return Err(EINVAL);
    }
    let shared = flags & bindings::KITE_LOCK_SHARED != 0;
    Ok(Wanted {
        number,
        wish: Wish::Lock { shared },
        waits: flags & bindings::KITE_LOCK_TRY == 0,
        deadline,
    })
}

impl Session {
    /// Takes a lock.
    ///
    /// # Errors
    ///
    /// As `struct kite_lock` in `include/uapi/kite.h` says.
    pub(crate) fn lock(&self, by: u64, wanted: &Wanted) -> Result<Taken> {
        let memory = RBTreeNodeReservation::new(GFP_KERNEL_ACCOUNT)?;
        let (ticket, said) = self.line_up(by, wanted)?;
        let lock = self.next_number();
        let locked = Locked { ticket, by };
        self.locks.lock().insert(memory.into_node(lock, locked));
        let died = said == Said::Locked { warned: true };
        Ok(Taken { lock, died })
    }

    /// Passes a barrier as one of `count`. Returns how often it was passed.
    ///
    /// # Errors
    ///
    /// As `struct kite_barrier` in `include/uapi/kite.h` says.
    pub(crate) fn barrier(
        &self,
        by: u64,
        number: u64,
        count: u32,
        deadline: Deadline,
    ) -> Result<u64> {
        if count == 0 {
            return Err(EINVAL);
        }
        let wanted = Wanted {
            number,
            wish: Wish::Barrier { count },
            waits: true,
            deadline,
        };
        match self.line_up(by, &wanted)? {
            (_, Said::Passed(generation)) => Ok(generation),
            _ => Err(EIO),
        }
    }

    fn line_up(&self, by: u64, wanted: &Wanted) -> Result<(Ticket, Said)> {
        let handle = self.get(by)?;
        let needed = match wanted.wish {
            Wish::Lock { shared: true } => Rights::READ,
            _ => Rights::WRITE,
        };
        if !handle.rights.contains(needed) {
            return Err(EACCES);
        }
        let got = self.lmr()?.line_up(&handle.mapping, wanted);
        // If the RNIC went, that is the reason.
        got.or_else(|error| self.lmr().and(Err(error)))
    }

    /// Gives a lock back.
    ///
    /// # Errors
    ///
    /// As `struct kite_unlock` in `include/uapi/kite.h` says.
    pub(crate) fn unlock(&self, lock: u64, deadline: Deadline) -> Result {
        let lmr = self.lmr()?;
        let locked = self.locks.lock().remove(&lock).ok_or(EBADF)?;
        lmr.unlock(&locked.ticket, deadline)
    }

    /// Forgets the locks that were taken by a handle, which end with it.
    pub(super) fn forget_locks(&self, by: u64) {
        let next = || {
            let locks = self.locks.lock();
            let mut own = locks.iter().filter(|(_, locked)| locked.by == by);
            own.next().map(|(lock, _)| *lock)
        };
        while let Some(lock) = next() {
            self.locks.lock().remove(&lock);
        }
    }
}
