// SPDX-License-Identifier: GPL-2.0

//! What a queue pair knows of memory at its node (KRCORE, section 4.4): whoever asks about a key for the first time
//! waits for one READ, and is trusted for as long as a lease lasts.

use crate::{
    cluster::Cluster,
    fabric::{memory::Memories, peer::Reach},
    sys::deadline::{settle, Deadline},
};
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    prelude::*,
    sync::Mutex,
    time::{Instant, Monotonic},
};
use kite_core::{
    view::Life,
    wire::memory::{Record, LEASE_MS, RECORD_SIZE},
};

/// Keys that are remembered.
const MOST: usize = 16;

/// Times that a record is read before there is none: somebody may be writing it.
const READS: u32 = 3;

/// A record, and when it was asked for.
struct Known {
    record: Record,
    since: Instant<Monotonic>,
}

impl Known {
    fn lasts(&self) -> bool {
        self.since.elapsed().as_millis() < LEASE_MS.into()
    }
}

/// What is known.
pub(super) struct Remotes(KVec<Known>);

impl Remotes {
    /// Nothing.
    pub(super) const fn new() -> Self {
        Self(KVec::new())
    }

    fn get(&self, key: u32) -> Option<Record> {
        let mut known = self.0.iter().filter(|known| known.lasts());
        let found = known.find(|known| known.record.key == key)?;
        Some(found.record)
    }

    /// Takes the place of what is over, or else of the oldest.
    fn put(&mut self, known: Known) -> Result {
        self.0
            .retain(|other| other.lasts() && other.record.key != known.record.key);
        if self.0.len() >= MOST {
            let _ = self.0.remove(0);
        }
        Ok(self.0.push(known, GFP_KERNEL_ACCOUNT)?)
    }
}

/// The record of a key at a node.
///
/// # Errors
///
/// `ENOENT` if there is no such memory; `ENOMEM`; as for [`crate::fabric::Fabric::fetch_by`].
pub(super) fn record(
    remotes: &Mutex<Remotes>,
    cluster: &Cluster,
    peer: (Life, &Reach),
    key: u32,
    deadline: Deadline,
) -> Result<Record> {
    if let Some(record) = remotes.lock().get(key) {
        return Ok(record);
    }
    let addr = Memories::place(peer.1.regions, key);
    for _ in 0..READS {
        let (since, mut bytes) = (Instant::now(), [0; RECORD_SIZE]);
        let fetch = || cluster.fabric.fetch_by(peer, addr, &mut bytes, deadline);
        settle(deadline, fetch)?;
        if let Some(record) = Record::decode(&bytes, key) {
            remotes.lock().put(Known { record, since })?;
            return Ok(record);
        }
    }
    Err(ENOENT)
}
