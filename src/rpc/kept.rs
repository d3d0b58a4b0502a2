// SPDX-License-Identifier: GPL-2.0

//! Relays of callers that a server's node keeps mapped.
//!
//! To map one takes a request to the caller's node, and to unmap it another, each as long as the call itself. So
//! what was mapped for one call is kept for the next by the same link.

use crate::lmr::mapping::Mapping;
use kernel::{
    new_mutex,
    prelude::*,
    sync::{Arc, Mutex},
};

/// Most that are kept of a link.
const KEPT_MAX: usize = 64;

/// The relays that are kept of a link; nothing once it is closed.
#[pin_data]
pub(crate) struct Kept {
    #[pin]
    all: Mutex<Option<KVec<Arc<Mapping>>>>,
}

impl Kept {
    /// None.
    pub(super) fn new() -> impl PinInit<Self> {
        pin_init!(Self { all <- new_mutex!(Some(KVec::new())) })
    }

    /// That of a region, if it is there. Nobody else has it then.
    pub(crate) fn take(&self, region: u64) -> Option<Arc<Mapping>> {
        let mut all = self.all.lock();
        let all = all.as_mut().get_mut().as_mut()?;
        let at = all.iter().position(|relay| relay.region == region)?;
        all.remove(at).ok()
    }

    /// Keeps one that no call needs now. Returns one that is to be unmapped, if any is.
    pub(crate) fn put(&self, relay: Arc<Mapping>) -> Option<Arc<Mapping>> {
        let mut all = self.all.lock();
        let Some(all) = all.as_mut().get_mut().as_mut() else {
            return Some(relay);
        };
        // One that the caller has dropped, if there is any.
        let ended = all.iter().position(|relay| relay.enter().is_err());
        let full = all.len() >= KEPT_MAX;
        let oldest = (ended.is_some() || full).then(|| all.remove(ended.unwrap_or(0)).ok());
        match all.push(relay.clone(), GFP_KERNEL) {
            Ok(()) => oldest.flatten(),
            Err(_) => Some(relay),
        }
    }

    /// Keeps none any more. Returns those that there were.
    pub(super) fn end(&self) -> KVec<Arc<Mapping>> {
        self.all
            .lock()
            .as_mut()
            .get_mut()
            .take()
            .unwrap_or_default()
    }
}
