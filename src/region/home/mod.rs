// SPDX-License-Identifier: GPL-2.0

//! Region at its home: chunk placement, rights, mappers, locks and barriers.
//!
//! LITE (section 4) keeps this state at the node of the *master*, which created the region.
//!
//! # Locking
//!
//! - `Region::state` (mutex) protects [`RegionState`]: rights, mappers, move state and lock table. The mutex
//!   is never held while a request is sent.
//! - `Region::placement` (mutex) protects the chunk locations and loans, and nests inside `state`.
//! - `RegionTable::table` (mutex) protects the table of regions. No other lock is taken under the mutex.
//! - `teardown_refs` is atomic: the thread that drops the last reference starts the next teardown step.
//!
//! Callers of methods that may grant locks must then call [`super::MemoryService::notify_granted`].

pub(crate) mod acl;
pub(crate) mod lock_table;
pub(crate) mod migrate;
pub(crate) mod placement;
pub(crate) mod quiesce;
pub(crate) mod reclaim;

use self::{
    lock_table::{
        denied, EnqueueRequest, LockTable, WaitQueueKey, WaiterId, WaiterReservation as BlankTicket,
    },
    placement::Placement,
};
use super::lend::loan::NodeScopedId;
use crate::{errno, sys::memcg::Memcg};
use core::{convert::Infallible, mem::MaybeUninit};
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    new_mutex,
    prelude::*,
    rbtree::{RBTree, RBTreeNode},
    sync::{
        atomic::{Acquire, Atomic, AtomicFlag, Full, Release},
        Arc, Mutex, UniqueArc,
    },
};
use kite_core::{
    layout::Layout,
    name::Name,
    rights::Rights,
    sync::{
        lock::ReleaseReason,
        ticket::{AcquireKind, AcquireReply},
    },
    view::NodeInstance,
};

pub(crate) use self::acl::Grantee;

/// Request to add a mapper: a handle to the region on some node.
#[derive(Clone, Copy)]
pub(crate) struct MapRequest {
    pub(crate) node: u32,
    /// Number of the mapping at that node.
    pub(crate) mapping: u64,
    pub(crate) rights: Rights,
    /// User on whose behalf the region is mapped.
    pub(crate) uid: u32,
}

/// Rights of a mapper.
struct MapperInfo {
    rights: Rights,
    uid: u32,
    /// Set if the user has lost one of these rights, until the mapping has ended.
    revoked: bool,
}

struct RegionState {
    owner: u32,
    other_rights: Rights,
    /// Rights of users with an own entry.
    acl: RBTree<u32, Rights>,
    acl_len: u32,
    /// Mappers by node and mapping number. The number of entries is not limited.
    mappers: RBTree<(u32, u64), MapperInfo>,
    /// Number of mappers with `revoked` set.
    revoked_count: u32,
    /// Node and sequence number of the last grant request of another node.
    last_grant: Option<(NodeInstance, u64)>,
    mapping_count: u32,
    freeing: bool,
    move_state: MoveState,
    /// Locks and barriers of the region.
    lock_table: LockTable,
}

impl RegionState {
    fn check_rights(&self, node: u32, mapping: u64, rights: Rights) -> Result {
        let entry = self.mappers.get(&(node, mapping)).ok_or(ENOENT)?;
        // A mapper whose user has lost a right may not be marked yet.
        let is_allowed = !entry.revoked && self.rights_of(entry.uid).contains(entry.rights);
        let is_allowed = is_allowed && entry.rights.contains(rights);
        is_allowed.then_some(()).ok_or(EACCES)
    }

    /// Removes a mapper, if it exists.
    fn remove_mapper(&mut self, key: (u32, u64)) {
        if let Some(removed) = self.mappers.remove(&key) {
            self.mapping_count -= 1;
            self.revoked_count -= u32::from(removed.revoked);
        }
    }
}

/// Parameters of a region that do not change.
pub(crate) struct RegionSpec {
    pub(crate) name: Option<Name>,
    pub(crate) layout: Layout,
    pub(crate) owner: u32,
    /// Initial rights of users without an own entry.
    pub(crate) other_rights: Rights,
}

/// State of the moves of a region to other nodes.
#[derive(Default)]
struct MoveState {
    /// Last moves: requesting node, token chosen by that node, and result. The result is `None` while the
    /// move runs.
    recent: [((u32, u64), Option<Result>); MAX_MOVE_RESULTS],
    running: bool,
    /// Set while chunk locations may not be given out.
    frozen: bool,
}

/// Number of move results that are kept. A requester may query its result after other moves have started.
const MAX_MOVE_RESULTS: usize = 8;

/// Region at its home.
#[pin_data]
pub(crate) struct Region {
    pub(crate) id: u64,
    pub(crate) spec: RegionSpec,
    /// Set once the name is registered. View changes then send the name to its owner.
    name_registered: AtomicFlag,
    /// Number of items that the next teardown step waits for.
    teardown_refs: Atomic<u32>,
    /// Cgroup of the owner, charged for waiters and ACL entries.
    owner_memcg: Memcg,
    /// Nests inside `state`.
    #[pin]
    placement: Mutex<Placement>,
    #[pin]
    state: Mutex<RegionState>,
}

/// Memory for a region. Reserved before anything is borrowed, so that nothing can fail afterwards.
pub(crate) struct RegionReservation(UniqueArc<MaybeUninit<Region>>);

impl RegionReservation {
    /// Allocates the memory, charged to the caller.
    pub(crate) fn new() -> Result<Self> {
        Ok(Self(UniqueArc::new_uninit(GFP_KERNEL_ACCOUNT)?))
    }

    /// Initializes region `id` without mappers.
    pub(crate) fn fill(self, id: u64, spec: RegionSpec, placement: Placement) -> Arc<Region> {
        let state = RegionState {
            owner: spec.owner,
            other_rights: spec.other_rights,
            acl: RBTree::new(),
            acl_len: 0,
            revoked_count: 0,
            last_grant: None,
            mappers: RBTree::new(),
            mapping_count: 0,
            freeing: false,
            move_state: MoveState::default(),
            lock_table: LockTable::new(),
        };
        let Ok(region) = self.0.pin_init_with::<Infallible>(pin_init!(Region {
            id,
            spec,
            name_registered: AtomicFlag::new(false),
            teardown_refs: Atomic::new(0u32),
            owner_memcg: Memcg::current(),
            placement <- new_mutex!(placement),
            state <- new_mutex!(state),
        }));
        region.into()
    }
}

impl Region {
    /// Records that the name was registered.
    pub(crate) fn set_name_registered(&self) {
        self.name_registered.store(true, Release);
    }

    /// Returns the name if it is registered and the region is not being freed.
    pub(crate) fn published_name(&self) -> Option<Name> {
        self.spec
            .name
            .filter(|_| self.name_registered.load(Acquire) && !self.is_freeing())
    }

    /// Adds a mapper. Adding the same mapper again succeeds.
    ///
    /// # Errors
    ///
    /// - `EACCES`: the user does not have these rights, or has lost one.
    /// - `ENOENT`: the region is being freed.
    /// - `EINPROGRESS`: the region is moving.
    /// - `ENOMEM`: out of memory.
    pub(crate) fn map(&self, request: MapRequest) -> Result {
        let MapRequest { rights, uid, .. } = request;
        let key = (request.node, request.mapping);
        let mut state = self.state.lock();
        if rights.is_empty() || !state.rights_of(uid).contains(rights) {
            return Err(EACCES);
        }
        if state.freeing {
            return Err(ENOENT);
        }
        if state.mappers.get(&key).is_some() {
            return state.check_rights(request.node, request.mapping, rights);
        }
        if state.move_state.frozen {
            return Err(errno::inprogress());
        }
        let entry = MapperInfo {
            rights,
            uid,
            revoked: false,
        };
        state
            .mappers
            .try_create_and_insert(key, entry, GFP_KERNEL)?;
        state.mapping_count += 1;
        Ok(())
    }

    /// Runs `f` with allocations charged to the cgroup of the region's owner.
    pub(crate) fn with_owner_memcg<R>(&self, f: impl FnOnce() -> R) -> R {
        self.owner_memcg.with_active(f)
    }

    /// Removes a mapper, if it exists, and its waiters. May grant locks to other waiters.
    pub(crate) fn unmap(&self, node: u32, mapping: u64) {
        let mut state = self.state.lock();
        state.remove_mapper((node, mapping));
        if !state.freeing {
            let is_gone = |waiter_id: WaiterId, waiter_mapping, _| {
                waiter_id.instance.node == node && waiter_mapping == mapping
            };
            state.lock_table.remove_gone(is_gone);
        }
    }

    /// Allocates a waiter, charged to the region's owner.
    pub(crate) fn reserve_waiter(&self) -> Result<BlankTicket> {
        BlankTicket::new(&self.owner_memcg)
    }

    /// Adds a waiter of a mapper. May produce notifications for other waiters.
    pub(crate) fn enqueue_waiter(
        &self,
        request: &EnqueueRequest,
        reservation: BlankTicket,
    ) -> AcquireReply {
        let needed = match request.kind {
            AcquireKind::Lock { shared: true } => Rights::READ,
            _ => Rights::WRITE,
        };
        let mut state = self.state.lock();
        let allowed = if state.freeing {
            Err(ENOENT)
        } else {
            state.check_rights(request.waiter_id.instance.node, request.mapping, needed)
        };
        match allowed {
            Ok(()) => state.lock_table.enqueue(request, reservation),
            Err(error) => denied(error),
        }
    }

    /// Removes a waiter. May grant the lock to other waiters.
    pub(crate) fn remove_waiter(
        &self,
        queue_key: WaitQueueKey,
        waiter_id: WaiterId,
        reason: ReleaseReason,
    ) {
        self.state
            .lock()
            .lock_table
            .remove_waiter(queue_key, waiter_id, reason);
    }

    /// Removes the waiters of nodes for which `is_gone` returns `true`. `is_gone` must return `true` only
    /// when the node can no longer access memory as owner. May grant locks to other waiters.
    pub(crate) fn remove_dead_waiters(&self, is_gone: impl Fn(NodeInstance) -> bool) {
        let mut state = self.state.lock();
        state
            .lock_table
            .remove_gone(|waiter_id, _, _| is_gone(waiter_id.instance));
    }

    /// Claims a notification in one wait queue ([`LockTable::claim_notification`]), or in any if `queue_key`
    /// is `None` ([`LockTable::claim_any_notification`]).
    pub(crate) fn claim_notification(
        &self,
        queue_key: Option<WaitQueueKey>,
    ) -> Option<(WaitQueueKey, u32)> {
        let mut state = self.state.lock();
        match queue_key {
            Some(queue_key) => Some((queue_key, state.lock_table.claim_notification(queue_key)?)),
            None => state.lock_table.claim_any_notification(),
        }
    }

    /// See [`LockTable::notification_for`].
    pub(crate) fn notification_for(
        &self,
        queue_key: WaitQueueKey,
        instance: NodeInstance,
    ) -> Option<(u64, AcquireReply)> {
        self.state
            .lock()
            .lock_table
            .notification_for(queue_key, instance)
    }

    /// See [`LockTable::ack_notification`].
    pub(crate) fn ack_notification(&self, queue_key: WaitQueueKey, waiter_id: WaiterId) {
        self.state
            .lock()
            .lock_table
            .ack_notification(queue_key, waiter_id);
    }

    /// Removes all mappers of a dead node. Their waiters stay until [`Self::remove_dead_waiters`].
    pub(crate) fn remove_node_mappers(&self, node: u32) {
        let mut state = self.state.lock();
        while let Some(key) = state
            .mappers
            .cursor_lower_bound(&(node, 0))
            .map(|cursor| *cursor.current().0)
            .filter(|key| key.0 == node)
        {
            state.remove_mapper(key);
        }
    }

    /// Returns the number of mappers.
    pub(crate) fn mapping_count(&self) -> u32 {
        self.state.lock().mapping_count
    }

    /// Returns the nodes with a mapping, in ascending order. Nodes added during the iteration may be missed.
    pub(crate) fn mapper_nodes(&self) -> impl Iterator<Item = u32> + '_ {
        let mut last = 0;
        core::iter::from_fn(move || {
            last = self.mapper_at_or_after(last + 1, 0)?.0;
            Some(last)
        })
    }

    /// Returns the first mapping of a node whose number is at least `mapping`.
    pub(crate) fn next_mapping_of(&self, node: u32, mapping: u64) -> Option<u64> {
        let found = self.mapper_at_or_after(node, mapping);
        found.filter(|mapper| mapper.0 == node).map(|found| found.1)
    }

    /// Returns the first mapper at or after this key.
    fn mapper_at_or_after(&self, node: u32, mapping: u64) -> Option<(u32, u64)> {
        let state = self.state.lock();
        let cursor = state.mappers.cursor_lower_bound(&(node, mapping))?;
        Some(*cursor.current().0)
    }

    /// Adds an item that the next teardown step waits for.
    pub(crate) fn get_teardown(&self) {
        self.teardown_refs.fetch_add(1u32, Full);
    }

    /// Drops such an item. Returns `true` if it was the last.
    pub(crate) fn put_teardown(&self) -> bool {
        self.teardown_refs.fetch_sub(1u32, Full) == 1
    }

    /// Starts freeing the region on behalf of a mapper. Returns `true` if the caller must reclaim the region
    /// now: freeing was not started before, and no move is running. All mappings are then invalidated,
    /// including the one of the caller, whose session may still use it.
    ///
    /// # Errors
    ///
    /// - `EACCES`: the mapper is not a master.
    /// - `ENOENT`: the mapper does not exist.
    pub(crate) fn start_free(&self, node: u32, mapping: u64) -> Result<bool> {
        let mut state = self.state.lock();
        if state.freeing {
            return Ok(false);
        }
        state.check_rights(node, mapping, Rights::MASTER)?;
        state.freeing = true;
        Ok(!state.move_state.running)
    }

    /// Starts a move of the region on behalf of a mapper, which chose `token`.
    ///
    /// # Errors
    ///
    /// - `EBUSY`: a move is running.
    /// - `EACCES`: the mapper is not a master.
    /// - `ENOENT`: the mapper does not exist, or the region is being freed.
    pub(crate) fn start_move(&self, node: u32, mapping: u64, token: u64) -> Result {
        let mut state = self.state.lock();
        if state.freeing {
            return Err(ENOENT);
        }
        state.check_rights(node, mapping, Rights::MASTER)?;
        if state.move_state.running {
            return Err(EBUSY);
        }
        state.move_state.running = true;
        state.move_state.recent.rotate_right(1);
        state.move_state.recent[0] = ((node, token), None);
        Ok(())
    }

    /// Records the result of the move. Returns `true` if the region was freed meanwhile, so the caller must
    /// reclaim it.
    pub(crate) fn finish_move(&self, result: Result) -> bool {
        let mut state = self.state.lock();
        state.move_state.running = false;
        state.move_state.recent[0].1 = Some(result);
        state.freeing
    }

    /// Returns the result of a move.
    ///
    /// # Errors
    ///
    /// - `EINPROGRESS`: the move is running.
    /// - `ENOENT`: the move is not among the last [`MAX_MOVE_RESULTS`].
    /// - Other errors: the error of the move.
    pub(crate) fn move_result(&self, node: u32, token: u64) -> Result {
        let state = self.state.lock();
        let mut recent = state.move_state.recent.iter();
        let (_, result) = recent
            .find(|(requester, _)| *requester == (node, token))
            .ok_or(ENOENT)?;
        result.unwrap_or_else(|| Err(errno::inprogress()))
    }

    /// Blocks or allows new mappers.
    pub(crate) fn set_frozen(&self, frozen: bool) {
        self.state.lock().move_state.frozen = frozen;
    }

    /// Runs `f` with the placement of the chunks locked.
    pub(crate) fn with_placement<R>(&self, f: impl FnOnce(&mut Placement) -> R) -> R {
        f(&mut self.placement.lock())
    }

    /// Returns the loans of the region.
    pub(crate) fn loans(&self) -> impl Iterator<Item = NodeScopedId> + '_ {
        let mut next = 0;
        core::iter::from_fn(move || {
            let loan = self.with_placement(|placement| placement.loans().flatten().nth(next));
            next += 1;
            loan
        })
    }

    /// Checks that a mapper has these rights.
    ///
    /// # Errors
    ///
    /// - `EACCES`: the mapper lacks a right.
    /// - `ENOENT`: the mapper does not exist, or the region is being freed.
    pub(crate) fn check_rights(&self, node: u32, mapping: u64, rights: Rights) -> Result {
        let state = self.state.lock();
        if state.freeing {
            return Err(ENOENT);
        }
        state.check_rights(node, mapping, rights)
    }

    /// Marks a region as freeing because its creation failed: a peer may have mapped the region already.
    /// Returns `true` in the cases of [`Self::start_free`].
    pub(crate) fn mark_freeing(&self) -> bool {
        let mut state = self.state.lock();
        let is_first = !state.freeing;
        state.freeing = true;
        is_first && !state.move_state.running
    }

    /// Returns `true` if the region is being freed.
    pub(crate) fn is_freeing(&self) -> bool {
        self.state.lock().freeing
    }
}

/// Regions whose home is this node, by number.
#[pin_data]
pub(crate) struct RegionTable {
    #[pin]
    table: Mutex<RBTree<u64, Arc<Region>>>,
}

impl RegionTable {
    /// Creates an empty table.
    pub(crate) fn new() -> impl PinInit<Self> {
        pin_init!(Self { table <- new_mutex!(RBTree::new()) })
    }

    /// Adds a region.
    pub(crate) fn insert(&self, region: Arc<Region>) -> Result {
        // Allocate without the lock: a charged allocation can sleep at the limit of its cgroup.
        let node = RBTreeNode::new(region.id, region, GFP_KERNEL_ACCOUNT)?;
        self.table.lock().insert(node);
        Ok(())
    }

    /// Returns the region with this number.
    ///
    /// # Errors
    ///
    /// - `ENOENT`: no such region.
    pub(crate) fn get(&self, id: u64) -> Result<Arc<Region>> {
        self.table.lock().get(&id).cloned().ok_or(ENOENT)
    }

    /// Returns the region with the lowest number that is at least `id`.
    pub(crate) fn at_or_after(&self, id: u64) -> Option<Arc<Region>> {
        let table = self.table.lock();
        let cursor = table.cursor_lower_bound(&id)?;
        Some(cursor.current().1.clone())
    }

    /// Returns all regions, in ascending order of their numbers. Regions added or removed during the
    /// iteration may be missed.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Arc<Region>> + '_ {
        let mut next = 0;
        core::iter::from_fn(move || {
            let region = self.at_or_after(next)?;
            next = region.id + 1;
            Some(region)
        })
    }

    /// Removes the region with this number and returns it.
    pub(crate) fn remove(&self, id: u64) -> Option<Arc<Region>> {
        self.table.lock().remove(&id)
    }
}
