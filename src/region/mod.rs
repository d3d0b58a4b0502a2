// SPDX-License-Identifier: GPL-2.0

//! Local memory regions (LMRs): named memory that any set of nodes lends, used through handles (LITE, section
//! 4).
//!
//! # Operation
//!
//! A node has up to four roles for a region. As *lender* it lends memory ([`lend::loan`]). As *home* it
//! manages the region ([`home`]). As *name owner* it resolves the name ([`crate::cluster`]). As *mapper* it
//! accesses the region ([`map`]). The roles exchange the control requests of `kite_core::wire`. A node with
//! several roles serves its own requests directly ([`ControlClient::request_with_retry`]).
//!
//! # Recovery
//!
//! Serving a request never waits for another node ([`serve`]). Work that needs other nodes, such as freeing a
//! region, runs on workqueues ([`crate::control`], [`home::reclaim`], [`view_change`]). No thread waits for
//! that work while it holds a lock or a credit.
//!
//! # Locking
//!
//! - `view_change_lock` (mutex) serializes view changes and leaving. The holder flushes `request_queue` and
//!   destroys workqueues, so no work item may take the lock.
//! - The tables have their own locks, described in their modules.

pub(crate) mod alloc;
pub(crate) mod grant;
pub(crate) mod home;
pub(crate) mod kernel_atomic;
pub(crate) mod lend;
pub(crate) mod locks;
pub(crate) mod map;
pub(crate) mod serve;
mod table;
pub(crate) mod view_change;

use self::{
    home::Region,
    lend::{
        loan::{LendLimits, LoanTable},
        push::ActivePushes,
    },
    locks::local_waiters::LocalWaiters,
    map::Mapping,
    table::IdTable,
};
use crate::{
    bindings,
    cluster::Cluster,
    control::{client::ControlClient, priority::WorkPriority, workqueues::PeerWorkqueues},
    fabric::Fabric,
    stats::Stats,
    sys::workqueue::OwnedQueue,
};
use kernel::{
    new_mutex,
    prelude::*,
    static_lock_class,
    sync::{
        atomic::{Atomic, Relaxed},
        Arc, Mutex,
    },
};
use kite_core::wire::{ControlHeader, ControlRequest};

/// Maximum number of requests served concurrently.
const REQUESTS_MAX_ACTIVE: c_int = 32;

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
                move_queue: OwnedQueue::new(c"kite_moves", MOVES_MAX_ACTIVE)?,
                foreground_queues <- PeerWorkqueues::new(c"kite_foreground"),
                lock_queues <- PeerWorkqueues::new(c"kite_locks"),
                background_queues <- PeerWorkqueues::new(c"kite_background"),
                announce_queues <- PeerWorkqueues::new(c"kite_announce"),
                stats,
            }),
            GFP_KERNEL,
        )
    }

    /// Returns the fabric of the RNIC.
    pub(crate) fn fabric(&self) -> &Arc<Fabric> {
        &self.cluster.fabric
    }

    /// Returns the workqueues of all kinds.
    fn all_workqueues(&self) -> [&PeerWorkqueues; 4] {
        [
            &self.lock_queues,
            &self.foreground_queues,
            &self.background_queues,
            &self.announce_queues,
        ]
    }

    fn new_id(&self) -> u64 {
        self.next_id.fetch_add(1u64, Relaxed)
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
