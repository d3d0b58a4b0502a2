// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Exclusive holds of a lock, each with the interval of events in the region during which it was held.

use anyhow::Result;
use kite::{Error, Region};

use super::{unless_fault, until_healed, Worker};

/// Offset of the number of events.
const EVENTS: u64 = 0;

/// Number of the lock.
const LOCK: u64 = 0;

/// Acquires and releases the lock again and again.
pub(super) struct Holder {
    region: Region,
    /// Number of the region: that of its home.
    number: usize,
    /// First and last event of each hold that ended with a successful unlock.
    holds: Vec<[u64; 2]>,
}

impl Holder {
    pub(super) fn new(region: Region, number: usize) -> Self {
        Holder {
            region,
            number,
            holds: Vec::new(),
        }
    }

    /// Holds the lock for two events. A successful unlock means that the lock was held until then.
    fn hold(&mut self) -> kite::Result<()> {
        let lock = self.region.lock(LOCK)?;
        let first = self.region.fetch_add(EVENTS, 1)?;
        let last = self.region.fetch_add(EVENTS, 1)?;
        lock.unlock()?;
        self.holds.push([first, last]);
        Ok(())
    }

    /// Holds the lock. Returns `None` if a fault prevents it.
    fn try_hold(&mut self) -> Result<Option<()>> {
        match self.hold() {
            Err(Error::LockLost) => Ok(None),
            held => unless_fault(held),
        }
    }
}

impl Worker for Holder {
    fn step(&mut self) -> Result<()> {
        self.try_hold().map(drop)
    }

    fn verify(&mut self) -> Result<u64> {
        until_healed(|| self.try_hold())?;
        for [first, last] in &self.holds {
            println!("hold {} {first} {last}", self.number);
        }
        Ok(self.holds.len() as u64)
    }
}
