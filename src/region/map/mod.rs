// SPDX-License-Identifier: GPL-2.0

//! A region as mapped by one handle: where its bytes are, and whether they may still be touched.
//!
//! All that an access needs is here, at the node that makes it (LITE, section 4: no extra round trip).
//! Each access goes through a gate; when the region is freed, or its home dies, that is shut and
//! whoever is inside finishes first. While the region moves nobody may know where it is ([`super::map::chunk_map`]).

pub(crate) mod atomic;
pub(crate) mod batch;
pub(crate) mod chunk_map;
pub(crate) mod copy;
pub(crate) mod io;

use self::chunk_map::{ChunkMap, ChunkMapCell, MappedChunk, PieceLocation};
use super::home::reclaim::retry_alloc;
use crate::{
    errno,
    fabric::{conn::credit::StaleQp, send::inflight::InflightGuard},
    sys::{
        deadline::{retry_until, Deadline},
        event_counter::EventCounter,
        revocable::{OwnedRevocableGuard, RevocableGuard, SleepableRevocable},
    },
};
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    new_mutex,
    prelude::*,
    rbtree::{RBTree, RBTreeNode},
    sync::{
        atomic::{Acquire, Atomic, AtomicFlag, Full, Release},
        Arc, Mutex, SetOnce,
    },
};
use kite_core::{
    layout::{Layout, Piece},
    view::NodeInstance,
    wire::InvalidateReason,
};

/// Why a mapping ended.
const FREED: u32 = 1;
const HOME_DIED: u32 = 2;
const REVOKED: u32 = 3;

/// It has not ended.
const EVENT_NONE: u32 = 0;
/// It ended, and waits to be reported.
const EVENT_PENDING: u32 = 1;
/// It was reported.
const EVENT_REPORTED: u32 = 2;
/// Its session is freeing the region.
const EVENT_SUPPRESSED: u32 = 3;
/// The handle was given back.
const EVENT_DETACHED: u32 = 4;

/// A mapping.
#[pin_data]
pub(crate) struct Mapping {
    pub(crate) id: u64,
    pub(crate) home: u32,
    /// That of the home in which it has the region.
    pub(super) home_instance: NodeInstance,
    pub(crate) region: u64,
    #[pin]
    layout_cell: SleepableRevocable<SetOnce<Layout>>,
    #[pin]
    chunk_map: ChunkMapCell,
    /// Queue pairs that failed under accesses, and may have left packets in the network.
    #[pin]
    qp_failures: Mutex<KVec<StaleQp>>,
    /// Requests to other nodes to change the region, of which it is not known whether they are done.
    remote_requests: Atomic<u32>,
    end_cause: Atomic<u32>,
    /// Whether it was ever used to stand in line.
    had_waiters: AtomicFlag,
    /// Whether the session has been, or is to be, told of the end: [`QUIET`], [`RAISED`], [`SETTLED`],
    /// [`HUSHED`] or [`RETIRED`].
    event_state: Atomic<u32>,
    event_counter: Arc<EventCounter>,
}

impl Mapping {
    /// Makes a mapping of a region of which nothing is known yet.
    pub(crate) fn new(
        id: u64,
        home_instance: NodeInstance,
        region: u64,
        event_counter: Arc<EventCounter>,
    ) -> Result<Arc<Self>> {
        let home = home_instance.node;
        Arc::pin_init(
            pin_init!(Self {
                id, home, home_instance, region,
                layout_cell <- SleepableRevocable::new(SetOnce::new()),
                chunk_map <- ChunkMapCell::new(),
                qp_failures <- new_mutex!(KVec::new()),
                remote_requests: Atomic::new(0u32),
                end_cause: Atomic::new(0u32),
                had_waiters: AtomicFlag::new(false),
                event_state: Atomic::new(EVENT_NONE),
                event_counter,
            }),
            GFP_KERNEL_ACCOUNT,
        )
    }

    /// As of which version [`Self::fill`] is told the chunks that are asked for from now on.
    pub(super) fn chunk_map_version(&self) -> u32 {
        self.chunk_map.version()
    }

    /// Says where the region is.
    ///
    /// # Errors
    ///
    /// `EAGAIN` if it may have moved; as for [`Self::enter`], if the mapping ended before.
    pub(super) fn install_chunks(
        &self,
        layout: Layout,
        version: u32,
        chunks: KVVec<MappedChunk>,
    ) -> Result {
        let guard = self.access()?;
        self.chunk_map.install(ChunkMap { version, chunks })?;
        guard.populate(layout);
        Ok(())
    }

    /// How the region is cut.
    ///
    /// # Errors
    ///
    /// As for [`Self::enter`].
    pub(crate) fn layout(&self) -> Result<Layout> {
        self.access()?.as_ref().copied().ok_or_else(errno::stale)
    }

    /// Where the region is, for as long as nobody lets go of the result.
    ///
    /// # Errors
    ///
    /// `EINPROGRESS` while it is moving; as for [`Self::enter`].
    pub(crate) fn access_chunks(&self) -> Result<RevocableGuard<'_, ChunkMap>> {
        self.chunk_map
            .try_access()
            .ok_or_else(|| self.access_error())
    }

    /// As [`Self::look`], but only as of this version.
    ///
    /// # Errors
    ///
    /// `EINPROGRESS` if it has moved since; as there.
    pub(crate) fn access_chunks_at(&self, version: u32) -> Result<RevocableGuard<'_, ChunkMap>> {
        let chunk_map = self.access_chunks()?;
        let same = chunk_map.version == version;
        same.then_some(chunk_map).ok_or_else(errno::inprogress)
    }

    fn access_error(&self) -> Error {
        self.access().err().unwrap_or_else(errno::inprogress)
    }

    /// Waits while the region is moving.
    ///
    /// # Errors
    ///
    /// `ETIMEDOUT`, `EINTR`; as for [`Self::enter`].
    pub(crate) fn wait_resumed(&self, deadline: Deadline) -> Result {
        retry_until(deadline, || self.access_chunks().map(drop))
    }

    /// Whether a piece is at another node.
    ///
    /// # Errors
    ///
    /// As for [`Self::look`].
    pub(crate) fn is_remote(&self, piece: Piece) -> Result<bool> {
        Ok(matches!(
            self.access_chunks()?.find(piece)?,
            PieceLocation::Remote(_)
        ))
    }

    /// Calls `f`, and again when the region has moved meanwhile.
    ///
    /// # Errors
    ///
    /// Those of `f`, and as for [`Self::await_places`].
    pub(crate) fn retry_on_move<T>(
        &self,
        deadline: Deadline,
        mut f: impl FnMut() -> Result<T>,
    ) -> Result<T> {
        loop {
            match f() {
                Err(error) if error == errno::inprogress() => self.wait_resumed(deadline)?,
                result => return result,
            }
        }
    }

    /// Lets nobody know where the region is, until [`Self::resume`].
    ///
    /// # Errors
    ///
    /// `EAGAIN` while somebody does.
    pub(super) fn try_quiesce(&self) -> Result {
        self.chunk_map.try_quiesce()
    }

    /// Lets all know again where it is, after `change`.
    pub(super) fn resume(&self, update: impl FnOnce(&mut [MappedChunk])) {
        self.chunk_map.resume(update);
    }

    /// Enters the mapping for what needs not know where the region is.
    ///
    /// # Errors
    ///
    /// `ESTALE` if the region was freed, `EACCES` if the rights were revoked, `EHOSTDOWN` if its home died,
    /// `EBADF` if the handle was given back.
    pub(crate) fn access(&self) -> Result<RevocableGuard<'_, SetOnce<Layout>>> {
        self.layout_cell
            .try_access()
            .ok_or_else(|| self.end_error())
    }

    fn end_error(&self) -> Error {
        match self.end_cause.load(Acquire) {
            HOME_DIED => errno::hostdown(),
            FREED => errno::stale(),
            REVOKED => EACCES,
            _ => EBADF,
        }
    }

    /// Enters the mapping for what is sent to other nodes, to places as of this version.
    ///
    /// # Errors
    ///
    /// As for [`Self::look_at`].
    pub(crate) fn start_remote_access(&self, version: u32) -> Result<RemoteAccess<'_>> {
        let _guard = self.access_chunks_at(version)?;
        Ok(RemoteAccess {
            mapping: self,
            _guard,
        })
    }

    /// As [`Self::pass`], for who does not wait for the end of what is sent.
    ///
    /// # Errors
    ///
    /// As there.
    pub(crate) fn start_owned_remote_access(
        self: &Arc<Self>,
        version: u32,
    ) -> Result<OwnedRemoteAccess> {
        let guard =
            OwnedRevocableGuard::try_access(self.clone(), |mapping| mapping.chunk_map.revocable());
        let guard = guard.ok_or_else(|| self.access_error())?;
        let same = guard.version == version;
        let guard = same.then_some(guard).ok_or_else(errno::inprogress)?;
        Ok(OwnedRemoteAccess(guard))
    }

    /// Somebody is about to stand in line by it, and may wait for its end.
    pub(super) fn note_waiter(&self) {
        self.had_waiters.store(true, Release);
    }

    /// Whether anybody did.
    pub(super) fn had_waiters(&self) -> bool {
        self.had_waiters.load(Acquire)
    }

    fn record_failure(&self, failure: StaleQp) {
        let mut failures = self.qp_failures.lock();
        failures.retain(|failure| !failure.is_fenced());
        retry_alloc(|| Ok(failures.push(failure.clone(), GFP_KERNEL)?));
    }

    /// Begins a request to another node to change the region. The mapping is not quiet until the result is
    /// dropped.
    ///
    /// # Errors
    ///
    /// As for [`Self::enter`].
    pub(super) fn start_remote_request(self: &Arc<Self>) -> Result<RemoteRequestGuard> {
        let _guard = self.access()?;
        self.remote_requests.fetch_add(1u32, Full);
        Ok(RemoteRequestGuard(self.clone()))
    }

    /// Whether nothing that accesses have sent, or asked others for, can come late, to members of the view as
    /// `has` knows it.
    pub(crate) fn is_drained(&self, is_member: impl Fn(NodeInstance) -> bool) -> bool {
        if self.remote_requests.load(Acquire) != 0 {
            return false;
        }
        let failures = self.qp_failures.lock();
        failures
            .iter()
            .all(|failure| failure.is_fenced() || !is_member(failure.instance))
    }

    /// Takes the news of its end, if it ended and that was not reported yet.
    pub(crate) fn report_event(&self) -> bool {
        let is_pending = self
            .event_state
            .cmpxchg(EVENT_PENDING, EVENT_REPORTED, Full)
            .is_ok();
        if is_pending {
            self.event_counter.consume();
        }
        is_pending
    }

    /// Ends the mapping and waits for accesses under way. Its session hears of it.
    fn invalidate_with(&self, cause: u32) {
        // Before the gate is shut: who finds it so asks why.
        let is_first = self.end_cause.cmpxchg(0, cause, Full).is_ok();
        self.layout_cell.revoke_nosync();
        if is_first {
            self.raise_event();
        }
        self.close();
    }

    /// Waits for whoever is inside.
    fn close(&self) {
        self.layout_cell.revoke();
        self.chunk_map.close();
    }

    fn raise_event(&self) {
        if self
            .event_state
            .cmpxchg(EVENT_NONE, EVENT_PENDING, Full)
            .is_ok()
        {
            self.event_counter.raise();
        }
    }

    /// The session is about to free the region itself, and is not to be told.
    pub(crate) fn suppress_event(&self) {
        let _ = self.event_state.cmpxchg(EVENT_NONE, EVENT_SUPPRESSED, Full);
    }

    /// Takes [`Self::hush`] back: the region was not freed, or not yet.
    pub(crate) fn restore_event(&self) {
        let _ = self.event_state.cmpxchg(EVENT_SUPPRESSED, EVENT_NONE, Full);
        if self.end_cause.load(Acquire) != 0 {
            self.raise_event();
        }
    }

    /// The region was freed, or the rights revoked.
    pub(crate) fn invalidate(&self, reason: InvalidateReason) {
        self.invalidate_with(match reason {
            InvalidateReason::Freed => FREED,
            InvalidateReason::Revoked => REVOKED,
        });
    }

    /// The home of the region died, or left.
    pub(crate) fn on_home_died(&self) {
        self.invalidate_with(HOME_DIED);
    }

    /// The handle is given back: its session hears no more of it. Waits for accesses under way. Returns
    /// whether this was the first time.
    pub(crate) fn detach(&self) -> bool {
        let previous = self.event_state.xchg(EVENT_DETACHED, Full);
        if previous == EVENT_PENDING {
            self.event_counter.consume();
        }
        self.close();
        previous != EVENT_DETACHED
    }
}

/// A request to another node to change the region, of which it is not known whether it is done.
pub(super) struct RemoteRequestGuard(Arc<Mapping>);

impl Drop for RemoteRequestGuard {
    fn drop(&mut self) {
        self.0.remote_requests.fetch_sub(1u32, Full);
    }
}

/// An access that may send to other nodes.
pub(crate) struct RemoteAccess<'a> {
    mapping: &'a Mapping,
    _guard: RevocableGuard<'a, ChunkMap>,
}

impl InflightGuard for RemoteAccess<'_> {
    fn add_stale_qp(&self, failure: StaleQp) {
        self.mapping.record_failure(failure);
    }
}

/// As [`Pass`], on whichever thread.
pub(crate) struct OwnedRemoteAccess(OwnedRevocableGuard<Mapping, ChunkMap>);

impl OwnedRemoteAccess {
    /// The mapping that is accessed.
    pub(crate) fn mapping(&self) -> &Arc<Mapping> {
        self.0.owner()
    }

    /// Where the region is, meanwhile.
    pub(super) fn chunk_map(&self) -> &ChunkMap {
        &self.0
    }
}

impl InflightGuard for OwnedRemoteAccess {
    fn add_stale_qp(&self, failure: StaleQp) {
        self.0.owner().record_failure(failure);
    }
}

/// The mappings of this node.
#[pin_data]
pub(crate) struct MappingTable {
    #[pin]
    table: Mutex<RBTree<u64, Arc<Mapping>>>,
}

impl MappingTable {
    /// None.
    pub(crate) fn new() -> impl PinInit<Self> {
        pin_init!(Self { table <- new_mutex!(RBTree::new()) })
    }

    /// Enters a mapping.
    pub(crate) fn insert(&self, mapping: Arc<Mapping>) -> Result {
        // Outside of the lock: who is at the limit of a cgroup may have to wait.
        let node = RBTreeNode::new(mapping.id, mapping, GFP_KERNEL_ACCOUNT)?;
        self.table.lock().insert(node);
        Ok(())
    }

    /// Finds a mapping.
    pub(crate) fn get(&self, id: u64) -> Option<Arc<Mapping>> {
        self.table.lock().get(&id).cloned()
    }

    /// Removes a mapping.
    pub(crate) fn remove(&self, id: u64) -> Option<Arc<Mapping>> {
        self.table.lock().remove(&id)
    }

    /// Calls `f` with every mapping, without the table locked.
    pub(crate) fn for_each(&self, f: impl Fn(&Mapping)) {
        let mut next = 0;
        while let Some(mapping) = self.at_or_after(next) {
            next = mapping.id + 1;
            f(&mapping);
        }
    }

    fn at_or_after(&self, id: u64) -> Option<Arc<Mapping>> {
        let table = self.table.lock();
        let cursor = table.cursor_lower_bound(&id)?;
        Some(cursor.current().1.clone())
    }
}
