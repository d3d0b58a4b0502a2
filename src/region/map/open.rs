// SPDX-License-Identifier: GPL-2.0

//! Mapping of a region by name or by number, and the list of named regions.
//!
//! # Operation
//!
//! The name owner returns the home of a name. The home adds a mapper and returns the layout and the chunk
//! locations. This node finds its own chunks among the lent ones ([`MemoryService::resolve_chunk`]).
//!
//! # Recovery
//!
//! A mapping is in the table before the home adds the mapper, so an invalidation cannot miss the mapping. If
//! the region moves while the locations are fetched, they are fetched again.

use super::{chunk_map::MappedChunk, Mapping};
use crate::{
    control::{client::ControlClient, retry::CONTROL_TIMEOUT_MS},
    errno::{self, TryError},
    region::{lend::loan::NodeScopedId, MemoryService},
    sys::{
        deadline::{retry_until, Deadline},
        event_counter::EventCounter,
    },
};
use kernel::{alloc::flags::GFP_KERNEL_ACCOUNT, prelude::*, sync::Arc};
use kite_core::{
    layout::Layout,
    name::Name,
    rights::Rights,
    wire::{ChunkLocation, ControlReply, ControlRequest, RegionInfo},
};

impl MemoryService {
    /// Maps a region by name.
    ///
    /// # Errors
    ///
    /// See `struct kite_map` in `include/uapi/kite.h`.
    pub(crate) fn map_by_name(
        self: &Arc<Self>,
        name: Name,
        uid: u32,
        rights: Rights,
        event_counter: Arc<EventCounter>,
    ) -> Result<Arc<Mapping>> {
        let deadline = Deadline::after_ms(CONTROL_TIMEOUT_MS);
        let (home, region) = retry_until(deadline, || {
            let name_owner = self.cluster.name_owner(&name)?;
            match self
                .request(name_owner, &ControlRequest::LookupName { name }, deadline)?
                .decode()?
            {
                ControlReply::NameFound { home, region } => Ok((home, region)),
                _ => Err(EIO.into()),
            }
        })?;
        self.map_region(home, region, uid, rights, event_counter, deadline)
    }

    /// Maps a region. The mapping is added to the table before the home adds the mapper, so that an
    /// invalidation by the home finds the mapping.
    pub(crate) fn map_region(
        self: &Arc<Self>,
        home: u32,
        region: u64,
        uid: u32,
        rights: Rights,
        event_counter: Arc<EventCounter>,
        deadline: Deadline,
    ) -> Result<Arc<Mapping>> {
        let instance = self.cluster.instance_of(home)?;
        let mapping = Mapping::new(self.new_id(), instance, region, event_counter)?;
        self.add_mapping(mapping.clone())?;
        self.stats.open_handles.add(1);
        let resolved = self.fetch_chunk_map(&mapping, uid, rights, deadline);
        // After a restart of the home, the id may belong to another region.
        let is_member = || self.cluster.is_member(instance).then_some(());
        match resolved.and_then(|()| is_member().ok_or_else(errno::hostdown)) {
            Ok(()) => Ok(mapping),
            Err(error) => {
                self.unmap(&mapping);
                Err(error)
            }
        }
    }

    /// Maps the region at the home, and installs the layout and the chunk locations.
    fn fetch_chunk_map(
        self: &Arc<Self>,
        mapping: &Mapping,
        uid: u32,
        rights: Rights,
        deadline: Deadline,
    ) -> Result {
        let Mapping { home, region, .. } = *mapping;
        let request = ControlRequest::MapRegion {
            region,
            mapping: mapping.id,
            uid,
            rights,
        };
        let layout = match self
            .request_with_retry(home, &request, deadline)?
            .decode()?
        {
            ControlReply::Mapped { len, shift } => Layout::new(len, shift).ok_or(EIO)?,
            _ => return Err(EIO),
        };
        retry_until(deadline, || {
            let version = mapping.chunk_map_version();
            match self.fetch_chunk_locations((home, region), &layout, deadline) {
                Ok(chunks) => mapping.install_chunks(layout, version, chunks),
                // The region may have moved: a chunk was not at the location that the home sent.
                Err(_) if mapping.chunk_map_version() != version => Err(TryError::WouldBlock),
                Err(error) => Err(error.into()),
            }
        })
    }

    /// Requests the locations of all chunks of a region from the home.
    fn fetch_chunk_locations(
        self: &Arc<Self>,
        (home, region): NodeScopedId,
        layout: &Layout,
        deadline: Deadline,
    ) -> Result<KVVec<MappedChunk>> {
        let count = layout.chunk_count() as usize;
        let mut chunks = KVVec::with_capacity(count, GFP_KERNEL_ACCOUNT)?;
        while chunks.len() < count {
            let first_chunk = chunks.len() as u32;
            let answer = self.request_with_retry(
                home,
                &ControlRequest::LocateChunks {
                    region,
                    first_chunk,
                },
                deadline,
            )?;
            let ControlReply::Located(located) = answer.decode()? else {
                return Err(EIO);
            };
            for location in located.take(count - chunks.len()) {
                let chunk = self.resolve_chunk((home, region), location, 1 << layout.shift())?;
                chunks.push(chunk, GFP_KERNEL_ACCOUNT)?;
            }
            if chunks.len() == first_chunk as usize {
                return Err(EIO);
            }
        }
        Ok(chunks)
    }

    /// Resolves a chunk location sent by another node. The chunk has `size` bytes.
    ///
    /// # Errors
    ///
    /// - `EIO`: the address is invalid.
    /// - `EHOSTDOWN`: this node does not lend the chunk any longer, or has left the cluster.
    pub(in crate::region) fn resolve_chunk(
        &self,
        region: NodeScopedId,
        location: ChunkLocation,
        size: u64,
    ) -> Result<MappedChunk> {
        location.addr.checked_add(size).ok_or(EIO)?;
        let is_local = location.instance.node == self.cluster.local_node()?;
        if !is_local || !self.cluster.is_member(location.instance) {
            return Ok(MappedChunk::Remote(location));
        }
        let found = self.loans().find_chunk(region, location.addr);
        found.map(MappedChunk::Local).ok_or_else(errno::hostdown)
    }

    /// Calls `f` with up to `limit` named regions of `node` (0: this node), starting at `cursor`. Returns the
    /// cursor at which to continue.
    ///
    /// # Errors
    ///
    /// Those of `f`, and:
    ///
    /// - `EHOSTDOWN`: the node is not in the view.
    /// - `EHOSTUNREACH`: the node cannot be reached.
    /// - `ETIMEDOUT`: the node did not reply in time.
    pub(crate) fn list_regions(
        self: &Arc<Self>,
        node: u32,
        cursor: u64,
        limit: u32,
        mut f: impl FnMut(u32, RegionInfo) -> Result,
    ) -> Result<u64> {
        let node = if node == 0 {
            self.cluster.local_node()?
        } else {
            node
        };
        let request = ControlRequest::ListRegions {
            cursor,
            max_entries: limit,
        };
        let answer =
            self.request_with_retry(node, &request, Deadline::after_ms(CONTROL_TIMEOUT_MS))?;
        let ControlReply::Listed { cursor, entries } = answer.decode()? else {
            return Err(EIO);
        };
        for entry in entries.take(limit as usize) {
            f(node, entry)?;
        }
        Ok(cursor)
    }
}
