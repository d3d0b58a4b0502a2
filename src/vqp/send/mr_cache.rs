// SPDX-License-Identifier: GPL-2.0

//! What a queue pair knows of memory at its node (KRCORE, section 4.4): whoever asks about a key for the first time
//! waits for one READ, and is trusted for as long as a lease lasts.

use crate::{
    cluster::Cluster,
    fabric::mr::table::MrTable,
    sys::deadline::{retry_until, Deadline},
};
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    prelude::*,
    sync::Mutex,
    time::{Instant, Monotonic},
};
use kite_core::{
    view::NodeInstance,
    wire::memory::{MrEntry, MR_ENTRY_SIZE, MR_LEASE_MS},
};

/// Keys that are remembered: more than a push can name.
const MAX_CACHED_MRS: usize = 64;

/// Times that a record is read before there is none: somebody may be writing it.
const READ_ATTEMPTS: u32 = 3;

/// A record, and when it was asked for.
#[derive(Clone, Copy)]
pub(in crate::vqp) struct CachedMr {
    pub(in crate::vqp) entry: MrEntry,
    pub(in crate::vqp) lease: MrLease,
}

/// When somebody began to trust a record.
#[derive(Clone, Copy)]
pub(crate) struct MrLease(Instant<Monotonic>);

impl MrLease {
    /// Whether it may still be trusted.
    pub(crate) fn is_valid(self) -> bool {
        self.0.elapsed().as_millis() < MR_LEASE_MS.into()
    }
}

/// What is known.
pub(in crate::vqp) struct MrCache(KVec<CachedMr>);

impl MrCache {
    /// Nothing.
    pub(in crate::vqp) const fn new() -> Self {
        Self(KVec::new())
    }

    /// What is known of a key, if that may still be trusted.
    pub(in crate::vqp) fn get(&self, key: u32) -> Option<CachedMr> {
        let found = self.0.iter().find(|cached| cached.entry.key == key)?;
        found.lease.is_valid().then_some(*found)
    }

    /// Takes the place of what is over, or else of the oldest, in `room` for all if there is none yet.
    fn insert(&mut self, cached: CachedMr, storage: KVec<CachedMr>) {
        if self.0.capacity() == 0 {
            self.0 = storage;
        }
        self.0
            .retain(|other| other.lease.is_valid() && other.entry.key != cached.entry.key);
        if self.0.len() >= MAX_CACHED_MRS {
            let _ = self.0.remove(0);
        }
        let _ = self.0.push_within_capacity(cached);
    }
}

/// The record of a key at a node.
///
/// # Errors
///
/// `ENOENT` if there is no such memory; `ENOMEM`; as for [`Cluster::reach`] and [`crate::fabric::Fabric::fetch_by`].
pub(in crate::vqp) fn resolve_mr(
    mr_cache: &Mutex<MrCache>,
    cluster: &Cluster,
    peer: NodeInstance,
    key: u32,
    deadline: Deadline,
) -> Result<CachedMr> {
    if let Some(cached) = mr_cache.lock().get(key) {
        return Ok(cached);
    }
    for _ in 0..READ_ATTEMPTS {
        let (lease, mut bytes) = (MrLease(Instant::now()), [0; MR_ENTRY_SIZE]);
        retry_until(deadline, || {
            // It may be reached by another name than a moment ago.
            let address = cluster.resolve_address(peer, deadline)?;
            let addr = MrTable::entry_addr(address.mr_table_addr, key);
            let fabric = &cluster.fabric;
            fabric.read_remote((peer, &address), addr, &mut bytes, deadline)
        })?;
        if let Some(entry) = MrEntry::decode(&bytes, key) {
            let cached = CachedMr { entry, lease };
            // The poller looks there, and must not wait for a cgroup that is full.
            let storage = KVec::with_capacity(MAX_CACHED_MRS, GFP_KERNEL_ACCOUNT)?;
            mr_cache.lock().insert(cached, storage);
            return Ok(cached);
        }
    }
    Err(ENOENT)
}
