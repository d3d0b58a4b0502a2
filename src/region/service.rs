// SPDX-License-Identifier: GPL-2.0

//! Memory service of one RNIC: tables and workqueues of the regions, loans and mappings of this node.
//!
//! # Operation
//!
//! The operations are methods of own types in the modules of this folder. They reach the tables and the
//! workqueues through the methods of [`MemoryService`].
//!
//! # Locking
//!
//! - `view_change_lock` (mutex) serializes view changes and leaving. The holder flushes `request_queue` and
//!   destroys workqueues, so no work item may take the lock.
//! - The tables have their own locks, described in their modules.

use super::{
    home::Region,
    lend::{
        loan::{LendLimits, LentChunk, LoanTable, NodeScopedId},
        push::ActivePushes,
    },
    locks::local_waiters::LocalWaiters,
    map::{chunk_map::MappedChunk, Mapping},
    table::IdTable,
};
use crate::{
    bindings,
    cluster::Cluster,
    control::{client::ControlClient, priority::WorkPriority, workqueues::PeerWorkqueues},
    errno,
    fabric::{conn::credit::StaleQp, Fabric},
    stats::Stats,
    sys::{deadline::Deadline, workqueue::OwnedQueue},
};
use kernel::{
    new_mutex,
    prelude::*,
    static_lock_class,
    sync::{
        atomic::{Atomic, Relaxed},
        Arc, Mutex, MutexGuard,
    },
};
use kite_core::{
    rights::Rights,
    view::NodeInstance,
    wire::{ChunkLocation, ControlHeader, ControlRequest},
};

/// Maximum number of requests served concurrently.
const REQUESTS_MAX_ACTIVE: c_int = 32;

/// Maximum number of requests for memory served concurrently, which clear the memory. Other requests do not
/// wait for them.
const LOAN_REQUESTS_MAX_ACTIVE: c_int = 4;

/// Maximum number of regions of this node that move concurrently.
const MOVES_MAX_ACTIVE: c_int = 8;

/// Memory service of one RNIC.
#[pin_data]
pub(crate) struct MemoryService {
    #[pin]
    pub(crate) cluster: Cluster,
    #[pin]
    loans: LoanTable,
    #[pin]
    regions: IdTable<Region>,
    #[pin]
    mappings: IdTable<Mapping>,
    #[pin]
    waiters: LocalWaiters,
    /// Next number for a region, loan or mapping.
    next_id: Atomic<u64>,
    #[pin]
    active_pushes: ActivePushes,
    /// Serializes view changes and leaving the cluster.
    #[pin]
    view_change_lock: Mutex<()>,
    /// Serves requests. No item on this queue waits for another node.
    request_queue: OwnedQueue,
    /// Serves requests that take long, in the same way.
    loan_request_queue: OwnedQueue,
    /// Moves regions of which this node is the home.
    move_queue: OwnedQueue,
    /// Requests to other nodes for which a caller waits.
    #[pin]
    foreground_queues: PeerWorkqueues,
    /// Requests to other nodes for locks and barriers.
    #[pin]
    lock_queues: PeerWorkqueues,
    /// Requests to other nodes for which no caller waits.
    #[pin]
    background_queues: PeerWorkqueues,
    /// Returned loans, one set for each of the two priorities. Returns wait for unreachable lenders, so they
    /// have separate queues.
    #[pin]
    foreground_loan_queues: PeerWorkqueues,
    #[pin]
    background_loan_queues: PeerWorkqueues,
    /// Announcements of names and addresses. No member grants memory or names before these arrive, so they
    /// have separate queues.
    #[pin]
    announce_queues: PeerWorkqueues,
    pub(crate) stats: Arc<Stats>,
}

impl MemoryService {
    /// Creates the service.
    pub(crate) fn new(fabric: Arc<Fabric>, limits: LendLimits) -> Result<Arc<Self>> {
        let (device, stats) = (fabric.device(), fabric.stats.clone());
        Arc::pin_init(
            try_pin_init!(Self {
                cluster <- Cluster::new(fabric),
                loans <- LoanTable::new(device, limits, stats.clone()),
                regions <- IdTable::new(c"MemoryService::regions", static_lock_class!()),
                mappings <- IdTable::new(c"MemoryService::mappings", static_lock_class!()),
                waiters <- LocalWaiters::new(),
                active_pushes <- ActivePushes::new(),
                // Start at a random number: numbers of an earlier incarnation of this node must not be
                // reused.
                //
                // SAFETY: The function has no preconditions.
                next_id: Atomic::new(u64::from(unsafe { bindings::get_random_u32() } >> 1) << 32 | 1),
                view_change_lock <- new_mutex!((), "MemoryService::view_change_lock"),
                request_queue: OwnedQueue::new(c"kite_requests", REQUESTS_MAX_ACTIVE)?,
                loan_request_queue: OwnedQueue::new(
                    c"kite_loan_requests",
                    LOAN_REQUESTS_MAX_ACTIVE,
                )?,
                move_queue: OwnedQueue::new(c"kite_moves", MOVES_MAX_ACTIVE)?,
                foreground_queues <- PeerWorkqueues::new(c"kite_foreground"),
                lock_queues <- PeerWorkqueues::new(c"kite_locks"),
                background_queues <- PeerWorkqueues::new(c"kite_background"),
                foreground_loan_queues <- PeerWorkqueues::new(c"kite_loans_fg"),
                background_loan_queues <- PeerWorkqueues::new(c"kite_loans_bg"),
                announce_queues <- PeerWorkqueues::new(c"kite_announce"),
                stats,
            }),
            GFP_KERNEL,
        )
    }

    /// Waits until this incarnation of another node replies to a request. The request takes the RC
    /// connections, so a reply shows that the RDMA network and the kernel of the node work.
    ///
    /// # Errors
    ///
    /// - `EHOSTDOWN`: the node is not a reachable member in this incarnation.
    /// - `EHOSTUNREACH`: there is no view.
    /// - `ETIMEDOUT`, `EINTR`: see [`Deadline::check`].
    /// - `ENOMEM`: out of memory.
    pub(crate) fn probe(&self, instance: NodeInstance, deadline: Deadline) -> Result {
        self.cluster.local_node()?;
        let peer = self.fabric().peer_by_instance(instance)?;
        self.request_peer(&peer, &ControlRequest::Probe, deadline)?;
        Ok(())
    }

    /// Returns the fabric of the RNIC.
    pub(crate) fn fabric(&self) -> &Arc<Fabric> {
        &self.cluster.fabric
    }

    /// Returns the loans of this node.
    pub(super) fn loans(&self) -> &LoanTable {
        &self.loans
    }

    /// Returns a chunk that this node lends to a region.
    ///
    /// # Errors
    ///
    /// - `ESTALE`: the chunk is not lent to that region any longer.
    /// - `EHOSTDOWN`: the home of the region died or is unreachable.
    pub(super) fn find_lent_chunk(
        &self,
        region: NodeScopedId,
        addr: u64,
    ) -> Result<Arc<LentChunk>> {
        // Check the view first: otherwise a chunk of a dead home would be reported as freed.
        self.cluster.instance_of(region.0)?;
        self.loans.find_chunk(region, addr).ok_or_else(errno::stale)
    }

    /// Resolves a chunk location sent by another node. The chunk has `size` bytes.
    ///
    /// # Errors
    ///
    /// - `EIO`: the address is invalid.
    /// - `EHOSTDOWN`: this node does not lend the chunk any longer, or has left the cluster.
    pub(super) fn resolve_chunk(
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
        let found = self.loans.find_chunk(region, location.addr);
        found.map(MappedChunk::Local).ok_or_else(errno::hostdown)
    }

    /// Returns `true` if nothing sent by a mapping that has ended can still arrive. QPs to nodes that were
    /// fenced since do not count. So a caller must read the epoch after this call.
    pub(crate) fn is_drained(&self, mapping: &Mapping) -> bool {
        mapping.is_drained(|stale_qp| self.is_stale_qp_drained(stale_qp))
    }

    /// Returns `true` if no packet of the QP can arrive at memory that its peer has given to another use. A
    /// fenced peer destroys its QPs before this node connects to it again.
    pub(crate) fn is_stale_qp_drained(&self, stale_qp: &StaleQp) -> bool {
        let (instance, admission) = stale_qp.peer();
        stale_qp.is_fenced() || !self.cluster.is_connected(instance, admission)
    }

    /// Returns the region of this home with this number.
    ///
    /// # Errors
    ///
    /// - `ENOENT`: no such region.
    pub(super) fn region(&self, id: u64) -> Result<Arc<Region>> {
        self.regions.get(id)
    }

    /// Checks that a node has mapped a region of this home with these rights.
    ///
    /// # Errors
    ///
    /// See [`Region::check_rights`].
    pub(crate) fn check_mapper_rights(
        &self,
        region: u64,
        node: u32,
        mapping: u64,
        rights: Rights,
    ) -> Result {
        self.region(region)?.check_rights(node, mapping, rights)
    }

    /// Returns all regions of this home. See [`IdTable::iter`].
    pub(super) fn regions(&self) -> impl Iterator<Item = Arc<Region>> + '_ {
        self.regions.iter()
    }

    /// Returns the region of this home with the lowest number that is at least `id`.
    pub(super) fn region_at_or_after(&self, id: u64) -> Option<Arc<Region>> {
        self.regions.at_or_after(id)
    }

    /// Adds a region of this home.
    ///
    /// # Errors
    ///
    /// See [`IdTable::insert`].
    pub(super) fn add_region(&self, region: Arc<Region>) -> Result {
        self.regions.insert(region)?;
        self.stats.regions.add(1);
        Ok(())
    }

    /// Removes a region of this home, if the region is in the table.
    pub(super) fn remove_region(&self, id: u64) {
        if self.regions.remove(id).is_some() {
            self.stats.regions.sub(1);
        }
    }

    /// Returns the mapping of this node with this number.
    ///
    /// # Errors
    ///
    /// - `ENOENT`: no such mapping.
    pub(super) fn mapping(&self, id: u64) -> Result<Arc<Mapping>> {
        self.mappings.get(id)
    }

    /// Returns all mappings of this node. See [`IdTable::iter`].
    pub(super) fn mappings(&self) -> impl Iterator<Item = Arc<Mapping>> + '_ {
        self.mappings.iter()
    }

    /// Adds a mapping of this node.
    ///
    /// # Errors
    ///
    /// See [`IdTable::insert`].
    pub(super) fn add_mapping(&self, mapping: Arc<Mapping>) -> Result {
        self.mappings.insert(mapping)
    }

    /// Removes a mapping of this node, if the mapping is in the table.
    pub(super) fn remove_mapping(&self, id: u64) {
        self.mappings.remove(id);
    }

    /// Returns the threads of this node that wait for a lock or at a barrier.
    pub(super) fn waiters(&self) -> &LocalWaiters {
        &self.waiters
    }

    /// Returns the pushes in progress.
    pub(super) fn active_pushes(&self) -> &ActivePushes {
        &self.active_pushes
    }

    /// Returns a new number for a region, loan or mapping.
    pub(super) fn new_id(&self) -> u64 {
        self.next_id.fetch_add(1u64, Relaxed)
    }

    /// Waits for other view changes. No view change starts while the guard is held.
    pub(super) fn lock_view_changes(&self) -> MutexGuard<'_, ()> {
        self.view_change_lock.lock()
    }

    /// Returns the workqueue that serves requests.
    pub(super) fn request_queue(&self) -> &OwnedQueue {
        &self.request_queue
    }

    /// Returns the workqueue that serves this request of a peer.
    pub(super) fn queue_for(&self, request: &ControlRequest<'_>) -> &OwnedQueue {
        if request.is_long() {
            &self.loan_request_queue
        } else {
            &self.request_queue
        }
    }

    /// Waits until all requests received so far are served. After [`Self::leave`] the remaining ones have no
    /// effect.
    pub(crate) fn flush_requests(&self) {
        self.loan_request_queue.flush();
        self.request_queue.flush();
    }

    /// Returns the workqueue that moves regions of this home.
    pub(super) fn move_queue(&self) -> &OwnedQueue {
        &self.move_queue
    }

    /// Returns the workqueues that announce names and addresses.
    pub(super) fn announce_queues(&self) -> &PeerWorkqueues {
        &self.announce_queues
    }

    /// Returns the workqueues for returned loans.
    pub(super) fn loan_queues_for(&self, priority: WorkPriority) -> &PeerWorkqueues {
        match priority {
            WorkPriority::Background => &self.background_loan_queues,
            WorkPriority::Foreground | WorkPriority::Lock => &self.foreground_loan_queues,
        }
    }

    /// Destroys the workqueues of all nodes for which `is_removed` returns `true`.
    pub(super) fn destroy_removed_queues(&self, is_removed: impl Fn(NodeInstance) -> bool) {
        for workqueues in [
            &self.lock_queues,
            &self.foreground_queues,
            &self.background_queues,
            &self.foreground_loan_queues,
            &self.background_loan_queues,
            &self.announce_queues,
        ] {
            workqueues.destroy_removed(&is_removed);
        }
    }
}

impl ControlClient for MemoryService {
    fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    fn workqueues_for(&self, priority: WorkPriority) -> &PeerWorkqueues {
        match priority {
            WorkPriority::Lock => &self.lock_queues,
            WorkPriority::Foreground => &self.foreground_queues,
            WorkPriority::Background => &self.background_queues,
        }
    }

    fn serve_local(
        self: &Arc<Self>,
        node: u32,
        header: &ControlHeader,
        request: &ControlRequest<'_>,
        out: &mut [u8],
    ) -> usize {
        self.serve(node, header, request, out)
    }
}
