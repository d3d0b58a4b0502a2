// SPDX-License-Identifier: GPL-2.0 OR MIT
//! A lock of a region, while it is held.

use std::os::fd::AsFd;

use crate::error::Result;
use crate::region::Region;
use crate::sys;

/// A lock that is held. Dropping it gives it back; if the thread panics, as if its holder had died.
#[derive(Debug)]
#[must_use = "a lock that is dropped is given back"]
pub struct LockGuard {
    region: Region,
    id: u64,
    owner_died: bool,
}

impl LockGuard {
    /// Takes the lock that `what` describes.
    pub(crate) fn acquire(region: &Region, mut args: sys::kite_lock) -> Result<Self> {
        sys::lock(region.cluster().as_fd(), &mut args)?;
        Ok(Self {
            region: region.clone(),
            id: args.lock,
            owner_died: args.owner_died != 0,
        })
    }

    /// Whether one that had the lock ended without giving it back, and what it guards may be half done.
    ///
    /// All who take it are told, until one that has it alone gives it back.
    pub fn owner_died(&self) -> bool {
        self.owner_died
    }

    /// Gives the lock back, and tells whether it was held until now.
    ///
    /// # Errors
    /// [`Error::Stale`](crate::Error::Stale) if the region was freed meanwhile,
    /// [`Error::HostDown`](crate::Error::HostDown) if its node died,
    /// [`Error::Denied`](crate::Error::Denied) if the rights were revoked,
    /// [`Error::BadHandle`](crate::Error::BadHandle) after [`Region::free`] through a clone,
    /// [`Error::NoRnic`](crate::Error::NoRnic).
    pub fn unlock(mut self) -> Result<()> {
        self.unlock_with_flags(0)
    }

    /// Gives the lock back as if its holder had died: the next is told.
    ///
    /// # Errors
    /// As of [`unlock`](Self::unlock).
    pub fn abandon(mut self) -> Result<()> {
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
            // It fails only for a lock that has ended, and then nothing is left to do.
            let _ = self.unlock_with_flags(flags);
        }
    }
}
