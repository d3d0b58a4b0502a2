// SPDX-License-Identifier: GPL-2.0

//! Locks and barriers of regions, as used by a session.
//!
//! # Operation
//!
//! The home of the region grants locks (see [`crate::region::locks`]). The session records each owned lock in
//! `held_locks`, by number. Closing a handle releases the locks acquired through the handle.
//!
//! # Locking
//!
//! `Session::held_locks` (mutex) protects the table. The holder takes no other lock, does not sleep, and
//! sends no request: memory for an entry is allocated before.

use super::Session;
use crate::{
    bindings,
    region::locks::{SyncRequest, Ticket},
    sys::deadline::Deadline,
};
use kernel::{alloc::flags::GFP_KERNEL_ACCOUNT, prelude::*, rbtree::RBTreeNodeReservation};
use kite_core::{
    rights::Rights,
    sync::{
        lock::ReleaseReason,
        ticket::{AcquireKind, AcquireReply},
    },
};

/// Lock owned by the session.
pub(super) struct HeldLock {
    ticket: Ticket,
    /// Handle through which the lock was acquired.
    handle_id: u64,
}

/// Result of acquiring a lock.
pub(super) struct AcquiredLock {
    /// Number of the lock, for [`Session::unlock`].
    pub(super) lock_id: u64,
    /// `true` if the previous owner died while holding the lock.
    pub(super) owner_died: bool,
}

/// Returns the request that `struct kite_lock` describes.
///
/// # Errors
///
/// - `EINVAL`: unknown flags.
pub(super) fn parse_lock_request(
    sync_id: u64,
    flags: u32,
    deadline: Deadline,
) -> Result<SyncRequest> {
    if flags & !(bindings::KITE_LOCK_SHARED | bindings::KITE_LOCK_TRY) != 0 {
        return Err(EINVAL);
    }
    let is_shared = flags & bindings::KITE_LOCK_SHARED != 0;
    Ok(SyncRequest {
        sync_id,
        kind: AcquireKind::Lock { shared: is_shared },
        is_blocking: flags & bindings::KITE_LOCK_TRY == 0,
        deadline,
    })
}

/// Returns the release reason for the flags of `struct kite_unlock`.
///
/// # Errors
///
/// - `EINVAL`: unknown flags.
pub(super) fn parse_release_reason(flags: u32) -> Result<ReleaseReason> {
    match flags {
        0 => Ok(ReleaseReason::Unlocked),
        bindings::KITE_UNLOCK_OWNER_DIED => Ok(ReleaseReason::OwnerDied),
        _ => Err(EINVAL),
    }
}

impl Session {
    /// Acquires a lock.
    ///
    /// # Errors
    ///
    /// See `struct kite_lock` in `include/uapi/kite.h`.
    pub(super) fn lock(&self, handle_id: u64, request: &SyncRequest) -> Result<AcquiredLock> {
        let node = RBTreeNodeReservation::new(GFP_KERNEL_ACCOUNT)?;
        let (ticket, reply) = self.acquire_sync(handle_id, request)?;
        let lock_id = self.alloc_id();
        let held = HeldLock { ticket, handle_id };
        self.held_locks.lock().insert(node.into_node(lock_id, held));
        // If the handle is closed after this check, [`Self::remove_locks`] finds the entry.
        if let Err(error) = self
            .get(handle_id)
            .and_then(|handle| handle.mapping.access().map(drop))
        {
            self.cancel_lock(lock_id)?;
            return Err(error);
        }
        let owner_died = reply == AcquireReply::Granted { owner_died: true };
        Ok(AcquiredLock {
            lock_id,
            owner_died,
        })
    }

    /// Waits at a barrier of `count` participants. Returns the generation: the number of times the barrier
    /// was passed.
    ///
    /// # Errors
    ///
    /// See `struct kite_barrier` in `include/uapi/kite.h`.
    pub(super) fn barrier(
        &self,
        handle_id: u64,
        sync_id: u64,
        count: u32,
        deadline: Deadline,
    ) -> Result<u64> {
        if count == 0 {
            return Err(EINVAL);
        }
        let request = SyncRequest {
            sync_id,
            kind: AcquireKind::Barrier { count },
            is_blocking: true,
            deadline,
        };
        match self.acquire_sync(handle_id, &request)? {
            (_, AcquireReply::BarrierPassed(generation)) => Ok(generation),
            _ => Err(EIO),
        }
    }

    fn acquire_sync(
        &self,
        handle_id: u64,
        request: &SyncRequest,
    ) -> Result<(Ticket, AcquireReply)> {
        let handle = self.get(handle_id)?;
        let required = match request.kind {
            AcquireKind::Lock { shared: true } => Rights::READ,
            _ => Rights::WRITE,
        };
        if !handle.rights.contains(required) {
            return Err(EACCES);
        }
        if request.is_blocking {
            self.wait_admitted(0, request.deadline)?;
        } else if !self.tenant()?.try_admit_now(0)? {
            return Err(EAGAIN);
        }
        let memory_service = self.enter_memory_service()?;
        let result = request.run(&memory_service, &handle.mapping);
        drop(memory_service);
        result.map_err(|error| self.or_device_gone(error))
    }

    /// Releases a lock.
    ///
    /// # Errors
    ///
    /// See `struct kite_unlock` in `include/uapi/kite.h`.
    pub(super) fn unlock(&self, lock_id: u64, reason: ReleaseReason, deadline: Deadline) -> Result {
        let memory_service = self.enter_memory_service()?;
        let held = self.held_locks.lock().remove(&lock_id).ok_or(EBADF)?;
        let handle = self.get(held.handle_id)?;
        held.ticket
            .unlock(&memory_service, reason, &handle.mapping, deadline)
    }

    /// Releases a lock whose number was never returned to the caller.
    ///
    /// # Errors
    ///
    /// - `ENODEV`: the RNIC was removed.
    pub(super) fn cancel_lock(&self, lock_id: u64) -> Result {
        let memory_service = self.enter_memory_service()?;
        let held = self.held_locks.lock().remove(&lock_id);
        if let Some(held) = held {
            held.ticket.cancel(&memory_service);
        }
        Ok(())
    }

    /// Removes the locks acquired through a handle from the table. Closing the handle releases the locks
    /// themselves.
    pub(super) fn remove_locks(&self, handle_id: u64) {
        let mut locks = self.held_locks.lock();
        let mut next = locks.cursor_front_mut();
        while let Some(cursor) = next {
            next = if cursor.current().1.handle_id == handle_id {
                cursor.remove_current().0
            } else {
                cursor.move_next()
            };
        }
    }
}
