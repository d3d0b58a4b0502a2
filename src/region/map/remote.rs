// SPDX-License-Identifier: GPL-2.0

//! Accesses of a mapping that send to other nodes, and requests that change the region.
//!
//! # Operation
//!
//! An access holds a guard of the chunk map until its work requests have completed. A request to another node
//! holds a [`RemoteRequestGuard`] until its outcome is final.
//!
//! # Recovery
//!
//! If a QP fails under an access, the mapping records the QP, since packets of the QP may still arrive.
//! [`Mapping::is_drained`] returns `true` once no such packet and no such request can take effect.
//!
//! # Locking
//!
//! `Mapping::qp_failures` (mutex) protects the list of failed QPs, and nests outside `Conn::state`. The
//! holder may sleep in an allocation. `remote_requests` is incremented with a full barrier while a guard
//! keeps the mapping from ending. A thread that has ended the mapping and waited for its guards therefore
//! sees each request.

use super::{chunk_map::ChunkMap, Mapping};
use crate::{
    control::retry::retry_alloc,
    errno::{TryError, TryResult},
    fabric::{conn::credit::StaleQp, send::inflight::InflightGuard},
    sys::revocable::{OwnedRevocableGuard, RevocableGuard},
};
use kernel::{
    prelude::*,
    sync::{
        atomic::{Acquire, Full},
        Arc,
    },
};

impl Mapping {
    /// Begins an access that sends to chunk locations of this version.
    ///
    /// # Errors
    ///
    /// See [`Self::access_chunks_at`].
    pub(crate) fn start_remote_access(&self, version: u32) -> TryResult<RemoteAccess<'_>> {
        let _guard = self.access_chunks_at(version)?;
        Ok(RemoteAccess {
            mapping: self,
            _guard,
        })
    }

    /// Begins an access that sends to chunk locations of this version. Unlike the guard of
    /// [`Self::start_remote_access`], the returned one may outlive the caller.
    ///
    /// # Errors
    ///
    /// See [`Self::access_chunks_at`].
    pub(crate) fn start_owned_remote_access(
        self: &Arc<Self>,
        version: u32,
    ) -> TryResult<OwnedRemoteAccess> {
        let guard =
            OwnedRevocableGuard::try_access(self.clone(), |mapping| mapping.chunk_map.revocable());
        let guard = guard.ok_or_else(|| self.access_error())?;
        let same = guard.version == version;
        let guard = same.then_some(guard).ok_or(TryError::InTransition)?;
        Ok(OwnedRemoteAccess(guard))
    }

    /// Registers a request to another node that changes the region. [`Self::is_drained`] returns `false`
    /// until the guard is dropped.
    ///
    /// # Errors
    ///
    /// See [`Self::access`].
    pub(in crate::region) fn start_remote_request(self: &Arc<Self>) -> Result<RemoteRequestGuard> {
        let _guard = self.access()?;
        self.remote_requests.fetch_add(1u32, Full);
        Ok(RemoteRequestGuard(self.clone()))
    }

    /// Returns `true` if no earlier access can still take effect: `is_drained` returns `true` for all failed
    /// QPs, and no remote request is outstanding.
    pub(crate) fn is_drained(&self, is_drained: impl Fn(&StaleQp) -> bool) -> bool {
        if self.remote_requests.load(Acquire) != 0 {
            return false;
        }
        self.qp_failures.lock().iter().all(is_drained)
    }

    fn record_failure(&self, failure: StaleQp) {
        let mut failures = self.qp_failures.lock();
        failures.retain(|failure| !failure.is_fenced());
        retry_alloc(|| Ok(failures.push(failure.clone(), GFP_KERNEL)?));
    }
}

/// Request to another node that changes the region. The guard is dropped when the outcome is final.
pub(in crate::region) struct RemoteRequestGuard(Arc<Mapping>);

impl Drop for RemoteRequestGuard {
    fn drop(&mut self) {
        self.0.remote_requests.fetch_sub(1u32, Full);
    }
}

/// Access that may send to other nodes.
pub(crate) struct RemoteAccess<'a> {
    mapping: &'a Mapping,
    _guard: RevocableGuard<'a, ChunkMap>,
}

impl InflightGuard for RemoteAccess<'_> {
    fn add_stale_qp(&self, failure: StaleQp) {
        self.mapping.record_failure(failure);
    }
}

/// Access that may send to other nodes and may be dropped by any thread. See [`RemoteAccess`].
pub(crate) struct OwnedRemoteAccess(OwnedRevocableGuard<Mapping, ChunkMap>);

impl OwnedRemoteAccess {
    /// Returns the accessed mapping.
    pub(crate) fn mapping(&self) -> &Arc<Mapping> {
        self.0.owner()
    }

    /// Returns the chunk map, which does not change while the access lasts.
    pub(super) fn chunk_map(&self) -> &ChunkMap {
        &self.0
    }
}

impl InflightGuard for OwnedRemoteAccess {
    fn add_stale_qp(&self, failure: StaleQp) {
        self.0.owner().record_failure(failure);
    }
}
