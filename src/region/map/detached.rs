// SPDX-License-Identifier: GPL-2.0

//! Mapping with a closed handle, until the mapping is drained.

use super::Mapping;
use crate::region::MemoryService;
use core::ops::Deref;
use kernel::sync::Arc;

/// Mapping with a closed handle. Until this value is dropped, the mapping stays in the table, and the home
/// can query whether the mapping is drained.
pub(in crate::region) struct DetachedMapping {
    memory_service: Arc<MemoryService>,
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
        self.memory_service.remove_mapping(self.mapping.id);
    }
}

impl MemoryService {
    /// Closes the handle of a mapping. Waits for accesses in progress.
    pub(in crate::region) fn detach_mapping(
        self: &Arc<Self>,
        mapping: &Arc<Mapping>,
    ) -> DetachedMapping {
        if mapping.detach() {
            self.stats.open_handles.sub(1);
        }
        DetachedMapping {
            memory_service: self.clone(),
            mapping: mapping.clone(),
        }
    }
}
