// SPDX-License-Identifier: GPL-2.0

//! Mappings of one region on this node, which the home of the region quiesces and resumes.
//!
//! # Recovery
//!
//! If a new location cannot be resolved on resume, accesses to the chunk fail with an error.

use super::{chunk_map::MappedChunk, Mapping};
use crate::{
    errno::{TryError, TryResult},
    region::MemoryService,
};
use kernel::sync::Arc;
use kite_core::wire::ChunkLocation;

/// Mappings of a region on this node.
pub(in crate::region) struct LocalMappings<'a> {
    service: &'a MemoryService,
    home: u32,
    region: u64,
}

impl<'a> LocalMappings<'a> {
    /// Refers to the mappings of region `region` of `home`.
    pub(in crate::region) fn new(service: &'a MemoryService, home: u32, region: u64) -> Self {
        Self {
            service,
            home,
            region,
        }
    }

    /// Blocks accesses of this node to the region.
    ///
    /// # Errors
    ///
    /// - [`TryError::InTransition`]: an access is in progress, or a sent packet may still arrive.
    pub(in crate::region) fn try_quiesce(&self) -> TryResult {
        let mut all_quiesced = true;
        for mapping in self.iter() {
            let is_quiesced = mapping.try_quiesce().is_ok() && self.service.is_drained(&mapping);
            all_quiesced &= is_quiesced;
        }
        all_quiesced.then_some(()).ok_or(TryError::InTransition)
    }

    /// Resumes accesses of this node to the region, with the new locations `moved`.
    pub(in crate::region) fn resume(
        &self,
        moved: impl Iterator<Item = (u32, ChunkLocation)> + Clone,
    ) {
        for mapping in self.iter() {
            let shift = mapping.layout().map_or(0, |layout| layout.shift());
            mapping.resume(|chunks| {
                for (i, location) in moved.clone() {
                    if let Some(chunk) = chunks.get_mut(i as usize) {
                        *chunk = self.resolve(location, 1 << shift);
                    }
                }
            });
        }
    }

    fn resolve(&self, location: ChunkLocation, size: u64) -> MappedChunk {
        let region = (self.home, self.region);
        let found = self.service.resolve_chunk(region, location, size);
        found.unwrap_or(MappedChunk::Remote(location))
    }

    fn iter(&self) -> impl Iterator<Item = Arc<Mapping>> + '_ {
        let is_of_region =
            |mapping: &Arc<Mapping>| (mapping.home, mapping.region) == (self.home, self.region);
        self.service.mappings().filter(is_of_region)
    }
}
