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

use super::{chunk_map::MappedChunk, MapTerms, Mapping};
use crate::{
    control::{client::ControlClient, retry::CONTROL_TIMEOUT_MS},
    errno::{self, TryError},
    region::MemoryService,
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
    wire::{ControlReply, ControlRequest, RegionInfo},
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
            let name_owner = self.cluster.name_owners(&name)?.primary;
            match self
                .request(name_owner, &ControlRequest::LookupName { name }, deadline)?
                .decode()?
            {
                ControlReply::NameFound { home, region } => Ok((home, region)),
                _ => Err(EIO.into()),
            }
        })?;
        let request = OpenRequest {
            home,
            region,
            terms: MapTerms {
                uid,
                rights,
                outlives_fence: true,
            },
            deadline,
        };
        request.run(self, event_counter)
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
        let reply =
            self.request_with_retry(node, &request, Deadline::after_ms(CONTROL_TIMEOUT_MS))?;
        let ControlReply::Listed { cursor, entries } = reply.decode()? else {
            return Err(EIO);
        };
        for entry in entries.take(limit as usize) {
            f(node, entry)?;
        }
        Ok(cursor)
    }
}

/// Request to map a region of which the home and the number are known.
pub(crate) struct OpenRequest {
    pub(crate) home: u32,
    pub(crate) region: u64,
    pub(crate) terms: MapTerms,
    pub(crate) deadline: Deadline,
}

impl OpenRequest {
    /// Maps the region. The mapping is added to the table before the home adds the mapper, so that an
    /// invalidation by the home finds the mapping.
    ///
    /// # Errors
    ///
    /// See `struct kite_map` in `include/uapi/kite.h`.
    pub(crate) fn run(
        &self,
        service: &Arc<MemoryService>,
        event_counter: Arc<EventCounter>,
    ) -> Result<Arc<Mapping>> {
        let cluster = &service.cluster;
        let home = cluster.instance_of(self.home)?;
        let admission = cluster.admission_of(home)?;
        let id = service.new_id();
        let mapping = Mapping::new(id, home, self.region, self.terms, event_counter)?;
        service.add_mapping(mapping.clone())?;
        service.stats.open_handles.add(1);
        let resolved = mapping.open_at_home(service, self.deadline);
        // After a restart of the home, the id may belong to another region. If the home was fenced, it has
        // forgotten the mapping.
        let is_connected = || cluster.is_connected(home, admission).then_some(());
        match resolved.and_then(|()| is_connected().ok_or_else(errno::hostdown)) {
            Ok(()) => Ok(mapping),
            Err(error) => {
                service.unmap(&mapping);
                Err(error)
            }
        }
    }
}

impl Mapping {
    /// Maps the region at the home, and installs the layout and the chunk locations.
    ///
    /// # Errors
    ///
    /// - `ENOENT`: the region was freed.
    /// - `EACCES`: the user does not have the rights any longer.
    /// - See also [`ControlClient::request_with_retry`].
    pub(super) fn open_at_home(&self, service: &Arc<MemoryService>, deadline: Deadline) -> Result {
        let request = ControlRequest::MapRegion {
            region: self.region,
            mapping: self.id,
            uid: self.terms.uid,
            rights: self.terms.rights,
        };
        let reply = service.request_with_retry(self.home, &request, deadline)?;
        let layout = match reply.decode()? {
            ControlReply::Mapped { len, shift } => Layout::new(len, shift).ok_or(EIO)?,
            _ => return Err(EIO),
        };
        let fetch = ChunkMapFetch {
            service,
            mapping: self,
            layout,
            deadline,
        };
        fetch.run()
    }
}

/// Fetch of the chunk locations of a mapping.
struct ChunkMapFetch<'a> {
    service: &'a Arc<MemoryService>,
    mapping: &'a Mapping,
    layout: Layout,
    deadline: Deadline,
}

impl ChunkMapFetch<'_> {
    /// Fetches and installs the locations.
    fn run(&self) -> Result {
        let mapping = self.mapping;
        retry_until(self.deadline, || {
            let version = mapping.chunk_map_version();
            match self.fetch_all() {
                Ok(chunks) => mapping.install_chunks(self.layout, version, chunks),
                // The region may have moved: a chunk was not at the location that the home sent.
                Err(_) if mapping.chunk_map_version() != version => Err(TryError::WouldBlock),
                Err(error) => Err(error.into()),
            }
        })
    }

    /// Requests the locations of all chunks from the home.
    fn fetch_all(&self) -> Result<KVVec<MappedChunk>> {
        let count = self.layout.chunk_count() as usize;
        let mut chunks = KVVec::with_capacity(count, GFP_KERNEL_ACCOUNT)?;
        while chunks.len() < count {
            let first_chunk = chunks.len();
            self.fetch_some(&mut chunks, count)?;
            if chunks.len() == first_chunk {
                return Err(EIO);
            }
        }
        Ok(chunks)
    }

    /// Requests the locations of the chunks that follow `chunks`, as many as fit into one reply.
    fn fetch_some(&self, chunks: &mut KVVec<MappedChunk>, count: usize) -> Result {
        let (home, region) = (self.mapping.home, self.mapping.region);
        let request = ControlRequest::LocateChunks {
            region,
            first_chunk: chunks.len() as u32,
        };
        let reply = self
            .service
            .request_with_retry(home, &request, self.deadline)?;
        let ControlReply::Located(located) = reply.decode()? else {
            return Err(EIO);
        };
        let size = 1 << self.layout.shift();
        for location in located.take(count - chunks.len()) {
            let chunk = self.service.resolve_chunk((home, region), location, size)?;
            chunks.push(chunk, GFP_KERNEL_ACCOUNT)?;
        }
        Ok(())
    }
}
