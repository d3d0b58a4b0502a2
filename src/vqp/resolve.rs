// SPDX-License-Identifier: GPL-2.0

//! Resolution of blocked batches, on a worker.
//!
//! # Operation
//!
//! A batch is blocked if its node did not respond, if the lease of an MR entry expired, or if the RNICs do
//! not support its atomics ([`BatchBlocker`]). The worker obtains the new address or the entry, or lets the
//! peer's kernel execute the atomics. Then the batch is posted, or fails.
//!
//! # Locking
//!
//! The worker waits without a lock, and takes `Vqp::state` to apply the result. `VqpState::resolving` is set
//! meanwhile, so one worker per VQP is queued.

use super::{
    send::{
        batch::BatchBlocker,
        kernel_atomic::{execute_atomics, OldValues},
        request::{KernelAtomic, MrUse},
        VqpState,
    },
    table::VqpTable,
    Vqp,
};
use crate::{cluster::Cluster, fabric::peer::PeerAddress, sys::deadline::Deadline};
use kernel::{
    prelude::*,
    sync::Arc,
    time::{delay::fsleep, Delta},
};

/// Timeout of one revalidation of a blocked batch, in milliseconds.
const RESOLVE_TIMEOUT_MS: u32 = 10_000;

/// Interval at which the address of a node is checked for a change, in milliseconds.
const ADDRESS_RECHECK_MS: i64 = 20;

/// Resolution of the first blocked batch of a VQP.
pub(super) struct BlockerResolver<'a> {
    vqp: &'a Vqp,
    table: &'a VqpTable,
    deadline: Deadline,
}

impl<'a> BlockerResolver<'a> {
    /// Creates a resolution that ends after [`RESOLVE_TIMEOUT_MS`].
    pub(super) fn new(vqp: &'a Vqp, table: &'a VqpTable) -> Self {
        Self {
            vqp,
            table,
            deadline: Deadline::after_ms(RESOLVE_TIMEOUT_MS),
        }
    }

    fn cluster(&self) -> &'a Cluster {
        &self.table.memory_service.cluster
    }

    /// Resolves the reason why a batch cannot be posted, and applies the result.
    ///
    /// If the node did not respond, waits for a new address of the node. If a lease expired, reads the
    /// entries of remote MRs again. Atomics that the RNICs do not support are executed in the peer's kernel.
    pub(super) fn run(&self) {
        let (mut atomics_batch, mut old_values) = (u64::MAX, (KVec::new(), Ok(())));
        let blocker = self.vqp.state.lock().first_blocker();
        let resolution = match blocker {
            Some((number, BatchBlocker::AddressChange(old_address, timeout_ms))) => {
                (number, self.wait_address_change(&old_address, timeout_ms))
            }
            Some((number, BatchBlocker::KernelAtomics(atomics))) => {
                (atomics_batch, old_values) = (number, self.execute_atomics(&atomics));
                (u64::MAX, Ok(false))
            }
            Some((number, BatchBlocker::StaleMrs(uses))) => (number, self.fetch_mrs(&uses)),
            None => (u64::MAX, Ok(false)),
        };
        let (vqp, cluster) = (self.vqp, self.cluster());
        let address = cluster.resolve_address(vqp.peer, self.deadline).ok();
        let mut state = vqp.state.lock();
        state.resolving = false;
        state.address = address.or(state.address.take());
        state.apply_resolution(resolution, &vqp.mr_cache);
        state.apply_old_values(atomics_batch, old_values);
        vqp.make_progress_and_kick(&cluster.fabric, &mut state);
        drop(state);
        vqp.wake_waiters();
    }

    /// Executes atomics in the peer's kernel, until the VQP is closed.
    fn execute_atomics(&self, atomics: &[KernelAtomic]) -> OldValues {
        let should_continue = || self.vqp.state.lock().closed_with.is_none();
        let execute = |(word, atomic): KernelAtomic| {
            let memory_service = &self.table.memory_service;
            word.request_atomic(memory_service, self.vqp.peer, atomic, self.deadline)
        };
        execute_atomics(atomics, should_continue, execute)
    }

    /// Reads the entries of remote MRs. Returns `true`.
    ///
    /// # Errors
    ///
    /// See [`MrCache::resolve`](super::send::mr_cache::MrCache::resolve).
    fn fetch_mrs(&self, uses: &[MrUse]) -> Result<bool> {
        // The cache keeps the entries until their leases expire.
        for mr_use in uses {
            self.vqp
                .mr_cache
                .resolve(self.cluster(), mr_use.key, self.deadline)?;
        }
        Ok(true)
    }

    /// Returns `true` if the address of the node differs from `old_address`, now or in a view received within
    /// `timeout_ms`.
    ///
    /// # Errors
    ///
    /// See [`Cluster::resolve_address`].
    fn wait_address_change(&self, old_address: &Arc<PeerAddress>, timeout_ms: u32) -> Result<bool> {
        let change_deadline = Deadline::after_ms(timeout_ms);
        loop {
            let address = self
                .cluster()
                .resolve_address(self.vqp.peer, self.deadline)?;
            if !Arc::ptr_eq(old_address, &address) {
                return Ok(true);
            }
            if change_deadline.has_expired() {
                return Ok(false);
            }
            fsleep(Delta::from_millis(ADDRESS_RECHECK_MS));
        }
    }
}

impl VqpState {
    /// Returns the number and the blocker of the first blocked batch.
    fn first_blocker(&self) -> Option<(u64, BatchBlocker)> {
        let mut batches = self.batches.iter();
        batches.find_map(|batch| Some((batch.number, batch.blocker()?)))
    }
}
