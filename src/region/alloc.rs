// SPDX-License-Identifier: GPL-2.0

//! Allocation and registration of regions on behalf of a session.
//!
//! # Operation
//!
//! [`RegionBuilder`] borrows chunks from the nodes to stripe over, in the largest size that all nodes have.
//! [`Publication`] adds the region to the table of its home, which is this node, and registers the name at
//! its owners. Then the region is mapped ([`super::map::open`]).
//!
//! # Recovery
//!
//! Chunks borrowed for an allocation that fails are returned.

use super::{
    home::{
        borrowed_loan::BorrowedLoan, name_change::NameChange, placement::Placement,
        reclaim::Teardown, Region, RegionReservation, RegionSpec,
    },
    lend::loan::NodeScopedId,
    map::{open::OpenRequest, MapTerms, Mapping},
    MemoryService,
};
use crate::{
    control::{priority::WorkPriority, retry::CONTROL_TIMEOUT_MS},
    errno,
    sys::{
        deadline::{real_time_ns, Deadline},
        event_counter::EventCounter,
        pin::PinnedPages,
    },
};
use kernel::{alloc::flags::GFP_KERNEL_ACCOUNT, prelude::*, sync::Arc};
use kite_core::{
    layout::{initial_shift, stripe_share, Layout, StripeShare, PAGE_SHIFT},
    name::Name,
    rights::Rights,
    view::NodeInstance,
    wire::ChunkLocation,
};

/// Maximum size of the chunk table of a region: enough for 46 TiB in chunks of 4 MiB.
const MAX_CHUNK_TABLE_BYTES: usize = 256 << 20;

/// Minimum rate at which a node zeroes memory, in bytes per millisecond: 256 MiB per second.
const ZEROED_BYTES_PER_MS: u64 = (256 << 20) / 1000;

/// Returns the time allowed for zeroing `len` bytes, in ms. The lender continues only while the caller waits.
fn zeroing_ms(len: u64) -> u32 {
    u32::try_from(len / ZEROED_BYTES_PER_MS).unwrap_or(u32::MAX)
}

/// Parameters of a region to allocate or register.
pub(crate) struct AllocRequest<'a> {
    pub(crate) len: u64,
    /// Nodes to stripe over; 0 is this node. If empty, this node lends all chunks.
    pub(crate) nodes: &'a [u32],
    pub(crate) name: Option<Name>,
    pub(crate) owner: u32,
    pub(crate) other_rights: Rights,
}

impl AllocRequest<'_> {
    fn region_spec(&self, layout: Layout) -> RegionSpec {
        RegionSpec {
            created_at: real_time_ns(),
            layout,
            owner: self.owner,
            other_rights: self.other_rights,
        }
    }
}

impl MemoryService {
    /// Allocates a region and maps it with all rights.
    ///
    /// # Errors
    ///
    /// See `struct kite_alloc` in `include/uapi/kite.h`.
    pub(crate) fn alloc(
        self: &Arc<Self>,
        request: &AllocRequest<'_>,
        event_counter: Arc<EventCounter>,
    ) -> Result<Arc<Mapping>> {
        let local_node = self.cluster.local_node()?;
        let region = RegionBuilder::new(self, local_node, request)?.build_from_loans()?;
        Publication::new(self, local_node, &region, request.name).run(event_counter)
    }

    /// Makes a region from pinned memory and maps it with all rights.
    ///
    /// # Errors
    ///
    /// See `struct kite_register` in `include/uapi/kite.h`.
    pub(crate) fn register(
        self: &Arc<Self>,
        pinned: &Arc<PinnedPages>,
        request: &AllocRequest<'_>,
        event_counter: Arc<EventCounter>,
    ) -> Result<Arc<Mapping>> {
        let local_node = self.cluster.local_node()?;
        let region = RegionBuilder::new(self, local_node, request)?.build_from_pinned(pinned)?;
        Publication::new(self, local_node, &region, request.name).run(event_counter)
    }
}

/// Builder of a region of this home.
struct RegionBuilder<'a> {
    service: &'a Arc<MemoryService>,
    local_node: u32,
    request: &'a AllocRequest<'a>,
    reservation: RegionReservation,
    /// Number of the region.
    id: u64,
}

impl<'a> RegionBuilder<'a> {
    fn new(
        service: &'a Arc<MemoryService>,
        local_node: u32,
        request: &'a AllocRequest<'a>,
    ) -> Result<Self> {
        Ok(Self {
            service,
            local_node,
            request,
            reservation: RegionReservation::new()?,
            id: service.new_id(),
        })
    }

    fn finish(self, layout: Layout, placement: Placement) -> Arc<Region> {
        let spec = self.request.region_spec(layout);
        self.reservation.fill(self.id, spec, placement)
    }

    /// Builds a region from pinned memory, with the largest chunk size in which the memory is contiguous.
    fn build_from_pinned(self, pinned: &Arc<PinnedPages>) -> Result<Arc<Region>> {
        let len = self.request.len;
        let shifts = (PAGE_SHIFT..=initial_shift(len)).rev();
        let mut layouts = shifts.filter_map(|shift| Layout::new(len, shift));
        let layout = layouts
            .find(|layout| pinned.matches_layout(layout))
            .ok_or(EINVAL)?;
        let loan = (self.local_node, self.service.new_id());
        let chunks = alloc_chunk_table(&layout)?;
        let instance = self.service.cluster.instance_of(self.local_node)?;
        let loans = self.service.loans();
        let lent = loans.lend_pinned(loan, self.id, &layout, pinned);
        lent.map_err(|error| if error == ENOSPC { ENOMEM } else { error })?;
        match self.place_pinned(loan, instance, chunks) {
            Ok(placement) => Ok(self.finish(layout, placement)),
            Err(error) => {
                // No other node has used the loan yet, so the memory can be released at once.
                loans.release(loan)?;
                Err(error)
            }
        }
    }

    /// Returns the placement of the chunks of a loan of this node, which has the incarnation `instance`.
    fn place_pinned(
        &self,
        loan: NodeScopedId,
        instance: NodeInstance,
        mut chunks: KVVec<ChunkLocation>,
    ) -> Result<Placement> {
        let mut locations = chunks.iter_mut();
        let record_location = |addr| {
            let location = locations.next();
            location
                .map(|location| *location = ChunkLocation { instance, addr })
                .is_some()
        };
        let loans = self.service.loans();
        let recorded = loans.for_each_address(loan, 0, record_location);
        recorded.map_err(|_| errno::hostdown())?;
        let placement = Placement::new(chunks, &[loan])?;
        let is_member = self.service.cluster.is_member(instance);
        is_member.then_some(placement).ok_or_else(errno::hostdown)
    }

    /// Builds a region from borrowed memory, with the largest chunk size that all nodes can lend.
    fn build_from_loans(self) -> Result<Arc<Region>> {
        let local_nodes = [self.local_node];
        let nodes = match self.request.nodes {
            [] => &local_nodes,
            nodes => nodes,
        };
        let mut shift = initial_shift(self.request.len);
        loop {
            let layout = Layout::new(self.request.len, shift).ok_or(EINVAL)?;
            let mut borrowed = StripedLoans::new(&self, nodes, layout);
            match borrowed.borrow_all() {
                Ok(chunks) => {
                    let placed = Placement::new(chunks, &borrowed.loans);
                    let placement = placed.map_err(|error| borrowed.return_all(error))?;
                    return Ok(self.finish(layout, placement));
                }
                Err(error) if error == ENOMEM && shift > PAGE_SHIFT => shift -= 1,
                Err(error) if error == ENOSPC => return Err(ENOMEM),
                Err(error) => return Err(error),
            }
        }
    }
}

/// Loans of a region that is being built, one of each node to stripe over.
struct StripedLoans<'a> {
    service: &'a Arc<MemoryService>,
    nodes: &'a [u32],
    layout: Layout,
    region: u64,
    deadline: Deadline,
    loans: KVec<NodeScopedId>,
}

impl<'a> StripedLoans<'a> {
    /// Prepares to borrow chunks for `layout` from `nodes`.
    fn new(builder: &RegionBuilder<'a>, nodes: &'a [u32], layout: Layout) -> Self {
        let timeout_ms = CONTROL_TIMEOUT_MS.saturating_add(zeroing_ms(builder.request.len));
        Self {
            service: builder.service,
            nodes,
            layout,
            region: builder.id,
            deadline: Deadline::after_ms(timeout_ms),
            loans: KVec::new(),
        }
    }

    /// Borrows the chunks from the nodes, round robin. Returns their locations. If a lender fails, returns
    /// all loans.
    fn borrow_all(&mut self) -> Result<KVVec<ChunkLocation>> {
        let mut chunks = alloc_chunk_table(&self.layout)?;
        for (position, &node) in self.nodes.iter().enumerate() {
            let node = if node == 0 {
                self.service.cluster.local_node()?
            } else {
                node
            };
            let stripe = stripe_share(&self.layout, position, self.nodes.len());
            if stripe.chunk_count == 0 {
                break;
            }
            let step = self.nodes.len();
            let borrowed = self.borrow_from(node, stripe, |i, location| {
                *chunks.get_mut(position + i as usize * step).ok_or(EIO)? = location;
                Ok(())
            });
            borrowed.map_err(|error| self.return_all(error))?;
        }
        Ok(chunks)
    }

    /// Borrows the chunks of one stripe. `on_chunk` receives the index in the stripe and the location.
    fn borrow_from(
        &mut self,
        node: u32,
        stripe: StripeShare,
        on_chunk: impl FnMut(u32, ChunkLocation) -> Result,
    ) -> Result {
        let loan = (node, self.service.new_id());
        self.loans.push(loan, GFP_KERNEL)?;
        let shape = (self.layout.shift(), stripe);
        let loan = BorrowedLoan::new(self.service, loan);
        loan.borrow(shape, self.region, self.deadline, on_chunk)
    }

    /// Returns all loans after a failed allocation. Returns the error to report.
    fn return_all(&self, error: Error) -> Error {
        let mut loans = self.loans.iter();
        let returned = if error == ENOMEM {
            // Wait for the release: the next attempt, with smaller chunks, needs the same memory.
            loans.try_for_each(|&loan| BorrowedLoan::new(self.service, loan).release(self.deadline))
        } else {
            Err(error)
        };
        if returned.is_err() {
            for &loan in &self.loans {
                let loan = BorrowedLoan::new(self.service, loan);
                loan.release_deferred(WorkPriority::Background, ());
            }
        }
        returned.err().unwrap_or(error)
    }
}

/// Allocates the table of the chunk locations, charged to the caller.
fn alloc_chunk_table(layout: &Layout) -> Result<KVVec<ChunkLocation>> {
    let count = layout.chunk_count() as usize;
    if count > MAX_CHUNK_TABLE_BYTES / size_of::<ChunkLocation>() {
        return Err(ENOMEM);
    }
    Ok(KVVec::from_elem(
        ChunkLocation::default(),
        count,
        GFP_KERNEL_ACCOUNT,
    )?)
}

/// Publication of a new region: table, name and first mapping.
struct Publication<'a> {
    service: &'a Arc<MemoryService>,
    local_node: u32,
    region: &'a Arc<Region>,
    name: Option<Name>,
    deadline: Deadline,
}

impl<'a> Publication<'a> {
    fn new(
        service: &'a Arc<MemoryService>,
        local_node: u32,
        region: &'a Arc<Region>,
        name: Option<Name>,
    ) -> Self {
        Self {
            service,
            local_node,
            region,
            name,
            deadline: Deadline::after_ms(CONTROL_TIMEOUT_MS),
        }
    }

    /// Adds the region to the table, registers its name, and maps it. On error, the region is freed in the
    /// background.
    fn run(&self, event_counter: Arc<EventCounter>) -> Result<Arc<Mapping>> {
        self.service
            .add_region(self.region.clone())
            .inspect_err(|_| self.reclaim())?;
        let mapped = self.register_name().and_then(|()| self.map(event_counter));
        if mapped.is_err() && self.region.mark_freeing() {
            self.reclaim();
        }
        mapped
    }

    fn reclaim(&self) {
        Teardown::start_deferred(self.service, self.region, WorkPriority::Background);
    }

    fn map(&self, event_counter: Arc<EventCounter>) -> Result<Arc<Mapping>> {
        let request = OpenRequest {
            home: self.local_node,
            region: self.region.id,
            terms: MapTerms {
                uid: self.region.spec.owner,
                rights: Rights::ALL,
                outlives_fence: true,
            },
            deadline: self.deadline,
        };
        request.run(self.service, event_counter)
    }

    /// Registers the region's name, if any, at its owners.
    fn register_name(&self) -> Result {
        let Some(name) = self.name else {
            return Ok(());
        };
        let change = NameChange {
            service: self.service,
            region: self.region,
            name,
            deadline: self.deadline,
        };
        change.name_new()
    }
}
