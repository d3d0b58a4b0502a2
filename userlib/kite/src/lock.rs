// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Locks and barriers of a region.

use std::os::fd::AsFd;

use crate::error::Result;
use crate::region::Region;
use crate::sys;

/// A lock of a region, held by this session. Dropping it releases the lock. If the thread panics, the lock is
/// released as if its owner had died.
///
/// # Examples
/// ```no_run
/// # let region = kite::Cluster::open()?.map("table", kite::Rights::WRITE)?;
/// let lock = region.lock(0)?;
/// if lock.owner_died() {
///     // Repair what the lock protects.
/// }
/// region.write_at(b"row", 0)?;
/// lock.unlock()?;
/// # Ok::<(), kite::Error>(())
/// ```
#[derive(Debug)]
#[must_use = "dropping the guard releases the lock"]
pub struct LockGuard {
    region: Region,
    id: u64,
    owner_died: bool,
}

impl LockGuard {
    /// Returns `true` if an owner ended without unlocking, so that the protected data may be inconsistent. All later
    /// owners see `true` until an exclusive owner unlocks.
    pub fn owner_died(&self) -> bool {
        self.owner_died
    }

    /// Releases the lock. Success means that the lock was held until now.
    ///
    /// # Errors
    /// The lock has ended also after an error.
    /// - [`Error::BadHandle`](crate::Error::BadHandle): the region was freed through a clone.
    /// - [`Error::Denied`](crate::Error::Denied): the rights were revoked.
    /// - [`Error::HostDown`](crate::Error::HostDown): the home of the region is down.
    /// - [`Error::LockLost`](crate::Error::LockLost): the home was unreachable since the lock was acquired, and has
    ///   released the lock as if its owner had died.
    /// - [`Error::NoRnic`](crate::Error::NoRnic): the RNIC was removed.
    /// - [`Error::Stale`](crate::Error::Stale): the region was freed.
    pub fn unlock(mut self) -> Result<()> {
        self.unlock_with_flags(0)
    }

    /// Releases the lock as if its owner had died: [`owner_died`](Self::owner_died) is `true` for the next owner.
    ///
    /// # Errors
    /// See [`unlock`](Self::unlock).
    pub fn unlock_owner_died(mut self) -> Result<()> {
        self.unlock_with_flags(sys::KITE_UNLOCK_OWNER_DIED)
    }

    fn unlock_with_flags(&mut self, flags: u32) -> Result<()> {
        let mut args = sys::kite_unlock {
            lock: std::mem::take(&mut self.id),
            flags,
            ..Default::default()
        };
        sys::unlock(self.region.cluster().as_fd(), &mut args)
    }
}

impl Drop for LockGuard {
    fn drop(&mut self) {
        if self.id != 0 && self.region.cluster().is_owner_process() {
            let flags = match std::thread::panicking() {
                true => sys::KITE_UNLOCK_OWNER_DIED,
                false => 0,
            };
            // An error means that the lock has ended already.
            let _ = self.unlock_with_flags(flags);
        }
    }
}

impl Region {
    /// Acquires lock `number` of the region exclusively. A region has a lock for each number. Waiters are served in
    /// FIFO order. The owner sees all writes of earlier owners. Needs [`Rights::WRITE`](crate::Rights::WRITE).
    ///
    /// Locks are advisory. A lock ends also with its session and with its node.
    ///
    /// # Errors
    /// - [`Error::Interrupted`](crate::Error::Interrupted): a signal handler ran.
    /// - [`Error::OutOfMemory`](crate::Error::OutOfMemory): no memory, or the region has
    ///   [`WAITERS_MAX`](crate::WAITERS_MAX) owners and waiters.
    /// - For the others see [`read_at`](Self::read_at).
    pub fn lock(&self, number: u64) -> Result<LockGuard> {
        self.acquire_lock(number, 0)
    }

    /// Acquires a lock in shared mode. Needs [`Rights::READ`](crate::Rights::READ) only. See [`lock`](Self::lock).
    ///
    /// # Errors
    /// See [`lock`](Self::lock).
    pub fn lock_shared(&self, number: u64) -> Result<LockGuard> {
        self.acquire_lock(number, sys::KITE_LOCK_SHARED)
    }

    /// Acquires a lock exclusively without waiting. See [`lock`](Self::lock).
    ///
    /// # Errors
    /// - [`Error::WouldBlock`](crate::Error::WouldBlock): the lock has an owner or waiters.
    /// - For the others see [`lock`](Self::lock).
    pub fn try_lock(&self, number: u64) -> Result<LockGuard> {
        self.acquire_lock(number, sys::KITE_LOCK_TRY)
    }

    /// Acquires a lock in shared mode without waiting. See [`lock_shared`](Self::lock_shared).
    ///
    /// # Errors
    /// See [`try_lock`](Self::try_lock).
    pub fn try_lock_shared(&self, number: u64) -> Result<LockGuard> {
        self.acquire_lock(number, sys::KITE_LOCK_SHARED | sys::KITE_LOCK_TRY)
    }

    /// Waits until `count` participants have arrived at barrier `number`. A region has a barrier for each number,
    /// independent of its locks. Returns the number of completed rounds, this one included. Needs
    /// [`Rights::WRITE`](crate::Rights::WRITE).
    ///
    /// # Errors
    /// - [`Error::Invalid`](crate::Error::Invalid): `count` is 0 or differs from that of waiting participants.
    /// - For the others see [`lock`](Self::lock).
    ///
    /// After [`Error::Interrupted`](crate::Error::Interrupted), [`Error::Io`](crate::Error::Io) and
    /// [`Error::TimedOut`](crate::Error::TimedOut) the round may nevertheless have completed. The next result is then
    /// higher by two.
    ///
    /// # Examples
    /// ```no_run
    /// # let region = kite::Cluster::open()?.map("table", kite::Rights::WRITE)?;
    /// let round = region.barrier(0, 4)?;
    /// println!("round {round} of 4 participants is complete");
    /// # Ok::<(), kite::Error>(())
    /// ```
    pub fn barrier(&self, number: u64, count: u32) -> Result<u64> {
        let mut barrier = sys::kite_barrier {
            handle: self.open_handle()?,
            number,
            count,
            timeout_ms: self.timeout_ms(),
            ..Default::default()
        };
        sys::barrier(self.cluster().as_fd(), &mut barrier)?;
        Ok(barrier.generation)
    }

    fn acquire_lock(&self, number: u64, flags: u32) -> Result<LockGuard> {
        let mut args = sys::kite_lock {
            handle: self.open_handle()?,
            number,
            flags,
            timeout_ms: self.timeout_ms(),
            ..Default::default()
        };
        sys::lock(self.cluster().as_fd(), &mut args)?;
        Ok(LockGuard {
            region: self.clone(),
            id: args.lock,
            owner_died: args.owner_died != 0,
        })
    }
}
