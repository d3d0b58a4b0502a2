// SPDX-License-Identifier: GPL-2.0

//! Region at its home: chunk placement, rights, mappers, locks and barriers.
//!
//! LITE (section 4) keeps this state at the node of the *master*, which created the region.
//!
//! # Operation
//!
//! Nodes map the region ([`mappers`]) with the rights of a user ([`acl`]), and wait for its locks and
//! barriers ([`waiters`]). A master moves or renames the region ([`change`]) or frees it: the region is marked as
//! freeing, and is torn down in the background ([`reclaim`]).
//!
//! # Recovery
//!
//! At a view change, the mappers of removed nodes are removed. Their waiters, and the memory of a region that
//! is being freed, are released later, once all members have synchronized the view.
//!
//! # Locking
//!
//! - `Region::state` (mutex) protects [`RegionState`]: names, rights, mappers, state of changes and lock table. The mutex
//!   is never held while a request is sent.
//! - `Region::placement` (mutex) protects the chunk locations and loans, and nests inside `state`.
//! - `teardown_refs` is atomic: the thread that drops the last reference starts the next teardown step.
//!
//! Callers of methods that may grant locks must then call [`waiters::WaiterNotifier`].

pub(crate) mod acl;
pub(super) mod borrowed_loan;
pub(crate) mod change;
mod latch;
pub(crate) mod lock_table;
pub(super) mod mappers;
mod migrate;
pub(super) mod name_change;
pub(crate) mod placement;
pub(crate) mod quiesce;
pub(crate) mod reclaim;
pub(super) mod waiters;

use self::{lock_table::LockTable, placement::Placement};
use super::{lend::loan::NodeScopedId, table::Numbered};
use crate::{errno::TryError, sys::memcg::Memcg};
use core::{convert::Infallible, mem::MaybeUninit};
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    new_mutex,
    prelude::*,
    rbtree::RBTree,
    sync::{
        atomic::{Acquire, Atomic, AtomicFlag, Full, Release},
        Arc, Mutex, UniqueArc,
    },
};
use kite_core::{
    layout::Layout, name::Name, proto::region_names::RegionNames, rights::Rights,
    view::NodeInstance,
};

pub(crate) use self::acl::Grantee;

/// Rights of a mapper.
struct MapperInfo {
    rights: Rights,
    uid: u32,
    /// Set if the user has lost one of these rights, until the mapping has ended.
    revoked: bool,
}

struct RegionState {
    names: RegionNames,
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
    change_state: ChangeState,
    /// Locks and barriers of the region.
    lock_table: LockTable,
}

impl RegionState {
    fn check_rights(&self, node: u32, mapping: u64, rights: Rights) -> Result {
        let entry = self.mappers.get(&(node, mapping)).ok_or(ENOENT)?;
        // If the user has lost a right, the mapper may not be marked yet.
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
    /// Time of creation, in ns since 1970. Decides which of several regions has a name.
    pub(crate) created_at: u64,
    pub(crate) layout: Layout,
    pub(crate) owner: u32,
    /// Initial rights of users without an own entry.
    pub(crate) other_rights: Rights,
}

/// State of the changes of a region in the background: moves to other nodes, and renames.
#[derive(Default)]
struct ChangeState {
    /// Last changes: requesting node, token chosen by that node, and result. The result is `None` while the
    /// change runs.
    recent: [((u32, u64), Option<Result>); MAX_CHANGE_RESULTS],
    running: bool,
    /// Set while chunk locations may not be given out.
    frozen: bool,
}

/// Number of results that are kept. A requester may query its result after other changes have started.
const MAX_CHANGE_RESULTS: usize = 8;

/// Region at its home.
#[pin_data]
pub(crate) struct Region {
    pub(crate) id: u64,
    pub(crate) spec: RegionSpec,
    /// Number of items that the next teardown step waits for.
    teardown_refs: Atomic<u32>,
    /// Set by the teardown once no node can access the region any longer. Only its loans are left.
    access_ended: AtomicFlag,
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
            names: RegionNames::ANONYMOUS,
            owner: spec.owner,
            other_rights: spec.other_rights,
            acl: RBTree::new(),
            acl_len: 0,
            revoked_count: 0,
            last_grant: None,
            mappers: RBTree::new(),
            mapping_count: 0,
            freeing: false,
            change_state: ChangeState::default(),
            lock_table: LockTable::new(),
        };
        let Ok(region) = self.0.pin_init_with::<Infallible>(pin_init!(Region {
            id,
            spec,
            teardown_refs: Atomic::new(0u32),
            access_ended: AtomicFlag::new(false),
            owner_memcg: Memcg::current(),
            placement <- new_mutex!(placement, "Region::placement"),
            state <- new_mutex!(state, "Region::state"),
        }));
        region.into()
    }
}

impl Numbered for Region {
    fn id(&self) -> u64 {
        self.id
    }
}

impl Region {
    /// Runs `f` with the names of the region.
    pub(crate) fn with_names<R>(&self, f: impl FnOnce(&mut RegionNames) -> R) -> R {
        f(&mut self.state.lock().names)
    }

    /// Starts to rename the region, on `move_queue`.
    ///
    /// # Errors
    ///
    /// - `EINVAL`: the region is anonymous.
    /// - `EBUSY`: the region is being created.
    /// - `EEXIST`: the region has this name.
    pub(crate) fn start_rename(&self, name: Name) -> Result {
        self.with_names(|names| match names.current() {
            _ if names.is_new() => Err(EBUSY),
            None => Err(EINVAL),
            Some(current) if current == name => Err(EEXIST),
            Some(_) => {
                names.begin(name);
                Ok(())
            }
        })
    }

    /// Returns the name if it is registered and the region is not being freed.
    pub(crate) fn published_name(&self) -> Option<Name> {
        self.published_names().next()
    }

    /// Returns the registered names of the region, two while it is renamed, and none while it is being freed.
    /// A view change sends them to their owners.
    pub(crate) fn published_names(&self) -> impl Iterator<Item = Name> {
        let state = self.state.lock();
        let names = if state.freeing {
            RegionNames::ANONYMOUS
        } else {
            state.names
        };
        names.published()
    }

    /// Runs `f` with allocations charged to the cgroup of the region's owner.
    pub(crate) fn with_owner_memcg<R>(&self, f: impl FnOnce() -> R) -> R {
        self.owner_memcg.with_active(f)
    }

    /// Records that no node can access the region any longer.
    pub(crate) fn set_access_ended(&self) {
        self.access_ended.store(true, Release);
    }

    /// Returns `true` if [`Self::set_access_ended`] was called.
    pub(crate) fn has_access_ended(&self) -> bool {
        self.access_ended.load(Acquire)
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
    /// now: freeing was not started before, and no change is running. All mappings are then invalidated,
    /// including the one of the caller, which its session may still use.
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
        Ok(!state.change_state.running)
    }

    /// Starts a change of the region on behalf of a mapper, which chose `token`.
    ///
    /// # Errors
    ///
    /// - `EBUSY`: a change is running.
    /// - `EACCES`: the mapper is not a master.
    /// - `ENOENT`: the mapper does not exist, or the region is being freed.
    pub(crate) fn start_change(&self, node: u32, mapping: u64, token: u64) -> Result {
        let mut state = self.state.lock();
        if state.freeing {
            return Err(ENOENT);
        }
        state.check_rights(node, mapping, Rights::MASTER)?;
        if state.change_state.running {
            return Err(EBUSY);
        }
        state.change_state.running = true;
        state.change_state.recent.rotate_right(1);
        state.change_state.recent[0] = ((node, token), None);
        Ok(())
    }

    /// Records the result of the change. Returns `true` if the region was freed meanwhile, so the caller must
    /// reclaim it.
    pub(crate) fn finish_change(&self, result: Result) -> bool {
        let mut state = self.state.lock();
        state.change_state.running = false;
        state.change_state.recent[0].1 = Some(result);
        state.freeing
    }

    /// Returns the result of a change.
    ///
    /// # Errors
    ///
    /// - `EINPROGRESS`: the change is running.
    /// - `ENOENT`: the change is not among the last [`MAX_CHANGE_RESULTS`].
    /// - Other errors: the error of the change.
    pub(crate) fn change_result(&self, node: u32, token: u64) -> Result {
        let state = self.state.lock();
        let mut recent = state.change_state.recent.iter();
        let (_, result) = recent
            .find(|(requester, _)| *requester == (node, token))
            .ok_or(ENOENT)?;
        result.unwrap_or(Err(TryError::InTransition.into()))
    }

    /// Blocks or allows new mappers.
    pub(crate) fn set_frozen(&self, frozen: bool) {
        self.state.lock().change_state.frozen = frozen;
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

    /// Marks a region as freeing because its creation failed: a peer may have mapped the region already.
    /// Returns `true` in the cases of [`Self::start_free`].
    pub(crate) fn mark_freeing(&self) -> bool {
        let mut state = self.state.lock();
        let is_first = !state.freeing;
        state.freeing = true;
        is_first && !state.change_state.running
    }

    /// Returns `true` if the region is being freed.
    pub(crate) fn is_freeing(&self) -> bool {
        self.state.lock().freeing
    }
}
