// SPDX-License-Identifier: GPL-2.0

//! Cache of mapped rendezvous buffers at the server's node.
//!
//! # Operation
//!
//! Mapping a buffer needs a request to the caller's node, and so does unmapping. Each takes as long as the
//! call itself. So a mapping is kept for the next call through the same channel.
//!
//! # Locking
//!
//! `mappings` (mutex) protects the list and nests with no other lock.

use crate::region::map::Mapping;
use kernel::{
    new_mutex,
    prelude::*,
    sync::{Arc, Mutex},
};

/// Maximum cached mappings per channel.
const MAX_CACHED_MAPPINGS: usize = 64;

/// Cached mappings of a channel. `None` once the channel is closed.
#[pin_data]
pub(crate) struct MappingCache {
    #[pin]
    mappings: Mutex<Option<KVec<Arc<Mapping>>>>,
}

impl MappingCache {
    /// Creates an empty cache.
    pub(in crate::rpc) fn new() -> impl PinInit<Self> {
        pin_init!(Self { mappings <- new_mutex!(Some(KVec::new()), "MappingCache::mappings") })
    }

    /// Takes the mapping of a region out of the cache. The caller then is its only user.
    pub(crate) fn remove(&self, region: u64) -> Option<Arc<Mapping>> {
        let mut mappings = self.mappings.lock();
        let mappings = mappings.as_mut().get_mut().as_mut()?;
        let index = mappings
            .iter()
            .position(|mapping| mapping.region == region)?;
        mappings.remove(index).ok()
    }

    /// Caches a mapping that no call uses. Returns a mapping to unmap, if any: the evicted one, or `mapping`
    /// if the cache is closed or memory is short.
    pub(crate) fn insert(&self, mapping: Arc<Mapping>) -> Option<Arc<Mapping>> {
        let mut mappings = self.mappings.lock();
        let Some(mappings) = mappings.as_mut().get_mut().as_mut() else {
            return Some(mapping);
        };
        // Evict a mapping whose region the caller has freed, if any.
        let stale = mappings.iter().position(|cached| cached.access().is_err());
        let full = mappings.len() >= MAX_CACHED_MAPPINGS;
        let evicted = (stale.is_some() || full).then(|| mappings.remove(stale.unwrap_or(0)).ok());
        match mappings.push(mapping.clone(), GFP_KERNEL) {
            Ok(()) => evicted.flatten(),
            Err(_) => Some(mapping),
        }
    }

    /// Closes the cache. Returns its mappings, which the caller must unmap.
    pub(in crate::rpc) fn close(&self) -> KVec<Arc<Mapping>> {
        self.mappings
            .lock()
            .as_mut()
            .get_mut()
            .take()
            .unwrap_or_default()
    }
}
