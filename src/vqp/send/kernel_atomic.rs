// SPDX-License-Identifier: GPL-2.0

//! Atomics executed by the peer's kernel ([`crate::region::kernel_atomic`]), for RNICs that offer none to
//! kernels.
//!
//! # Operation
//!
//! The atomics of a batch run one after the other on a worker, after all earlier requests completed.
//!
//! # Recovery
//!
//! If an operation fails, its request fails, and all later requests fail with `ECANCELED`.
//!
//! # Locking
//!
//! The worker executes the operations without a lock, and takes `Vqp::state` to apply the results.

use super::{
    batch::{VqpBatch, VqpBatchState},
    request::{KernelAtomic, VqpRequest},
    VqpState,
};
use kernel::prelude::*;

/// Old values of the words, and the error that ended the sequence, if any.
pub(in crate::vqp) type OldValues = (KVec<u64>, Result);

impl VqpBatch {
    /// Returns `true` if the batch consists of atomics. Without RNIC atomics, no batch mixes atomics with
    /// other requests.
    pub(in crate::vqp) fn is_atomic(&self) -> bool {
        self.remaining().first().is_some_and(VqpRequest::is_atomic)
    }

    /// Returns the incomplete operations for the peer's kernel.
    pub(in crate::vqp) fn kernel_atomics(&self) -> KVec<KernelAtomic> {
        let mut atomics = KVec::new();
        // Without memory, the remaining operations follow in a later round.
        let _ = self
            .remaining()
            .iter()
            .filter_map(VqpRequest::kernel_atomic)
            .try_for_each(|atomic| atomics.push(atomic, GFP_KERNEL));
        atomics
    }
}

/// Executes operations in order, until one fails or `should_continue` returns `false`.
pub(in crate::vqp) fn execute_atomics(
    atomics: &[KernelAtomic],
    should_continue: impl Fn() -> bool,
    execute: impl Fn(KernelAtomic) -> Result<u64>,
) -> OldValues {
    let Ok(mut old_values) = KVec::with_capacity(atomics.len(), GFP_KERNEL) else {
        return (KVec::new(), Ok(()));
    };
    let mut pending = atomics.iter().take_while(|_| should_continue());
    let result = pending.try_for_each(|atomic| {
        let old_value = execute(*atomic)?;
        old_values
            .push_within_capacity(old_value)
            .map_err(|_| ENOMEM)
    });
    (old_values, result)
}

impl VqpState {
    /// Returns `true` if a batch waits for the peer's kernel.
    pub(in crate::vqp) fn has_kernel_atomics(&self) -> bool {
        let mut batches = self.batches.iter();
        batches.any(|batch| matches!(batch.state, VqpBatchState::ViaKernel))
    }

    /// Stores the old values of the batch with this number in the local memory of its requests.
    ///
    /// Has no effect if the batch has ended meanwhile: the owner of the memory may have deregistered it.
    pub(in crate::vqp) fn apply_old_values(
        &mut self,
        number: u64,
        (old_values, result): OldValues,
    ) {
        let Some(i) = self.batches.iter().position(|batch| batch.number == number) else {
            return;
        };
        let batch = &mut self.batches[i];
        if !matches!(batch.state, VqpBatchState::ViaKernel) {
            return;
        }
        for (request, old_value) in batch.remaining().iter().zip(&old_values) {
            // Cannot fail: the range was checked.
            let _ = request
                .mr
                .write(request.local_addr, &old_value.to_ne_bytes());
        }
        batch.done_count += old_values.len();
        match result {
            Err(error) => self.fail_from(i, error),
            Ok(()) if batch.remaining().is_empty() => batch.state = VqpBatchState::Finished,
            Ok(()) => {}
        }
    }
}
