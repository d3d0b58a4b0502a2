// SPDX-License-Identifier: GPL-2.0

//! Locks that many wait for in line (LITE, section 7.2: the owner of a lock keeps a FIFO list).
//!
//! Whose lock it is follows from the line alone: the first has it, and if it shares, so do those behind it
//! up to the first that does not. Nobody overtakes, so nobody starves. A claim that dies with the lock to
//! itself stays in line. It stands in nobody's way, but whoever gets the lock behind it is warned, until one
//! that was, and has the lock to itself, unlocks it.

/// How far a claim has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WaiterState {
    /// It waits.
    Waiting,
    /// It has the lock.
    Granted {
        /// One before it died with the lock, and what the lock guards may be half done.
        owner_died: bool,
    },
    /// It died with the lock.
    OwnerDied,
}

/// A claim to a lock, in its line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LockWaiter {
    /// Whether it shares the lock with others that do.
    pub shared: bool,
    /// How far it has come; [`WaiterState::Waiting`] at first.
    pub state: WaiterState,
}

/// How a claim ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReleaseReason {
    /// It unlocks what it has, and knows that it has it.
    Unlocked,
    /// It waits no more. It may have the lock and not know yet.
    Cancelled,
    /// Its holder died.
    OwnerDied,
}

/// What becomes of the line when a claim ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// The claim goes.
    Waiter,
    /// The claim stays, as [`WaiterState::OwnerDied`].
    None,
    /// The claim goes, and the one that died before it.
    WaiterAndTombstone,
}

impl LockWaiter {
    /// Ends it. [`grant_next`] is to follow when it is out of the line.
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

/// Gives the lock to those in its line whose turn it is.
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
