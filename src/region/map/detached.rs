// SPDX-License-Identifier: GPL-2.0

//! Mapping with a closed handle, until the mapping is drained.

use super::Mapping;
use crate::{
    control::{client::ControlClient, priority::WorkPriority, retry::DRAIN_POLL_MS},
    region::MemoryService,
};
use core::ops::Deref;
use kernel::{
    sync::Arc,
    time::{delay::fsleep, Delta},
};
use kite_core::view::NodeInstance;

/// Mapping with a closed handle. Until this value is dropped, the mapping stays in the table, and the home
/// can query whether the mapping is drained.
pub(in crate::region) struct DetachedMapping {
    service: Arc<MemoryService>,
    mapping: Arc<Mapping>,
}

impl Deref for DetachedMapping {
    type Target = Mapping;

    fn deref(&self) -> &Mapping {
        &self.mapping
    }
}

impl Drop for DetachedMapping {
    fn drop(&mut self) {
        self.service.remove_mapping(self.mapping.id);
    }
}

impl DetachedMapping {
    /// Closes the handle of a mapping. Waits for accesses in progress.
    pub(super) fn new(service: &Arc<MemoryService>, mapping: &Arc<Mapping>) -> Self {
        if mapping.detach() {
            service.stats.open_handles.sub(1);
        }
        Self {
            service: service.clone(),
            mapping: mapping.clone(),
        }
    }

    /// Returns `true` if the mapping is drained. See [`MemoryService::is_drained`].
    pub(super) fn is_drained(&self) -> bool {
        self.service.is_drained(&self.mapping)
    }

    /// Runs `f` on a workqueue of the home once the mapping is drained. Requeues until then, so other items
    /// of the queue do not wait.
    pub(super) fn defer_until_drained(
        self,
        priority: WorkPriority,
        f: impl FnOnce(&Arc<MemoryService>, NodeInstance, Self) + Send + 'static,
    ) {
        let current_priority = if self.is_drained() {
            priority
        } else {
            WorkPriority::Background
        };
        let (service, home) = (self.service.clone(), self.home);
        service.defer(home, current_priority, move |service, instance| {
            if self.is_drained() {
                return f(service, instance, self);
            }
            fsleep(Delta::from_millis(DRAIN_POLL_MS));
            self.defer_until_drained(priority, f);
        });
    }
}
