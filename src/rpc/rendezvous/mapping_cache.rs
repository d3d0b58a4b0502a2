// SPDX-License-Identifier: GPL-2.0

//! Relays of callers that a server's node keeps mapped.
//!
//! To map one takes a request to the caller's node, and to unmap it another, each as long as the call itself. So
//! what was mapped for one call is kept for the next by the same link.

use crate::region::map::Mapping;
use kernel::{
    new_mutex,
    prelude::*,
    sync::{Arc, Mutex},
};

/// Most that are kept of a link.
const MAX_CACHED_MAPPINGS: usize = 64;

/// The relays that are kept of a link; nothing once it is closed.
#[pin_data]
pub(crate) struct MappingCache {
    #[pin]
    mappings: Mutex<Option<KVec<Arc<Mapping>>>>,
}

impl MappingCache {
    /// None.
    pub(in crate::rpc) fn new() -> impl PinInit<Self> {
        pin_init!(Self { mappings <- new_mutex!(Some(KVec::new())) })
    }

    /// That of a region, if it is there. Nobody else has it then.
    pub(crate) fn remove(&self, region: u64) -> Option<Arc<Mapping>> {
        let mut mappings = self.mappings.lock();
        let mappings = mappings.as_mut().get_mut().as_mut()?;
        let index = mappings
            .iter()
            .position(|mapping| mapping.region == region)?;
        mappings.remove(index).ok()
    }

    /// Keeps one that no call needs now. Returns one that is to be unmapped, if any is.
    pub(crate) fn insert(&self, mapping: Arc<Mapping>) -> Option<Arc<Mapping>> {
        let mut mappings = self.mappings.lock();
        let Some(mappings) = mappings.as_mut().get_mut().as_mut() else {
            return Some(mapping);
        };
        // One that the caller has dropped, if there is any.
        let stale = mappings.iter().position(|cached| cached.access().is_err());
        let full = mappings.len() >= MAX_CACHED_MAPPINGS;
        let evicted = (stale.is_some() || full).then(|| mappings.remove(stale.unwrap_or(0)).ok());
        match mappings.push(mapping.clone(), GFP_KERNEL) {
            Ok(()) => evicted.flatten(),
            Err(_) => Some(mapping),
        }
    }

    /// Keeps none any more. Returns those that there were.
    pub(in crate::rpc) fn close(&self) -> KVec<Arc<Mapping>> {
        self.mappings
            .lock()
            .as_mut()
            .get_mut()
            .take()
            .unwrap_or_default()
    }
}
