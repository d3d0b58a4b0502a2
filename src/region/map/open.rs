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
    errno::{self, TryError, TryResult},
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

/// Attributes of a mapped region, as its home reports them.
#[derive(Clone, Copy)]
pub(crate) struct RegionTraits {
    /// User that owns the region, in the initial user namespace.
    pub(crate) owner_uid: u32,
    /// `true` if the region had a name when it was mapped.
    is_named: bool,
}

/// Named region to map.
#[derive(Clone, Copy)]
pub(crate) enum RegionSelector {
    Name(Name),
    /// Home and number of the region; home 0 is this node.
    Id(u32, u64),
}

/// Request to map a named region.
pub(crate) struct MapRequest {
    pub(crate) selector: RegionSelector,
    pub(crate) uid: u32,
    pub(crate) rights: Rights,
    /// User that must own the region, if any.
    pub(crate) required_owner: Option<u32>,
}

impl MapRequest {
    /// Maps the region.
    ///
    /// # Errors
    ///
    /// See `struct kite_map` in `include/uapi/kite.h`.
    pub(crate) fn run(
        &self,
        service: &Arc<MemoryService>,
        event_counter: Arc<EventCounter>,
    ) -> Result<Arc<Mapping>> {
        let deadline = Deadline::after_ms(CONTROL_TIMEOUT_MS);
        let (home, region) = match self.selector {
            RegionSelector::Name(name) => service.find_name(name, deadline)?,
            RegionSelector::Id(0, region) => (service.cluster.local_node()?, region),
            RegionSelector::Id(home, region) => (home, region),
        };
        let request = OpenRequest {
            home,
            region,
            terms: MapTerms {
                uid: self.uid,
                rights: self.rights,
                outlives_fence: true,
            },
            deadline,
        };
        let mapping = request.run(service, event_counter)?;
        self.check_region(&mapping)
            .inspect_err(|_| service.unmap(&mapping))?;
        Ok(mapping)
    }

    /// Checks what the home has reported of the region.
    ///
    /// # Errors
    ///
    /// - `EACCES`: another user owns the region.
    /// - `ENOENT`: the region has no name, so it is internal, or only its creator opens it.
    fn check_region(&self, mapping: &Mapping) -> Result {
        let region = mapping.region_traits()?;
        if !region.is_named {
            return Err(ENOENT);
        }
        let has_owner = self
            .required_owner
            .is_none_or(|owner| owner == region.owner_uid);
        has_owner.then_some(()).ok_or(EACCES)
    }
}

impl MemoryService {
    /// Returns home and number of the region to which a name belongs.
    fn find_name(self: &Arc<Self>, name: Name, deadline: Deadline) -> Result<(u32, u64)> {
        retry_until(deadline, || self.lookup_name(name, deadline))
    }

    /// Requests home and number of the region to which a name belongs from the first owner of the name.
    ///
    /// # Errors
    ///
    /// - [`TryError::WouldBlock`]: the owner has not received all names of the view, or is not in the view any
    ///   longer.
    /// - `ENOENT`: no region has the name.
    /// - See also [`ControlClient::request`].
    fn lookup_name(self: &Arc<Self>, name: Name, deadline: Deadline) -> TryResult<(u32, u64)> {
        let name_owner = self.cluster.name_owners(&name)?.primary;
        let request = ControlRequest::LookupName { name };
        let reply = match self.request(name_owner, &request, deadline) {
            // In the view without the node, another one owns the name.
            Err(TryError::Failed(error)) if error == errno::hostdown() => Err(TryError::WouldBlock),
            reply => reply,
        }?;
        match reply.decode()? {
            ControlReply::NameFound { home, region } => Ok((home, region)),
            _ => Err(EIO.into()),
        }
    }

    /// Returns `true` if the name of a region of `home` belongs to another region. Asks once: returns `false`
    /// if the owner of the name does not reply before the deadline.
    fn is_in_conflict(self: &Arc<Self>, home: u32, info: &RegionInfo, deadline: Deadline) -> bool {
        let found = self.lookup_name(info.name, deadline);
        found.is_ok_and(|found| found != (home, info.region))
    }

    /// Calls `f` with up to `limit` named regions of `node` (0: this node), starting at `cursor`, and with
    /// whether the name belongs to another region. Returns the cursor at which to continue.
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
        mut f: impl FnMut(u32, RegionInfo, bool) -> Result,
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
        let deadline = Deadline::after_ms(CONTROL_TIMEOUT_MS);
        let reply = self.request_with_retry(node, &request, deadline)?;
        let ControlReply::Listed { cursor, entries } = reply.decode()? else {
            return Err(EIO);
        };
        for entry in entries.take(limit as usize) {
            let in_conflict = self.is_in_conflict(node, &entry, deadline);
            f(node, entry, in_conflict)?;
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
    /// Returns the attributes of the region.
    ///
    /// # Errors
    ///
    /// - `ESTALE`: the home has not added the mapper.
    pub(crate) fn region_traits(&self) -> Result<RegionTraits> {
        self.traits.as_ref().copied().ok_or_else(errno::stale)
    }

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
        let ControlReply::Mapped {
            len,
            shift,
            owner_uid,
            is_named,
        } = reply.decode()?
        else {
            return Err(EIO);
        };
        let layout = Layout::new(len, shift).ok_or(EIO)?;
        self.traits.populate(RegionTraits {
            owner_uid,
            is_named,
        });
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
