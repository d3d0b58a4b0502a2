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
    send::{batch::BatchBlocker, kernel_atomic::execute_atomics, request::MrUse},
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

impl Vqp {
    /// Resolves the reason why a batch cannot be posted, on a worker.
    ///
    /// If the node did not respond, waits for a new address of the node. If a lease expired, reads the
    /// entries of remote MRs again. Atomics that the RNICs do not support are executed in the peer's kernel.
    pub(super) fn resolve_blocker(&self, table: &VqpTable) {
        let (deadline, cluster) = (
            Deadline::after_ms(RESOLVE_TIMEOUT_MS),
            &table.memory_service.cluster,
        );
        let (mut atomics_batch, mut old_values) = (u64::MAX, (KVec::new(), Ok(())));
        let resolution = match self.first_blocker() {
            Some((number, BatchBlocker::AddressChange(old_address, timeout_ms))) => (
                number,
                self.wait_address_change(cluster, (&old_address, timeout_ms), deadline),
            ),
            Some((number, BatchBlocker::KernelAtomics(atomics))) => {
                let should_continue = || self.state.lock().closed_with.is_none();
                let execute = |(word, atomic)| {
                    table
                        .memory_service
                        .atomic_via_owner(self.peer, word, atomic, deadline)
                };
                (atomics_batch, old_values) =
                    (number, execute_atomics(&atomics, should_continue, execute));
                (u64::MAX, Ok(false))
            }
            Some((number, BatchBlocker::StaleMrs(uses))) => {
                let fetch_mr =
                    |mr_use: &MrUse| self.mr_cache.resolve(cluster, mr_use.key, deadline);
                // `MrCache::resolve` keeps the entries in the cache until their leases expire.
                (
                    number,
                    uses.iter()
                        .try_for_each(|mr_use| fetch_mr(mr_use).map(drop))
                        .map(|()| true),
                )
            }
            None => (u64::MAX, Ok(false)),
        };
        let address = cluster.resolve_address(self.peer, deadline).ok();
        let mut state = self.state.lock();
        state.resolving = false;
        state.address = address.or(state.address.take());
        state.apply_resolution(resolution, &self.mr_cache);
        state.apply_old_values(atomics_batch, old_values);
        self.make_progress_and_kick(&cluster.fabric, &mut state);
        drop(state);
        self.wake_waiters();
    }

    /// Returns `true` if the address of the node differs from `old_address`, now or in a view received within
    /// `timeout_ms`.
    ///
    /// # Errors
    ///
    /// See [`Cluster::resolve_address`].
    fn wait_address_change(
        &self,
        cluster: &Cluster,
        (old_address, timeout_ms): (&Arc<PeerAddress>, u32),
        deadline: Deadline,
    ) -> Result<bool> {
        let change_deadline = Deadline::after_ms(timeout_ms);
        loop {
            if !Arc::ptr_eq(old_address, &cluster.resolve_address(self.peer, deadline)?) {
                return Ok(true);
            }
            if change_deadline.has_expired() {
                return Ok(false);
            }
            fsleep(Delta::from_millis(ADDRESS_RECHECK_MS));
        }
    }

    /// Returns the number and the blocker of the first blocked batch.
    fn first_blocker(&self) -> Option<(u64, BatchBlocker)> {
        let state = self.state.lock();
        let mut batches = state.batches.iter();
        batches.find_map(|batch| Some((batch.number, batch.blocker()?)))
    }
}
