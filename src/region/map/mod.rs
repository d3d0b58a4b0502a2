// SPDX-License-Identifier: GPL-2.0

//! Mapping of a region by one handle: the locations of its chunks, and whether access is still allowed.
//!
//! # Operation
//!
//! An access needs only data kept at the accessing node (LITE, section 4: no extra round trip). Each access
//! holds a guard of one of two revocable values:
//!
//! - `layout_cell`: the layout, valid until the mapping ends. [`Mapping::access`] returns the guard.
//! - `chunk_map`: the chunk locations, withdrawn while the region moves ([`chunk_map`]).
//!   [`Mapping::access_chunks`] returns the guard.
//!
//! # Recovery
//!
//! If the region is freed, the rights are revoked, or the home dies, both values are revoked. The revoking
//! thread then waits until the last guard is dropped. [`Mapping::is_drained`] additionally covers packets of
//! failed QPs and requests to other nodes with unknown outcome.
//!
//! If the home is fenced, only the chunk map is withdrawn, and accesses fail with `EHOSTDOWN`
//! ([`Mapping::on_home_fenced`]). Once the home is reachable, the mapping is opened again ([`reopen`]).
//!
//! # Locking
//!
//! - A holder of a guard may sleep, and may hold the guard across RDMA operations.
//! - `Mapping::qp_failures` (mutex) protects the list of failed QPs. The connection's state lock nests
//!   inside.
//! - `end_cause` is set before `layout_cell` is revoked, so a rejected access always finds the cause.

pub(crate) mod access;
pub(crate) mod atomic;
pub(crate) mod batch;
pub(crate) mod chunk_map;
mod close;
pub(crate) mod copy;
pub(super) mod detached;
pub(crate) mod io;
pub(super) mod local_mappings;
pub(crate) mod open;
pub(crate) mod remote;
pub(super) mod reopen;
pub(crate) mod submit;

use self::{
    chunk_map::{ChunkMap, ChunkMapCell, HomeLink, MappedChunk, PieceLocation},
    open::RegionTraits,
};
use super::table::Numbered;
use crate::{
    errno::{self, TryError, TryResult},
    fabric::conn::credit::StaleQp,
    sys::{
        deadline::{retry_until, Deadline},
        event_counter::EventCounter,
        revocable::{RevocableGuard, SleepableRevocable},
        thread::pi_mutex::{new_pi_mutex, PiMutex},
    },
};
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    prelude::*,
    sync::{
        atomic::{Acquire, Atomic, AtomicFlag, Full, Release},
        Arc, SetOnce,
    },
};
use kite_core::{
    layout::{Layout, Piece},
    rights::Rights,
    view::NodeInstance,
    wire::InvalidateReason,
};

/// Causes for which a mapping ended; 0 while the mapping is valid.
const FREED: u32 = 1;
const HOME_DIED: u32 = 2;
const REVOKED: u32 = 3;

/// The mapping has not ended.
const EVENT_NONE: u32 = 0;
/// The mapping ended, and the event is not reported yet.
const EVENT_PENDING: u32 = 1;
/// The event was reported.
const EVENT_REPORTED: u32 = 2;
/// The session of the mapping is freeing the region and needs no event.
const EVENT_SUPPRESSED: u32 = 3;
/// The handle was closed.
const EVENT_DETACHED: u32 = 4;

/// Terms on which a region is mapped.
#[derive(Clone, Copy)]
pub(crate) struct MapTerms {
    /// User for which the region is mapped.
    pub(crate) uid: u32,
    pub(crate) rights: Rights,
    /// `true` if the mapping is opened again after its home was fenced. Otherwise it ends.
    pub(crate) outlives_fence: bool,
}

/// Mapping of a region by one handle.
#[pin_data]
pub(crate) struct Mapping {
    pub(crate) id: u64,
    pub(crate) home: u32,
    /// Incarnation of the home that has the region.
    pub(super) home_instance: NodeInstance,
    pub(crate) region: u64,
    terms: MapTerms,
    /// Set when the home has added the mapper.
    traits: SetOnce<RegionTraits>,
    #[pin]
    layout_cell: SleepableRevocable<SetOnce<Layout>>,
    #[pin]
    chunk_map: ChunkMapCell,
    /// QPs that failed under accesses. Their packets may still be in the network.
    #[pin]
    qp_failures: PiMutex<KVec<StaleQp>>,
    /// Number of requests to other nodes that change the region and have no known outcome.
    remote_requests: Atomic<u32>,
    end_cause: Atomic<u32>,
    /// Set once the mapping is used for a lock or a barrier, and never cleared.
    had_waiters: AtomicFlag,
    /// State of the end event of the session: [`EVENT_NONE`], [`EVENT_PENDING`], [`EVENT_REPORTED`],
    /// [`EVENT_SUPPRESSED`] or [`EVENT_DETACHED`].
    event_state: Atomic<u32>,
    event_counter: Arc<EventCounter>,
}

impl Numbered for Mapping {
    fn id(&self) -> u64 {
        self.id
    }
}

impl Mapping {
    /// Creates a mapping without layout and chunk map. [`Self::install_chunks`] adds both.
    pub(crate) fn new(
        id: u64,
        home_instance: NodeInstance,
        region: u64,
        terms: MapTerms,
        event_counter: Arc<EventCounter>,
    ) -> Result<Arc<Self>> {
        let home = home_instance.node;
        Arc::pin_init(
            pin_init!(Self {
                id, home, home_instance, region, terms,
                traits: SetOnce::new(),
                layout_cell <- SleepableRevocable::new(SetOnce::new()),
                chunk_map <- ChunkMapCell::new(),
                qp_failures <- new_pi_mutex!(KVec::new(), "Mapping::qp_failures"),
                remote_requests: Atomic::new(0u32),
                end_cause: Atomic::new(0u32),
                had_waiters: AtomicFlag::new(false),
                event_state: Atomic::new(EVENT_NONE),
                event_counter,
            }),
            GFP_KERNEL_ACCOUNT,
        )
    }

    /// Returns the chunk map version to pass to [`Self::install_chunks`] for locations that are requested
    /// after this call.
    pub(super) fn chunk_map_version(&self) -> u32 {
        self.chunk_map.version()
    }

    /// Installs the layout and the chunk locations.
    ///
    /// # Errors
    ///
    /// - [`TryError::WouldBlock`]: the region may have moved since `version` was read.
    /// - `ESTALE`, `EACCES`, `EHOSTDOWN`, `EBADF`: the mapping ended. See [`Self::access`].
    pub(super) fn install_chunks(
        &self,
        layout: Layout,
        version: u32,
        chunks: KVVec<MappedChunk>,
    ) -> TryResult {
        let guard = self.access()?;
        self.chunk_map.install(ChunkMap { version, chunks })?;
        guard.populate(layout);
        Ok(())
    }

    /// Returns the layout of the region.
    ///
    /// # Errors
    ///
    /// See [`Self::access`]. `ESTALE` is also returned while no layout is installed.
    pub(crate) fn layout(&self) -> Result<Layout> {
        self.access()?.as_ref().copied().ok_or_else(errno::stale)
    }

    /// Returns the chunk map. The region does not move while the guard is held.
    ///
    /// # Errors
    ///
    /// - [`TryError::InTransition`]: the region is moving, or the mapping is being opened again.
    /// - `EHOSTDOWN`: the home is unreachable.
    /// - `ESTALE`, `EACCES`, `EHOSTDOWN`, `EBADF`: the mapping ended. See [`Self::access`].
    pub(crate) fn access_chunks(&self) -> TryResult<RevocableGuard<'_, ChunkMap>> {
        self.chunk_map
            .try_access()
            .ok_or_else(|| self.access_error())
    }

    /// Returns the chunk map if its version is `version`.
    ///
    /// # Errors
    ///
    /// - [`TryError::InTransition`]: the region has moved since, or is moving.
    /// - `ESTALE`, `EACCES`, `EHOSTDOWN`, `EBADF`: the mapping ended. See [`Self::access`].
    pub(crate) fn access_chunks_at(&self, version: u32) -> TryResult<RevocableGuard<'_, ChunkMap>> {
        let chunk_map = self.access_chunks()?;
        let same = chunk_map.version == version;
        same.then_some(chunk_map).ok_or(TryError::InTransition)
    }

    fn access_error(&self) -> TryError {
        let is_valid = self.access().map(drop).map_err(TryError::from);
        let is_connected = is_valid.and_then(|()| self.check_home());
        is_connected.err().unwrap_or(TryError::InTransition)
    }

    /// Checks that the home has the mapping.
    ///
    /// # Errors
    ///
    /// - [`TryError::InTransition`]: the mapping is being opened again.
    /// - `EHOSTDOWN`: the home is unreachable.
    fn check_home(&self) -> TryResult {
        match self.chunk_map.home_link() {
            HomeLink::Connected => Ok(()),
            HomeLink::Reopening => Err(TryError::InTransition),
            HomeLink::Unreachable => Err(errno::hostdown().into()),
        }
    }

    /// Waits until the home has the mapping. A request to the home that names the mapping needs this.
    ///
    /// # Errors
    ///
    /// - `EHOSTDOWN`: the home is unreachable.
    /// - `ESTALE`, `EACCES`, `EHOSTDOWN`, `EBADF`: the mapping ended. See [`Self::access`].
    /// - See also [`retry_until`].
    pub(crate) fn wait_home(&self, deadline: Deadline) -> Result {
        retry_until(deadline, || {
            drop(self.access()?);
            self.check_home()
        })
    }

    /// Waits until the region is not moving.
    ///
    /// # Errors
    ///
    /// - `ETIMEDOUT`: the deadline expired.
    /// - `EINTR`: a signal interrupted the wait.
    /// - `EHOSTDOWN`: the home is unreachable.
    /// - `ESTALE`, `EACCES`, `EHOSTDOWN`, `EBADF`: the mapping ended. See [`Self::access`].
    pub(crate) fn wait_resumed(&self, deadline: Deadline) -> Result {
        retry_until(deadline, || self.access_chunks().map(drop))
    }

    /// Returns `true` if a piece is on another node.
    ///
    /// # Errors
    ///
    /// See [`Self::access_chunks`]. `EIO` is returned if the region has no such chunk.
    pub(crate) fn is_remote(&self, piece: Piece) -> TryResult<bool> {
        Ok(matches!(
            self.access_chunks()?.find(piece)?,
            PieceLocation::Remote(_)
        ))
    }

    /// Calls `f`, and again after each move of the region for which `f` returns [`TryError::InTransition`].
    ///
    /// # Errors
    ///
    /// Those of `f` except [`TryError::InTransition`], and those of [`Self::wait_resumed`].
    pub(crate) fn retry_on_move<T>(
        &self,
        deadline: Deadline,
        mut f: impl FnMut() -> TryResult<T>,
    ) -> Result<T> {
        loop {
            match f() {
                Err(TryError::InTransition) => self.wait_resumed(deadline)?,
                result => return Ok(result?),
            }
        }
    }

    /// Withdraws the chunk map until [`Self::resume`]. New accesses are rejected in any case.
    ///
    /// # Errors
    ///
    /// - [`TryError::WouldBlock`]: an access still holds the chunk map.
    pub(super) fn try_quiesce(&self) -> TryResult {
        self.chunk_map.try_quiesce()
    }

    /// Publishes the chunk map again after `update` has changed the locations.
    pub(super) fn resume(&self, update: impl FnOnce(&mut [MappedChunk])) {
        self.chunk_map.resume(update);
    }

    /// Returns the layout. The guard keeps the mapping from ending, and allows the region to move.
    ///
    /// # Errors
    ///
    /// - `ESTALE`: the region was freed.
    /// - `EACCES`: the rights were revoked.
    /// - `EHOSTDOWN`: the home died.
    /// - `EBADF`: the handle was closed.
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

    /// Converts an error of the home to the error of the caller. `ENOENT` means that the region or the
    /// mapping does not exist at the home any longer, or that the home was fenced meanwhile.
    pub(super) fn convert_home_error(&self, error: Error) -> Error {
        if error == ENOENT && self.check_home().is_err() {
            errno::hostdown()
        } else if error == ENOENT {
            // If the handle was closed meanwhile, report that cause.
            self.access().err().unwrap_or_else(errno::stale)
        } else {
            error
        }
    }

    /// Records that a thread is about to acquire a lock or a barrier through the mapping.
    pub(super) fn note_waiter(&self) {
        self.had_waiters.store(true, Release);
    }

    /// Returns `true` if [`Self::note_waiter`] was called.
    pub(super) fn had_waiters(&self) -> bool {
        self.had_waiters.load(Acquire)
    }

    /// Consumes the end event. Returns `true` if the mapping ended and the event was not reported yet.
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

    /// Ends the mapping, raises the event of the session, and waits for accesses in progress.
    fn invalidate_with(&self, cause: u32) {
        // Set the cause before revoking: a rejected access reads it.
        let is_first = self.end_cause.cmpxchg(0, cause, Full).is_ok();
        self.layout_cell.revoke_nosync();
        if is_first {
            self.raise_event();
        }
        self.close();
    }

    /// Revokes both values and waits until no guard is held.
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

    /// Suppresses the end event: the session is about to free the region.
    pub(crate) fn suppress_event(&self) {
        // Fails if the event is raised already, or suppressed.
        let _ = self.event_state.cmpxchg(EVENT_NONE, EVENT_SUPPRESSED, Full);
    }

    /// Reverts [`Self::suppress_event`]: the region was not freed, or not yet. Raises the event if the
    /// mapping has ended.
    pub(crate) fn restore_event(&self) {
        // Fails if the event was not suppressed.
        let _ = self.event_state.cmpxchg(EVENT_SUPPRESSED, EVENT_NONE, Full);
        if self.end_cause.load(Acquire) != 0 {
            self.raise_event();
        }
    }

    /// Ends the mapping: the region was freed, or the rights were revoked. Waits for accesses in progress.
    pub(crate) fn invalidate(&self, reason: InvalidateReason) {
        self.invalidate_with(match reason {
            InvalidateReason::Freed => FREED,
            InvalidateReason::Revoked => REVOKED,
        });
    }

    /// Blocks accesses, because the home was fenced, or ends a mapping that does not outlive that. Waits for
    /// accesses in progress.
    pub(super) fn on_home_fenced(&self, is_reachable: bool) {
        if !self.terms.outlives_fence {
            return self.on_home_died();
        }
        self.chunk_map.suspend(match is_reachable {
            true => HomeLink::Reopening,
            false => HomeLink::Unreachable,
        });
    }

    /// Ends the mapping: the home of the region died or left the cluster. Waits for accesses in progress.
    pub(crate) fn on_home_died(&self) {
        self.invalidate_with(HOME_DIED);
    }

    /// Closes the handle: the session receives no further events of the mapping. Waits for accesses in
    /// progress. Returns `true` on the first call.
    pub(crate) fn detach(&self) -> bool {
        let previous = self.event_state.xchg(EVENT_DETACHED, Full);
        if previous == EVENT_PENDING {
            self.event_counter.consume();
        }
        self.close();
        previous != EVENT_DETACHED
    }
}
