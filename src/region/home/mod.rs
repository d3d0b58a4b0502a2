// SPDX-License-Identifier: GPL-2.0

//! A region at its home: what it is made of, who may use it, and who has it mapped.
//!
//! LITE (section 4) keeps this at the node of the *master*, the one that made the region.

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

/// A handle on the region somewhere in the cluster.
#[derive(Clone, Copy)]
pub(crate) struct MapRequest {
    pub(crate) node: u32,
    /// Number of the mapping at that node.
    pub(crate) mapping: u64,
    pub(crate) rights: Rights,
    /// For whom it is.
    pub(crate) uid: u32,
}

/// What is known of a mapper.
struct MapperInfo {
    rights: Rights,
    uid: u32,
    /// The user has lost one of these rights, and the mapping is to end.
    revoked: bool,
}

struct RegionState {
    owner: u32,
    other_rights: Rights,
    /// Rights of users that were named.
    acl: RBTree<u32, Rights>,
    acl_len: u32,
    /// By node and number of the mapping. There may be very many.
    mappers: RBTree<(u32, u64), MapperInfo>,
    /// Of them, those that are revoked.
    revoked_count: u32,
    /// The last request of another node to change rights.
    last_grant: Option<(NodeInstance, u64)>,
    mapping_count: u32,
    freeing: bool,
    move_state: MoveState,
    /// Of its locks and barriers.
    lock_table: LockTable,
}

impl RegionState {
    fn check_rights(&self, node: u32, mapping: u64, rights: Rights) -> Result {
        let entry = self.mappers.get(&(node, mapping)).ok_or(ENOENT)?;
        // Who lost a right may not be marked yet.
        let is_allowed = !entry.revoked && self.rights_of(entry.uid).contains(entry.rights);
        let is_allowed = is_allowed && entry.rights.contains(rights);
        is_allowed.then_some(()).ok_or(EACCES)
    }

    /// Removes a mapper, if it is there.
    fn remove_mapper(&mut self, key: (u32, u64)) {
        if let Some(removed) = self.mappers.remove(&key) {
            self.mapping_count -= 1;
            self.revoked_count -= u32::from(removed.revoked);
        }
    }
}

/// What a region is, for as long as it lives.
pub(crate) struct RegionSpec {
    pub(crate) name: Option<Name>,
    pub(crate) layout: Layout,
    pub(crate) owner: u32,
    /// At first.
    pub(crate) other_rights: Rights,
}

/// A move of a region to other nodes.
#[derive(Default)]
struct MoveState {
    /// Who asked for the last few: the node, and a number of its choice; and what came of it, when it is over.
    recent: [((u32, u64), Option<Result>); MAX_MOVE_RESULTS],
    running: bool,
    /// Nobody may learn where the region is.
    frozen: bool,
}

/// Who asks what came of a move may be late: another may have begun.
const MAX_MOVE_RESULTS: usize = 8;

/// A region.
#[pin_data]
pub(crate) struct Region {
    pub(crate) id: u64,
    pub(crate) spec: RegionSpec,
    /// Whether its name was granted, and is to be told to whoever keeps it.
    name_registered: AtomicFlag,
    /// What the next step of its end waits for.
    teardown_refs: Atomic<u32>,
    /// For who waits in its lines.
    owner_memcg: Memcg,
    /// Taken after `state`.
    #[pin]
    placement: Mutex<Placement>,
    #[pin]
    state: Mutex<RegionState>,
}

/// Memory for a region. It is there before anything is leased, so that from then on nothing can fail.
pub(crate) struct RegionReservation(UniqueArc<MaybeUninit<Region>>);

impl RegionReservation {
    /// Gets the memory, charged to the caller.
    pub(crate) fn new() -> Result<Self> {
        Ok(Self(UniqueArc::new_uninit(GFP_KERNEL_ACCOUNT)?))
    }

    /// Makes region `id`, which nobody has mapped.
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
    /// The name was granted.
    pub(crate) fn set_name_registered(&self) {
        self.name_registered.store(true, Release);
    }

    /// The name that others are to know: granted, and of a region that is not being freed.
    pub(crate) fn published_name(&self) -> Option<Name> {
        self.spec
            .name
            .filter(|_| self.name_registered.load(Acquire) && !self.is_freeing())
    }

    /// Enters a mapper. Entering the same twice is fine.
    ///
    /// # Errors
    ///
    /// - `EACCES` if its user has not these rights, or no more.
    /// - `ENOENT` if the region is being freed; `EINPROGRESS` while it may not be used.
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

    /// Has the region's owner pay for the memory that `f` gets.
    pub(crate) fn with_owner_memcg<R>(&self, f: impl FnOnce() -> R) -> R {
        self.owner_memcg.with_active(f)
    }

    /// Removes a mapper, if it is there, and its tickets. Others may have news then.
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

    /// Memory for a ticket, for which the region's owner pays.
    pub(crate) fn reserve_waiter(&self) -> Result<BlankTicket> {
        BlankTicket::new(&self.owner_memcg)
    }

    /// Gives a mapper a ticket. Others may have news then.
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

    /// Ends a ticket. Others may have news then.
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

    /// Ends the tickets of those who are gone, when they can do no more harm. Others may have news then.
    pub(crate) fn remove_dead_waiters(&self, is_gone: impl Fn(NodeInstance) -> bool) {
        let mut state = self.state.lock();
        state
            .lock_table
            .remove_gone(|waiter_id, _, _| is_gone(waiter_id.instance));
    }

    /// As [`Lines::take_news`]; without a place, [`Lines::take_any_news`].
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

    /// See [`Lines::news_of`].
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

    /// See [`Lines::heard`].
    pub(crate) fn ack_notification(&self, queue_key: WaitQueueKey, waiter_id: WaiterId) {
        self.state
            .lock()
            .lock_table
            .ack_notification(queue_key, waiter_id);
    }

    /// Removes all mappers of a dead node. Their tickets stay until [`Self::bury`].
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

    /// The number of mappers.
    pub(crate) fn mapping_count(&self) -> u32 {
        self.state.lock().mapping_count
    }

    /// The nodes that have it mapped, in order of their numbers. One that comes meanwhile may be missed.
    pub(crate) fn mapper_nodes(&self) -> impl Iterator<Item = u32> + '_ {
        let mut last = 0;
        core::iter::from_fn(move || {
            last = self.mapper_at_or_after(last + 1, 0)?.0;
            Some(last)
        })
    }

    /// The first mapping of it on `node`, from number `mapping` on.
    pub(crate) fn next_mapping_of(&self, node: u32, mapping: u64) -> Option<u64> {
        let found = self.mapper_at_or_after(node, mapping);
        found.filter(|mapper| mapper.0 == node).map(|found| found.1)
    }

    /// The first mapper from that one on.
    fn mapper_at_or_after(&self, node: u32, mapping: u64) -> Option<(u32, u64)> {
        let state = self.state.lock();
        let cursor = state.mappers.cursor_lower_bound(&(node, mapping))?;
        Some(*cursor.current().0)
    }

    /// Adds something that the next step of its end waits for.
    pub(crate) fn get_teardown(&self) {
        self.teardown_refs.fetch_add(1u32, Full);
    }

    /// Takes that back. Returns whether there is nothing more to wait for.
    pub(crate) fn put_teardown(&self) -> bool {
        self.teardown_refs.fetch_sub(1u32, Full) == 1
    }

    /// Begins to free the region on behalf of a mapper. Returns whether it was not begun before, and does not
    /// have to wait for the end of a move. All mappings are then to be invalidated, that one too: its session may
    /// be using it this moment.
    ///
    /// # Errors
    ///
    /// - `EACCES` if the mapper is not a master.
    /// - `ENOENT` if it is none at all.
    pub(crate) fn start_free(&self, node: u32, mapping: u64) -> Result<bool> {
        let mut state = self.state.lock();
        if state.freeing {
            return Ok(false);
        }
        state.check_rights(node, mapping, Rights::MASTER)?;
        state.freeing = true;
        Ok(!state.move_state.running)
    }

    /// Begins to move the region on behalf of a mapper, who chose that number for it.
    ///
    /// # Errors
    ///
    /// - `EBUSY` if it is moving already.
    /// - `EACCES` if the mapper is not a master.
    /// - `ENOENT` if it is none at all, or the region is being freed.
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

    /// The move is over. Returns whether the region was freed meanwhile, and is to be taken apart.
    pub(crate) fn finish_move(&self, result: Result) -> bool {
        let mut state = self.state.lock();
        state.move_state.running = false;
        state.move_state.recent[0].1 = Some(result);
        state.freeing
    }

    /// What came of a move.
    ///
    /// # Errors
    ///
    /// That of the move; `EINPROGRESS` while it goes on; `ENOENT` if it is not known any more.
    pub(crate) fn move_result(&self, node: u32, token: u64) -> Result {
        let state = self.state.lock();
        let mut recent = state.move_state.recent.iter();
        let (_, result) = recent
            .find(|(requester, _)| *requester == (node, token))
            .ok_or(ENOENT)?;
        result.unwrap_or_else(|| Err(errno::inprogress()))
    }

    /// Lets nobody map it, or whoever likes again.
    pub(crate) fn set_frozen(&self, frozen: bool) {
        self.state.lock().move_state.frozen = frozen;
    }

    /// Where its chunks are.
    pub(crate) fn with_placement<R>(&self, f: impl FnOnce(&mut Placement) -> R) -> R {
        f(&mut self.placement.lock())
    }

    /// Its leases.
    pub(crate) fn loans(&self) -> impl Iterator<Item = NodeScopedId> + '_ {
        let mut next = 0;
        core::iter::from_fn(move || {
            let loan = self.with_placement(|placement| placement.loans().flatten().nth(next));
            next += 1;
            loan
        })
    }

    /// Whether a mapper has these rights.
    ///
    /// # Errors
    ///
    /// `EACCES` if it has not; `ENOENT` if it is none, or the region is being freed.
    pub(crate) fn check_rights(&self, node: u32, mapping: u64, rights: Rights) -> Result {
        let state = self.state.lock();
        if state.freeing {
            return Err(ENOENT);
        }
        state.check_rights(node, mapping, rights)
    }

    /// Keeps everybody from mapping a region that is given up before it was complete. As for
    /// [`Self::begin_free`]: somebody may have found it already.
    pub(crate) fn mark_freeing(&self) -> bool {
        let mut state = self.state.lock();
        let is_first = !state.freeing;
        state.freeing = true;
        is_first && !state.move_state.running
    }

    /// Whether the region is being freed.
    pub(crate) fn is_freeing(&self) -> bool {
        self.state.lock().freeing
    }
}

/// The regions of which this node is the home.
#[pin_data]
pub(crate) struct RegionTable {
    #[pin]
    table: Mutex<RBTree<u64, Arc<Region>>>,
}

impl RegionTable {
    /// None.
    pub(crate) fn new() -> impl PinInit<Self> {
        pin_init!(Self { table <- new_mutex!(RBTree::new()) })
    }

    /// Enters a region.
    pub(crate) fn insert(&self, region: Arc<Region>) -> Result {
        // Outside of the lock: who is at the limit of a cgroup may have to wait.
        let node = RBTreeNode::new(region.id, region, GFP_KERNEL_ACCOUNT)?;
        self.table.lock().insert(node);
        Ok(())
    }

    /// Finds a region.
    ///
    /// # Errors
    ///
    /// `ENOENT` if there is none of that number.
    pub(crate) fn get(&self, id: u64) -> Result<Arc<Region>> {
        self.table.lock().get(&id).cloned().ok_or(ENOENT)
    }

    /// The region with the lowest number that is at least `id`.
    pub(crate) fn at_or_after(&self, id: u64) -> Option<Arc<Region>> {
        let table = self.table.lock();
        let cursor = table.cursor_lower_bound(&id)?;
        Some(cursor.current().1.clone())
    }

    /// All regions, in order of their numbers. One that comes or goes meanwhile may be missed.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Arc<Region>> + '_ {
        let mut next = 0;
        core::iter::from_fn(move || {
            let region = self.at_or_after(next)?;
            next = region.id + 1;
            Some(region)
        })
    }

    /// Removes a region.
    pub(crate) fn remove(&self, id: u64) -> Option<Arc<Region>> {
        self.table.lock().remove(&id)
    }
}
