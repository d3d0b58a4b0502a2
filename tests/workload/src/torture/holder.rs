// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Exclusive holds of a lock, each with the interval of events in the region during which it was held.

use std::time::{Duration, Instant};

use anyhow::Result;
use kite::{Cluster, Error, LockGuard, Region};

use super::{unless_fault, until_healed, Worker, PACE, SECOND_NODE};

/// Offset of the number of events, behind the records of the writers. Its memory is not at the home of the lock, so two
/// nodes fence an owner.
const EVENTS: u64 = SECOND_NODE + (1 << 20);

/// Number of the lock.
const LOCK: u64 = 0;

/// Minimum duration of a hold. Most faults of a node interrupt a hold.
const HOLD: Duration = Duration::from_millis(300);

/// Acquires and releases the lock again and again.
pub(super) struct Holder {
    cluster: Cluster,
    region: Region,
    /// Number of the region: that of its home.
    number: usize,
    /// First and last event of each hold.
    holds: Vec<[u64; 2]>,
    /// Number of holds that ended with a successful unlock.
    unlocked: u64,
}

impl Holder {
    pub(super) fn new(cluster: Cluster, region: Region, number: usize) -> Self {
        Holder {
            cluster,
            region,
            number,
            holds: Vec::new(),
            unlocked: 0,
        }
    }

    /// Returns the admission of the connection to the home.
    fn admission(&self) -> Result<u64> {
        let view = self.cluster.view()?;
        let is_end = |node| node == view.local_node || node as usize == self.number;
        let ends = view.members.iter().filter(|member| is_end(member.node));
        Ok(ends.map(|end| end.admitted_epoch).max().unwrap_or(0))
    }

    /// Acquires the lock, and holds it for some events. Returns `None` if the lock was not held until the unlock.
    fn hold(&mut self) -> Result<Option<()>> {
        let admission = self.admission()?;
        let Some(lock) = unless_fault(self.region.lock(LOCK))? else {
            return Ok(None);
        };
        self.add_events(admission)?;
        self.unlock(lock)
    }

    /// Adds events while the lock is held. Repeats an event that a fault prevents, as an owner does that is not aware
    /// of the fault, until the connection to the home has another admission. The lock is lost then.
    fn add_events(&mut self, admission: u64) -> Result<()> {
        let mut hold = None;
        let start = Instant::now();
        loop {
            let event = unless_fault(self.region.fetch_add(EVENTS, 1))?;
            if self.admission()? != admission {
                break;
            }
            if let Some(event) = event {
                let [first, _] = hold.unwrap_or([event; 2]);
                hold = Some([first, event]);
                if start.elapsed() > HOLD {
                    break;
                }
            }
            std::thread::sleep(PACE);
        }
        self.holds.extend(hold);
        Ok(())
    }

    fn unlock(&mut self, lock: LockGuard) -> Result<Option<()>> {
        let unlocked = match lock.unlock() {
            Err(Error::LockLost) => None,
            unlocked => unless_fault(unlocked)?,
        };
        self.unlocked += u64::from(unlocked.is_some());
        Ok(unlocked)
    }
}

impl Worker for Holder {
    fn step(&mut self) -> Result<()> {
        self.hold().map(drop)
    }

    fn verify(&mut self) -> Result<u64> {
        until_healed(|| self.hold())?;
        for [first, last] in &self.holds {
            println!("hold {} {first} {last}", self.number);
        }
        Ok(self.unlocked)
    }
}
