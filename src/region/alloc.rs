// SPDX-License-Identifier: GPL-2.0

//! Allocation and registration of regions on behalf of a session.
//!
//! # Operation
//!
//! [`MemoryService::alloc`] borrows chunks from the nodes to stripe over, in the largest size that all nodes
//! have. The region is added to the table of its home, which is this node. Then the name is registered at its
//! owner, and the region is mapped ([`super::map::open`]).
//!
//! # Recovery
//!
//! Chunks borrowed for an allocation that fails are returned.

use super::{
    home::{
        borrowed_loan::BorrowedLoan, placement::Placement, reclaim::Teardown, Region,
        RegionReservation, RegionSpec,
    },
    lend::loan::NodeScopedId,
    map::Mapping,
    MemoryService,
};
use crate::{
    control::{client::ControlClient, priority::WorkPriority, retry::CONTROL_TIMEOUT_MS},
    errno,
    sys::{
        deadline::{retry_until, Deadline},
        event_counter::EventCounter,
        pin::PinnedPages,
    },
};
use kernel::{alloc::flags::GFP_KERNEL_ACCOUNT, prelude::*, sync::Arc};
use kite_core::{
    layout::{initial_shift, stripe_share, Layout, PAGE_SHIFT},
    name::Name,
    rights::Rights,
    wire::{ChunkLocation, ControlRequest},
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
    /// Nodes to stripe over. If empty, this node lends all chunks.
    pub(crate) nodes: &'a [u32],
    pub(crate) name: Option<Name>,
    pub(crate) owner: u32,
    pub(crate) other_rights: Rights,
}

impl AllocRequest<'_> {
    fn region_spec(&self, layout: Layout) -> RegionSpec {
        RegionSpec {
            name: self.name,
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
        let region = self.build_from_loans(local_node, request)?;
        self.publish_region(local_node, &region, request, event_counter)
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
        let region = self.build_from_pinned(local_node, pinned, request)?;
        self.publish_region(local_node, &region, request, event_counter)
    }

    /// Adds a region to the table, registers its name, and maps it.
    fn publish_region(
        self: &Arc<Self>,
        local_node: u32,
        region: &Arc<Region>,
        request: &AllocRequest<'_>,
        event_counter: Arc<EventCounter>,
    ) -> Result<Arc<Mapping>> {
        self.add_region(region.clone())
            .inspect_err(|_| Teardown::start_deferred(self, region, WorkPriority::Background))?;
        let deadline = Deadline::after_ms(CONTROL_TIMEOUT_MS);
        let mapped = self.register_name(region, deadline).and_then(|()| {
            self.map_region(
                local_node,
                region.id,
                request.owner,
                Rights::ALL,
                event_counter,
                deadline,
            )
        });
        if mapped.is_err() {
            if region.mark_freeing() {
                Teardown::start_deferred(self, region, WorkPriority::Background);
            }
        }
        mapped
    }

    /// Builds a region from pinned memory, with the largest chunk size in which the memory is contiguous.
    fn build_from_pinned(
        self: &Arc<Self>,
        local_node: u32,
        pinned: &Arc<PinnedPages>,
        request: &AllocRequest<'_>,
    ) -> Result<Arc<Region>> {
        let (reservation, region, loan) = (RegionReservation::new()?, self.new_id(), self.new_id());
        let shifts = (PAGE_SHIFT..=initial_shift(request.len)).rev();
        let mut layouts = shifts.filter_map(|shift| Layout::new(request.len, shift));
        let layout = layouts
            .find(|layout| pinned.matches_layout(layout))
            .ok_or(EINVAL)?;
        let mut loans = KVec::new();
        loans.push((local_node, loan), GFP_KERNEL)?;
        let mut chunks = Self::alloc_chunk_table(&layout)?;
        let instance = self.cluster.instance_of(local_node)?;
        let lent = self
            .loans()
            .lend_pinned((local_node, loan), region, &layout, pinned);
        lent.map_err(|error| if error == ENOSPC { ENOMEM } else { error })?;
        let mut locations = chunks.iter_mut();
        let record_location = |addr| {
            locations
                .next()
                .map(|location| *location = ChunkLocation { instance, addr })
                .is_some()
        };
        let recorded = self
            .loans()
            .for_each_address((local_node, loan), 0, record_location);
        let recorded = recorded.map_err(|_| errno::hostdown());
        let placed = recorded.and_then(|()| Placement::new(chunks, &loans));
        let is_member = self.cluster.is_member(instance);
        let placed =
            placed.and_then(|placed| is_member.then_some(placed).ok_or_else(errno::hostdown));
        match placed {
            Ok(placement) => Ok(reservation.fill(region, request.region_spec(layout), placement)),
            Err(error) => {
                // No other node has used the loan yet, so the memory can be released at once.
                self.loans().release((local_node, loan))?;
                Err(error)
            }
        }
    }

    /// Builds a region from borrowed memory, with the largest chunk size that all nodes can lend.
    fn build_from_loans(
        self: &Arc<Self>,
        local_node: u32,
        request: &AllocRequest<'_>,
    ) -> Result<Arc<Region>> {
        let local_nodes = [local_node];
        let nodes = if request.nodes.is_empty() {
            &local_nodes
        } else {
            request.nodes
        };
        let (reservation, region) = (RegionReservation::new()?, self.new_id());
        let mut shift = initial_shift(request.len);
        loop {
            let layout = Layout::new(request.len, shift).ok_or(EINVAL)?;
            let deadline =
                Deadline::after_ms(CONTROL_TIMEOUT_MS.saturating_add(zeroing_ms(request.len)));
            match self.borrow_all(region, &layout, nodes, deadline) {
                Ok((chunks, loans)) => {
                    return match Placement::new(chunks, &loans) {
                        Ok(placement) => {
                            Ok(reservation.fill(region, request.region_spec(layout), placement))
                        }
                        Err(error) => Err(self.return_loans(loans, error, deadline)),
                    };
                }
                Err(error) if error == ENOMEM && shift > PAGE_SHIFT => shift -= 1,
                Err(error) if error == ENOSPC => return Err(ENOMEM),
                Err(error) => return Err(error),
            }
        }
    }

    /// Borrows the chunks of a region from `nodes`, round robin.
    fn borrow_all(
        self: &Arc<Self>,
        region: u64,
        layout: &Layout,
        nodes: &[u32],
        deadline: Deadline,
    ) -> Result<(KVVec<ChunkLocation>, KVec<NodeScopedId>)> {
        let mut chunks = Self::alloc_chunk_table(layout)?;
        let mut loans = KVec::new();
        for (position, &node) in nodes.iter().enumerate() {
            let node = if node == 0 {
                self.cluster.local_node()?
            } else {
                node
            };
            let stripe = stripe_share(layout, position, nodes.len());
            if stripe.chunk_count == 0 {
                break;
            }
            let loan = self.new_id();
            let recorded = loans.push((node, loan), GFP_KERNEL);
            let borrowed = recorded.map_err(Error::from).and_then(|()| {
                let shape = (layout.shift(), stripe);
                BorrowedLoan::new(self, (node, loan)).borrow(
                    shape,
                    region,
                    deadline,
                    |i, location| {
                        let chunk = position + i as usize * nodes.len();
                        *chunks.get_mut(chunk).ok_or(EIO)? = location;
                        Ok(())
                    },
                )
            });
            if let Err(error) = borrowed {
                return Err(self.return_loans(loans, error, deadline));
            }
        }
        Ok((chunks, loans))
    }

    /// Returns loans after a failed allocation. Returns the error to report.
    fn return_loans(
        self: &Arc<Self>,
        loans: KVec<NodeScopedId>,
        error: Error,
        deadline: Deadline,
    ) -> Error {
        let release = |&loan: &NodeScopedId| BorrowedLoan::new(self, loan).release(deadline);
        let returned = if error == ENOMEM {
            // Wait for the release: the next attempt, with smaller chunks, needs the same memory.
            loans.iter().try_for_each(release)
        } else {
            Err(error)
        };
        if returned.is_err() {
            for loan in loans {
                BorrowedLoan::new(self, loan).release_deferred(WorkPriority::Background, ());
            }
        }
        returned.err().unwrap_or(error)
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

    /// Registers the region's name, if any, at the name owner.
    fn register_name(self: &Arc<Self>, region: &Region, deadline: Deadline) -> Result {
        let Some(name) = region.spec.name else {
            return Ok(());
        };
        let request = ControlRequest::RegisterName {
            name,
            region: region.id,
        };
        loop {
            let epoch = self.cluster.epoch();
            retry_until(deadline, || {
                let name_owner = self.cluster.name_owner(&name)?;
                Ok(self
                    .request(name_owner, &request, deadline)?
                    .expect_done()?)
            })?;
            region.set_name_registered();
            // From now on, each view change sends the name to the new name owner. Repeat if one was missed.
            if self.cluster.epoch() == epoch {
                return Ok(());
            }
        }
    }
}
