// SPDX-License-Identifier: GPL-2.0

//! What a queue pair knows of memory at its node (KRCORE, section 4.4): whoever asks about a key for the first time
//! waits for one READ, and is trusted for as long as a lease lasts.

use crate::{
    cluster::Cluster,
    fabric::memory::Memories,
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

/// Keys that are remembered: more than a push can name.
const MOST: usize = 64;

/// Times that a record is read before there is none: somebody may be writing it.
const READS: u32 = 3;

/// A record, and when it was asked for.
#[derive(Clone, Copy)]
pub(super) struct Known {
    pub(super) record: Record,
    pub(super) since: Since,
}

/// When somebody began to trust a record.
#[derive(Clone, Copy)]
pub(crate) struct Since(Instant<Monotonic>);

impl Since {
    /// Whether it may still be trusted.
    pub(crate) fn lasts(self) -> bool {
        self.0.elapsed().as_millis() < LEASE_MS.into()
    }
}

/// What is known.
pub(super) struct Remotes(KVec<Known>);

impl Remotes {
    /// Nothing.
    pub(super) const fn new() -> Self {
        Self(KVec::new())
    }

    /// What is known of a key, if that may still be trusted.
    pub(super) fn get(&self, key: u32) -> Option<Known> {
        let found = self.0.iter().find(|known| known.record.key == key)?;
        found.since.lasts().then_some(*found)
    }

    /// Takes the place of what is over, or else of the oldest, in `room` for all if there is none yet.
    fn put(&mut self, known: Known, room: KVec<Known>) {
        if self.0.capacity() == 0 {
            self.0 = room;
        }
        self.0
            .retain(|other| other.since.lasts() && other.record.key != known.record.key);
        if self.0.len() >= MOST {
            let _ = self.0.remove(0);
        }
        let _ = self.0.push_within_capacity(known);
    }
}

/// The record of a key at a node.
///
/// # Errors
///
/// `ENOENT` if there is no such memory; `ENOMEM`; as for [`Cluster::reach`] and [`crate::fabric::Fabric::fetch_by`].
pub(super) fn record(
    remotes: &Mutex<Remotes>,
    cluster: &Cluster,
    life: Life,
    key: u32,
    deadline: Deadline,
) -> Result<Known> {
    if let Some(known) = remotes.lock().get(key) {
        return Ok(known);
    }
    for _ in 0..READS {
        let (since, mut bytes) = (Since(Instant::now()), [0; RECORD_SIZE]);
        settle(deadline, || {
            // It may be reached by another name than a moment ago.
            let reach = cluster.reach(life, deadline)?;
            let addr = Memories::place(reach.regions, key);
            let fabric = &cluster.fabric;
            fabric.fetch_by((life, &reach), addr, &mut bytes, deadline)
        })?;
        if let Some(record) = Record::decode(&bytes, key) {
            let known = Known { record, since };
            // The poller looks there, and must not wait for a cgroup that is full.
            let room = KVec::with_capacity(MOST, GFP_KERNEL_ACCOUNT)?;
            remotes.lock().put(known, room);
            return Ok(known);
        }
    }
    Err(ENOENT)
}
