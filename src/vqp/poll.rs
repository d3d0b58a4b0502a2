// SPDX-License-Identifier: GPL-2.0

//! Progress of a VQP: completed batches are reaped, and ready ones posted.
//!
//! # Operation
//!
//! The thread that pushes or pops makes progress, and so does the poller thread ([`VqpPollClient`]). The
//! poller leaves the VQP to a process that polls ([`super::wait`]), except for blocked batches, for which it
//! queues a worker ([`super::resolve`]).
//!
//! # Recovery
//!
//! Removal of the RNIC fails all requests with `ENODEV`.
//!
//! # Locking
//!
//! - [`VqpPollClient`] runs with the poller's client list locked, and so uses `try_lock` for `Vqp::state`.
//!   Its `on_device_removed` runs without the client list and uses `lock`.
//! - `needs_resolve` is stored with `Release` under `state`. The poller loads it with `Acquire` before it
//!   takes `state`.

use super::{
    resolve::BlockerResolver,
    send::{
        batch::{VqpBatch, VqpBatchState},
        VqpState,
    },
    table::VqpTable,
    Vqp,
};
use crate::fabric::{
    recv::poll_client::{PollClient, PollHint},
    Fabric,
};
use kernel::{
    prelude::*,
    sync::{
        atomic::{Acquire, Release},
        Arc,
    },
};

impl Vqp {
    /// Makes progress, and wakes the poller if work is left that only the poller can do.
    pub(super) fn make_progress_and_kick(&self, fabric: &Fabric, state: &mut VqpState) -> usize {
        let progress = self.make_progress(fabric, state);
        if state.needs_poller() {
            self.needs_resolve.store(state.needs_resolve(), Release);
            fabric.poll_clients.wake_poller();
        }
        progress
    }

    /// Makes progress unless another thread holds the lock. Returns the number of requests that completed and
    /// of batches that were posted.
    pub(crate) fn try_make_progress(&self, fabric: &Fabric) -> usize {
        let state = self.state.try_lock();
        state.map_or(0, |mut state| {
            self.make_progress_and_kick(fabric, &mut state)
        })
    }

    /// Reaps completed batches and posts ready ones. Returns the number of requests that completed and of
    /// batches that were posted.
    fn make_progress(&self, fabric: &Fabric, state: &mut VqpState) -> usize {
        let pending_before = state.pending;
        if let Some(VqpBatchState::Posted(claim, ..)) = state.first_posted() {
            claim.poll_cq();
        }
        let requeued = state.reap_batches();
        state.check_quiesced(fabric);
        fabric.stats.dc_replays.add(requeued as u64);
        state.deliver_completions();
        let posted = state.post_ready(fabric);
        let completed = pending_before - state.pending;
        if completed != 0 {
            self.wake_waiters();
            state.wake_blocked_push(fabric);
        }
        completed + posted
    }

    /// Returns the urgency with which the poller must return to this VQP.
    pub(crate) fn poll_hint(&self) -> PollHint {
        // No interrupt is needed for a process that polls.
        if self.user_poll_window.is_open() {
            return PollHint::Soon;
        }
        let Some(state) = self.state.try_lock() else {
            return PollHint::Posted;
        };
        let is_in_flight = |batch: &VqpBatch| batch.is_posted() || batch.is_quiescing();
        match state.needs_poller() || state.batches.iter().any(is_in_flight) {
            true => PollHint::Posted,
            false => PollHint::Idle,
        }
    }
}

/// Poll client that makes the poller thread serve a VQP.
pub(crate) struct VqpPollClient {
    pub(crate) vqp: Arc<Vqp>,
    pub(crate) table: Arc<VqpTable>,
}

impl PollClient for VqpPollClient {
    fn poll_work(&self, fabric: &Fabric) -> usize {
        let user_polls = self.vqp.user_poll_window.is_open();
        if user_polls && !self.vqp.needs_resolve.load(Acquire) {
            return 0;
        }
        let Some(mut state) = self.vqp.state.try_lock() else {
            return 0;
        };
        let progress = match user_polls {
            true => 0,
            false => self.vqp.make_progress(fabric, &mut state),
        };
        self.vqp.needs_resolve.store(false, Release);
        if state.needs_resolve() {
            let (vqp, table) = (self.vqp.clone(), self.table.clone());
            let resolve = move || BlockerResolver::new(&vqp, &table).run();
            let queued = match state.has_kernel_atomics() {
                true => self.table.defer_atomics(resolve),
                false => self.table.defer(resolve),
            };
            state.resolving = queued.is_ok();
        }
        progress
    }

    fn poll_hint(&self) -> PollHint {
        self.vqp.poll_hint()
    }

    fn on_device_removed(&self) {
        let mut state = self.vqp.state.lock();
        state.closed_with = state.closed_with.or(Some(ENODEV));
        state.fail_from(0, ENODEV);
        state.deliver_completions();
        drop(state);
        self.vqp.wake_waiters();
    }
}
