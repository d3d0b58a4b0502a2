// SPDX-License-Identifier: GPL-2.0

//! Requests that come by a queue which a process shares with the kernel, instead of by a system call.
//!
//! Who takes them from there waits for nothing, and each stands for itself: one that is refused leaves the others as they
//! are. What has to be waited for, as memory that whoever pays cannot have at once, somebody else waits for. What became of them the queue is told, and not
//! who pops ([`super::deliver`]).

use super::{
    batch::{VqpBatch, VqpRequest},
    deliver::CompletionSink,
    mr_cache, VqpState, VQP_DEPTH,
};
use crate::{
    cluster::Cluster,
    errno,
    fabric::Fabric,
    sys::{deadline::Deadline, memcg},
    vqp::Vqp,
};
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    prelude::*,
    sync::{Arc, MutexGuard},
};

/// Why a request is not added.
pub(crate) enum PushError {
    /// Somebody is about the queue pair, or those of the session, just now.
    Busy,
    /// So many are under way that there is no room. The poller is woken when there is.
    Full,
    /// It lacks what may have to be waited for ([`Vqp::provide`]).
    Missing(PushPrerequisite),
    /// It never will be.
    Refused(Error),
}

/// What may have to be waited for.
pub(crate) enum PushPrerequisite {
    /// By what the node is reached.
    PeerAddress,
    /// What this key means there.
    RemoteMr(u32),
    /// Memory that whoever pays can have.
    Memory,
}

impl From<Error> for PushError {
    /// `EAGAIN` is of who would have to wait for somebody, `ENOMEM` of who would have to wait for memory.
    fn from(error: Error) -> Self {
        match error {
            error if error == EAGAIN => Self::Busy,
            error if error == ENOMEM => Self::Missing(PushPrerequisite::Memory),
            error => Self::Refused(error),
        }
    }
}

/// Requests that are added together.
pub(crate) struct PushBuilder<'a> {
    vqp: &'a Vqp,
    state: MutexGuard<'a, VqpState>,
    requests: KVec<VqpRequest>,
}

impl Vqp {
    /// Begins to add requests of a queue, at most so many, unless that is too early.
    pub(crate) fn try_start_push(
        &self,
        cluster: &Cluster,
        max: usize,
    ) -> Result<PushBuilder<'_>, PushError> {
        let address = cluster.cached_address(self.peer)?;
        let address = address.ok_or(PushError::Missing(PushPrerequisite::PeerAddress))?;
        let mut state = self.state.try_lock().ok_or(PushError::Busy)?;
        if let Some(error) = state.closed_with {
            return Err(PushError::Refused(error));
        }
        state.address = Some(address);
        let requests = KVec::with_capacity(max, memcg::gfp_nowait_account()).map_err(|_| ENOMEM)?;
        Ok(PushBuilder {
            vqp: self,
            state,
            requests,
        })
    }

    /// Waits for what a request lacks.
    ///
    /// # Errors
    ///
    /// As `struct kite_push` in `include/uapi/kite.h` says.
    pub(crate) fn wait_for_prerequisite(
        &self,
        cluster: &Cluster,
        prerequisite: PushPrerequisite,
        deadline: Deadline,
    ) -> Result {
        let peer = self.peer;
        match prerequisite {
            PushPrerequisite::PeerAddress => cluster.resolve_address(peer, deadline).map(drop),
            PushPrerequisite::RemoteMr(key) => {
                mr_cache::resolve_mr(&self.mr_cache, cluster, peer, key, deadline).map(drop)
            }
            PushPrerequisite::Memory => Self::wait_for_memory(),
        }
    }

    /// Waits for memory: who does gets what others give back, and leaves it to who does not.
    pub(in crate::vqp) fn wait_for_memory() -> Result {
        let max_requests = crate::bindings::KITE_PUSH_MAX as usize;
        let reservation = KVec::<VqpRequest>::with_capacity(max_requests, GFP_KERNEL_ACCOUNT)?;
        drop(reservation);
        Ok(())
    }

    /// If a queue waits for room, and there is some, or will be none before somebody pops, it is to look again.
    pub(in crate::vqp) fn wake_blocked_push(fabric: &Fabric, state: &mut VqpState) {
        if state.push_blocked && (state.free_entries() != 0 || state.pending == 0) {
            state.push_blocked = false;
            fabric.wake_poller();
        }
    }
}

impl PushBuilder<'_> {
    /// Adds one, which is checked whole; at last it is asked whether it is its turn.
    pub(crate) fn add(
        &mut self,
        mut request: VqpRequest,
        admit: impl FnOnce() -> Result<(), PushError>,
    ) -> Result<(), PushError> {
        self.check_free_entry()?;
        self.state.check_request(&request)?;
        if let Some(mr_use) = request.remote_use {
            let cached = self.vqp.mr_cache.lock().get(mr_use.key);
            request.validate_mr(
                mr_use,
                cached.ok_or(PushError::Missing(PushPrerequisite::RemoteMr(mr_use.key)))?,
            )?;
        }
        admit()?;
        // There is room: no more come than were said to.
        let pushed = self.requests.push_within_capacity(request);
        pushed.map_err(|_| PushError::Refused(ENOMEM))
    }

    fn check_free_entry(&mut self) -> Result<(), PushError> {
        if self.requests.len() < self.state.free_entries() {
            return Ok(());
        }
        // If nothing is under way only who pops can make room.
        if self.state.pending + self.requests.len() == 0 {
            return Err(PushError::Refused(errno::nobufs()));
        }
        self.state.push_blocked = true;
        Err(PushError::Full)
    }

    /// How many were added.
    pub(crate) fn len(&self) -> usize {
        self.requests.len()
    }

    /// Has them done, in their order; the queue is told what became of them.
    ///
    /// # Errors
    ///
    /// What they lack, and then none is.
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
        let address = state.address.as_ref().ok_or(EAGAIN)?;
        let mut batches = VqpBatch::split(requests, address, memcg::gfp_nowait_account())?;
        state.admit(&mut batches, Some(&sink))?;
        cluster.fabric.stats.vqp_requests.add(count as u64);
        vqp.make_progress_and_kick(&cluster.fabric, &mut state);
        Ok(())
    }
}

impl VqpState {
    /// Requests that may be added.
    pub(in crate::vqp) fn free_entries(&self) -> usize {
        VQP_DEPTH.saturating_sub(self.pending + self.completions.len())
    }

    /// Whether this end is for what a request says.
    ///
    /// # Errors
    ///
    /// `EINVAL`.
    pub(in crate::vqp) fn check_request(&self, request: &VqpRequest) -> Result {
        match self.ids.local_vqpn == 0 && request.has_message() {
            true => Err(EINVAL),
            false => Ok(()),
        }
    }
}
