// SPDX-License-Identifier: GPL-2.0 OR MIT
//! A lock of a region, while it is held.

use std::os::fd::AsFd;

use crate::error::Result;
use crate::region::Region;
use crate::sys;

/// A lock that is held. Dropping it gives it back; if the thread panics, as if its holder had died.
#[derive(Debug)]
#[must_use = "a lock that is dropped is given back"]
pub struct Lock {
    region: Region,
    number: u64,
    holder_died: bool,
}

impl Lock {
    /// Takes the lock that `what` describes.
    pub(crate) fn take(region: &Region, mut what: sys::kite_lock) -> Result<Self> {
        sys::lock(region.cluster().as_fd(), &mut what)?;
        Ok(Self {
            region: region.clone(),
            number: what.lock,
            holder_died: what.died != 0,
        })
    }

    /// Whether one that had the lock ended without giving it back, and what it guards may be half done.
    ///
    /// All who take it are told, until one that has it alone gives it back.
    pub fn holder_died(&self) -> bool {
        self.holder_died
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
        self.give_back(0)
    }

    /// Gives the lock back as if its holder had died: the next is told.
    ///
    /// # Errors
    /// As of [`unlock`](Self::unlock).
    pub fn abandon(mut self) -> Result<()> {
        self.give_back(sys::KITE_UNLOCK_ABANDON)
    }

    fn give_back(&mut self, flags: u32) -> Result<()> {
        let mut what = sys::kite_unlock {
            lock: std::mem::take(&mut self.number),
            flags,
            ..Default::default()
        };
        sys::unlock(self.region.cluster().as_fd(), &mut what)
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        if self.number != 0 && self.region.cluster().is_own() {
            let flags = match std::thread::panicking() {
                true => sys::KITE_UNLOCK_ABANDON,
                false => 0,
            };
            // It fails only for a lock that has ended, and then nothing is left to do.
            let _ = self.give_back(flags);
        }
    }
}
