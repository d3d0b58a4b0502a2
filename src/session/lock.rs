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
    lock::End,
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

/// How a lock ends that is given back with these flags.
///
/// # Errors
///
/// `EINVAL` if there are others.
pub(super) fn end(flags: u32) -> Result<End> {
    match flags {
        0 => Ok(End::Unlocked),
        bindings::KITE_UNLOCK_ABANDON => Ok(End::Died),
        _ => Err(EINVAL),
    }
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
        // If the handle is given back after this look, so is the lock.
        if let Err(error) = self
            .get(by)
            .and_then(|handle| handle.mapping.enter().map(drop))
        {
            self.give_up_lock(lock)?;
            return Err(error);
        }
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
        if wanted.waits {
            self.wait_to_go(0, wanted.deadline)?;
        } else if !self.tenant()?.goes_now(0)? {
            return Err(EAGAIN);
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
    pub(crate) fn unlock(&self, lock: u64, how: End, deadline: Deadline) -> Result {
        let lmr = self.lmr()?;
        let locked = self.locks.lock().remove(&lock).ok_or(EBADF)?;
        let handle = self.get(locked.by)?;
        lmr.unlock(&locked.ticket, how, &handle.mapping, deadline)
    }

    /// Gives a lock back of which nobody was told.
    ///
    /// # Errors
    ///
    /// `ENODEV`.
    pub(super) fn give_up_lock(&self, lock: u64) -> Result {
        let lmr = self.lmr()?;
        let locked = self.locks.lock().remove(&lock);
        if let Some(locked) = locked {
            lmr.give_up(&locked.ticket, None);
        }
        Ok(())
    }

    /// Forgets the locks that were taken by a handle, which end with it.
    pub(super) fn forget_locks(&self, by: u64) {
        let mut locks = self.locks.lock();
        let mut next = locks.cursor_front_mut();
        while let Some(at) = next {
            next = if at.current().1.by == by {
                at.remove_current().0
            } else {
                at.move_next()
            };
        }
    }
}
