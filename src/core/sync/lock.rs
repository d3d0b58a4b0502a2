// SPDX-License-Identifier: GPL-2.0

//! FIFO wait queue of a lock (LITE, section 7.2: the owner of a lock keeps a FIFO list).
//!
//! # Operation
//!
//! The queue alone determines the holders. The first waiter holds the lock. If the first waiter is shared,
//! the shared waiters directly behind also hold the lock, up to the first exclusive waiter. No waiter
//! overtakes another, so no waiter starves.
//!
//! # Recovery
//!
//! An exclusive holder that dies stays in the queue as a tombstone, [`WaiterState::OwnerDied`]. The tombstone
//! blocks no waiter. Waiters that are granted the lock behind the tombstone receive `owner_died`. When an
//! exclusive one of these unlocks, the tombstone is removed.

/// State of a waiter in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WaiterState {
    /// The waiter waits for the lock.
    Waiting,
    /// The waiter holds the lock.
    Granted {
        /// An earlier exclusive holder died: the data that the lock protects may be inconsistent.
        owner_died: bool,
    },
    /// Tombstone: the waiter died while it held the lock exclusively.
    OwnerDied,
}

/// Waiter or holder of a lock, in its wait queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LockWaiter {
    /// `true` if the waiter shares the lock with other shared waiters.
    pub shared: bool,
    /// State of the waiter, initially [`WaiterState::Waiting`].
    pub state: WaiterState,
}

/// Reason for which a waiter leaves the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReleaseReason {
    /// The holder unlocks. It has received the grant.
    Unlocked,
    /// The waiter cancels. It may hold the lock without having received the grant yet.
    Canceled,
    /// The holder or waiter died.
    OwnerDied,
}

/// Entries that the caller must remove from the queue after a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// Remove the waiter.
    Waiter,
    /// Remove nothing: the waiter stays as [`WaiterState::OwnerDied`].
    None,
    /// Remove the waiter and the tombstone before the waiter.
    WaiterAndTombstone,
}

impl LockWaiter {
    /// Releases the lock, or the place in the queue.
    ///
    /// The caller must remove the returned entries from the queue and then call [`grant_next`].
    #[must_use]
    pub fn release(&mut self, reason: ReleaseReason) -> Removal {
        match (self.state, reason) {
            (WaiterState::Granted { owner_died: true }, ReleaseReason::Unlocked)
                if !self.shared =>
            {
                Removal::WaiterAndTombstone
            }
            (WaiterState::Granted { owner_died: false }, ReleaseReason::OwnerDied)
                if !self.shared =>
            {
                self.state = WaiterState::OwnerDied;
                Removal::None
            }
            _ => Removal::Waiter,
        }
    }
}

/// Grants the lock to the waiters at the front of the queue that may hold the lock now.
pub fn grant_next<'a>(queue: impl Iterator<Item = &'a mut LockWaiter>) {
    let (mut shared_grant, mut owner_died) = (None, false);
    for waiter in queue {
        if waiter.state == WaiterState::OwnerDied {
            owner_died = true;
            continue;
        }
        let fits = shared_grant.is_none_or(|sharing| sharing && waiter.shared);
        if !fits {
            return;
        }
        shared_grant = Some(waiter.shared);
        if waiter.state == WaiterState::Waiting {
            waiter.state = WaiterState::Granted { owner_died };
        }
    }
}

#[cfg(test)]
mod tests;
