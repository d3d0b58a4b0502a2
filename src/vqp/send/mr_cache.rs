// SPDX-License-Identifier: GPL-2.0

//! Cache of the MR entries of a node (KRCORE, section 4.4).
//!
//! # Operation
//!
//! The first use of a key needs one READ of the entry. The entry is then valid for [`MR_LEASE_MS`].
//!
//! # Locking
//!
//! `MrCache::entries` protects the entries. The lock is not held during a READ, and its holder does not
//! sleep.

use crate::{
    cluster::Cluster,
    fabric::{mr::table::MrTable, send::one_shot::OneShot},
    sys::{
        deadline::{retry_until, Deadline},
        thread::pi_mutex::{new_pi_mutex, PiMutex},
    },
};
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    prelude::*,
    time::{Instant, Monotonic},
};
use kite_core::{
    view::NodeInstance,
    wire::memory::{MrEntry, MR_ENTRY_SIZE, MR_LEASE_MS},
};

/// Maximum number of cached keys, more than one push can name.
const MAX_CACHED_MRS: usize = 64;

/// Number of READs of an entry until the key counts as absent. The owner may be writing the entry during a
/// READ.
const READ_ATTEMPTS: u32 = 3;

/// Entry of a remote MR, and its lease.
#[derive(Clone, Copy)]
pub(in crate::vqp) struct CachedMr {
    pub(in crate::vqp) entry: MrEntry,
    pub(in crate::vqp) lease: MrLease,
}

/// Start of a lease: the time before the READ of the entry.
#[derive(Clone, Copy)]
pub(crate) struct MrLease(Instant<Monotonic>);

impl MrLease {
    /// Returns `true` if the lease has not expired.
    pub(crate) fn is_valid(self) -> bool {
        self.0.elapsed().as_millis() < MR_LEASE_MS.into()
    }
}

/// Cached entries, at most [`MAX_CACHED_MRS`].
struct CachedMrs(KVec<CachedMr>);

impl CachedMrs {
    /// Returns the entry of a key, if it is cached and its lease is valid.
    fn get(&self, key: u32) -> Option<CachedMr> {
        let found = self.0.iter().find(|cached| cached.entry.key == key)?;
        found.lease.is_valid().then_some(*found)
    }

    /// Adds an entry. Expired entries are removed, else the oldest is. `storage` becomes the buffer of an
    /// empty cache.
    fn insert(&mut self, cached: CachedMr, storage: KVec<CachedMr>) {
        if self.0.capacity() == 0 {
            self.0 = storage;
        }
        self.0
            .retain(|other| other.lease.is_valid() && other.entry.key != cached.entry.key);
        if self.0.len() >= MAX_CACHED_MRS {
            // Cannot fail: the cache is not empty.
            let _ = self.0.remove(0);
        }
        // Cannot fail: the capacity is `MAX_CACHED_MRS`.
        let _ = self.0.push_within_capacity(cached);
    }
}

/// Cache of the MR entries of one node.
#[pin_data]
pub(in crate::vqp) struct MrCache {
    peer: NodeInstance,
    #[pin]
    entries: PiMutex<CachedMrs>,
}

impl MrCache {
    /// Creates an empty cache, without allocating.
    pub(in crate::vqp) fn new(peer: NodeInstance) -> impl PinInit<Self> {
        pin_init!(Self {
            peer,
            entries <- new_pi_mutex!(CachedMrs(KVec::new()), "MrCache::entries"),
        })
    }

    /// Returns the entry of a key, if it is cached and its lease is valid.
    pub(in crate::vqp) fn get(&self, key: u32) -> Option<CachedMr> {
        self.entries.lock().get(key)
    }

    /// Returns the entry of a key, from the cache or from the node.
    ///
    /// # Errors
    ///
    /// - `ENOENT`: the key does not exist.
    /// - `ENOMEM`: out of memory.
    /// - See also [`Cluster::resolve_address`] and [`OneShot::read`].
    pub(in crate::vqp) fn resolve(
        &self,
        cluster: &Cluster,
        key: u32,
        deadline: Deadline,
    ) -> Result<CachedMr> {
        if let Some(cached) = self.get(key) {
            return Ok(cached);
        }
        for _ in 0..READ_ATTEMPTS {
            let (lease, mut bytes) = (MrLease(Instant::now()), [0; MR_ENTRY_SIZE]);
            retry_until(deadline, || {
                // Look up the address in each attempt, since it can change.
                let address = cluster.resolve_address(self.peer, deadline)?;
                let addr = MrTable::entry_addr(address.mr_table_addr, key);
                OneShot::new(&cluster.fabric, (self.peer, &address), deadline)
                    .read(addr, &mut bytes)
            })?;
            if let Some(entry) = MrEntry::decode(&bytes, key) {
                let cached = CachedMr { entry, lease };
                // Allocated outside the lock: the poller takes the lock, and must not wait for a cgroup that
                // has reached its limit.
                let storage = KVec::with_capacity(MAX_CACHED_MRS, GFP_KERNEL_ACCOUNT)?;
                self.entries.lock().insert(cached, storage);
                return Ok(cached);
            }
        }
        Err(ENOENT)
    }
}
