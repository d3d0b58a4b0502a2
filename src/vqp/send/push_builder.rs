// SPDX-License-Identifier: GPL-2.0

//! Non-blocking submission of requests from an I/O queue, which a process shares with the kernel.
//!
//! # Operation
//!
//! Requests are independent: a rejected request does not affect the others. Submission never sleeps. A
//! request that needs blocking work, such as a lookup or memory that is not chargeable now, returns
//! [`PushError::Missing`], and a worker obtains the prerequisite. Completions go to the I/O queue, not to
//! [`pop`](Vqp::pop) ([`crate::vqp::sink`]).
//!
//! # Locking
//!
//! [`PushBuilder`] holds `Vqp::state` from [`PushBuilder::try_start`] on, which uses `try_lock`. Under
//! `state` it takes `MrCache::entries`.

use super::{batch::VqpBatch, request::VqpRequest, VqpState, VQP_DEPTH};
use crate::{
    cluster::Cluster,
    errno::{self, TryError},
    fabric::Fabric,
    sys::{deadline::Deadline, memcg, thread::pi_mutex::PiMutexGuard},
    vqp::{sink::CompletionSink, Vqp},
};
use kernel::{alloc::flags::GFP_KERNEL_ACCOUNT, prelude::*, sync::Arc};

/// Reason why a request is not added.
pub(crate) enum PushError {
    /// The VQP, or the table of the session, is locked at present.
    Busy,
    /// No entry is free. The poller is woken when entries become free.
    Full,
    /// A prerequisite is missing that may require waiting ([`PushPrerequisite::wait`]).
    Missing(PushPrerequisite),
    /// The request was rejected and will not be added.
    Refused(Error),
}

/// Prerequisite that may require waiting.
pub(crate) enum PushPrerequisite {
    /// Address of the node.
    PeerAddress,
    /// MR entry of this key.
    RemoteMr(u32),
    /// Memory, charged to the active cgroup.
    Memory,
}

impl From<TryError> for PushError {
    /// Maps [`TryError::WouldBlock`] to a wait for a lock and `ENOMEM` to a wait for memory.
    fn from(error: TryError) -> Self {
        match error {
            TryError::WouldBlock => Self::Busy,
            TryError::Failed(error) if error == ENOMEM => Self::Missing(PushPrerequisite::Memory),
            error => Self::Refused(error.into()),
        }
    }
}

impl From<Error> for PushError {
    fn from(error: Error) -> Self {
        TryError::from(error).into()
    }
}

/// Requests that are added together.
pub(crate) struct PushBuilder<'a> {
    vqp: &'a Vqp,
    state: PiMutexGuard<'a, VqpState>,
    requests: KVec<VqpRequest>,
}

impl PushPrerequisite {
    /// Waits for the prerequisite of a request to `vqp`.
    ///
    /// # Errors
    ///
    /// See `struct kite_push` in `include/uapi/kite.h`.
    pub(crate) fn wait(self, vqp: &Vqp, cluster: &Cluster, deadline: Deadline) -> Result {
        match self {
            Self::PeerAddress => cluster.resolve_address(vqp.peer, deadline).map(drop),
            Self::RemoteMr(key) => vqp.mr_cache.resolve(cluster, key, deadline).map(drop),
            Self::Memory => wait_for_memory(),
        }
    }
}

/// Waits until memory for a push can be charged. The allocation makes the cgroup reclaim, and is freed at
/// once for the submission, which cannot wait.
///
/// # Errors
///
/// - `ENOMEM`: out of memory.
pub(in crate::vqp) fn wait_for_memory() -> Result {
    let max_requests = crate::bindings::KITE_PUSH_MAX as usize;
    let reservation = KVec::<VqpRequest>::with_capacity(max_requests, GFP_KERNEL_ACCOUNT)?;
    drop(reservation);
    Ok(())
}

impl<'a> PushBuilder<'a> {
    /// Starts to add up to `max` requests of an I/O queue to `vqp`.
    ///
    /// # Errors
    ///
    /// - [`PushError::Busy`]: another thread holds the lock.
    /// - [`PushError::Missing`]: the address is not cached, or memory is short.
    /// - [`PushError::Refused`]: the VQP is closed, or the node left the view.
    pub(crate) fn try_start(
        vqp: &'a Vqp,
        cluster: &Cluster,
        max: usize,
    ) -> Result<Self, PushError> {
        let address = cluster.cached_address(vqp.peer)?;
        let address = address.ok_or(PushError::Missing(PushPrerequisite::PeerAddress))?;
        let mut state = vqp.state.try_lock().ok_or(PushError::Busy)?;
        if let Some(error) = state.closed_with {
            return Err(PushError::Refused(error));
        }
        state.address = Some(address);
        let requests = KVec::with_capacity(max, memcg::gfp_nowait_account()).map_err(|_| ENOMEM)?;
        Ok(Self {
            vqp,
            state,
            requests,
        })
    }

    /// Adds a request after a full check. `admit` is called last, and takes the turn in the rate limits of
    /// the tenant.
    ///
    /// # Errors
    ///
    /// - [`PushError::Missing`]: the MR entry is not cached.
    /// - [`PushError::Full`]: no entry is free.
    /// - [`PushError::Refused`]: the endpoint does not support the request, the MR entry does not allow the
    ///   request, or no entry is free and only [`pop`](Vqp::pop) can free entries.
    /// - Any error of `admit`.
    pub(crate) fn add(
        &mut self,
        mut request: VqpRequest,
        admit: impl FnOnce() -> Result<(), PushError>,
    ) -> Result<(), PushError> {
        self.check_free_entry()?;
        self.state.check_request(&request)?;
        if let Some(mr_use) = request.remote_use {
            let cached = self.vqp.mr_cache.get(mr_use.key);
            request.validate_mr(
                mr_use,
                cached.ok_or(PushError::Missing(PushPrerequisite::RemoteMr(mr_use.key)))?,
            )?;
        }
        admit()?;
        // The capacity suffices, because the caller adds at most `max` requests.
        let pushed = self.requests.push_within_capacity(request);
        pushed.map_err(|_| PushError::Refused(ENOMEM))
    }

    fn check_free_entry(&mut self) -> Result<(), PushError> {
        if self.requests.len() < self.state.free_entries() {
            return Ok(());
        }
        // With no request pending, only [`pop`](Vqp::pop) frees entries.
        if self.state.pending + self.requests.len() == 0 {
            return Err(PushError::Refused(errno::nobufs()));
        }
        self.state.push_blocked = true;
        Err(PushError::Full)
    }

    /// Returns the number of added requests.
    pub(crate) fn len(&self) -> usize {
        self.requests.len()
    }

    /// Submits the requests in order. `sink` receives their completions.
    ///
    /// # Errors
    ///
    /// Any prerequisite that is missing. No request is then submitted.
    pub(crate) fn submit(
        self,
        cluster: &Cluster,
        sink: Arc<dyn CompletionSink>,
    ) -> Result<(), PushError> {
        let Self {
            vqp,
            mut state,
            requests,
            ..
        } = self;
        if requests.is_empty() {
            return Ok(());
        }
        let count = requests.len();
        let address = state.address.as_ref().ok_or(TryError::WouldBlock)?;
        let mut batches = VqpBatch::split(requests, address, memcg::gfp_nowait_account())?;
        state.admit(&mut batches, Some(&sink))?;
        cluster.fabric.stats.vqp_requests.add(count as u64);
        vqp.make_progress_and_kick(&cluster.fabric, &mut state);
        Ok(())
    }
}

impl VqpState {
    /// Returns the number of requests that can be added.
    pub(in crate::vqp) fn free_entries(&self) -> usize {
        VQP_DEPTH.saturating_sub(self.pending + self.completions.len())
    }

    /// Wakes the poller for an I/O queue that waits for entries, if an entry is free. Also wakes the poller
    /// if no request is pending: then only [`pop`](Vqp::pop) can free entries.
    pub(in crate::vqp) fn wake_blocked_push(&mut self, fabric: &Fabric) {
        if self.push_blocked && (self.free_entries() != 0 || self.pending == 0) {
            self.push_blocked = false;
            fabric.poll_clients.wake_poller();
        }
    }

    /// Checks that the endpoint supports a request.
    ///
    /// # Errors
    ///
    /// - `EINVAL`: the endpoint takes no messages, and the request has one.
    pub(in crate::vqp) fn check_request(&self, request: &VqpRequest) -> Result {
        match self.ids.local_vqpn == 0 && request.has_message() {
            true => Err(EINVAL),
            false => Ok(()),
        }
    }
}
