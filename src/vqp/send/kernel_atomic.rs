// SPDX-License-Identifier: GPL-2.0

//! Atomic operations that the RNICs do not have for kernels: that of the other node is asked for them
//! ([`crate::region::kernel_atomic`]), one after the other, when all before them is done.

use super::{
    batch::{VqpBatch, VqpBatchState, VqpRequest},
    VqpState,
};
use crate::{region::kernel_atomic::MrWord, verbs::work::RdmaOpcode};
use kernel::prelude::*;
use kite_core::atomic::AtomicOp;

/// What is to be done to which word.
pub(in crate::vqp) type KernelAtomic = (MrWord, AtomicOp);

/// What words were, and why no more were changed, if not all.
pub(in crate::vqp) type OldValues = (KVec<u64>, Result);

impl VqpRequest {
    /// What another node is to be asked for, if it is an atomic operation.
    fn kernel_atomic(&self) -> Option<KernelAtomic> {
        let atomic = match self.verb {
            RdmaOpcode::FetchAdd { operand } => AtomicOp::FetchAdd { operand },
            RdmaOpcode::CompareSwap { expected, new } => AtomicOp::CompareSwap {
                expected,
                operand: new,
            },
            _ => return None,
        };
        let mr_use = self.remote_use?;
        let word = MrWord {
            mr_key: mr_use.key,
            uid: mr_use.uid,
            addr: self.remote.addr,
        };
        Some((word, atomic))
    }
}

impl VqpBatch {
    /// Whether it is of atomic operations. Where RNICs have none for us, no batch is of others, too.
    pub(in crate::vqp) fn is_atomic(&self) -> bool {
        self.remaining().first().is_some_and(VqpRequest::is_atomic)
    }

    /// What another node is to be asked for.
    pub(in crate::vqp) fn kernel_atomics(&self) -> KVec<KernelAtomic> {
        let mut atomics = KVec::new();
        // Without memory the rest is asked for later.
        let _ = self
            .remaining()
            .iter()
            .filter_map(VqpRequest::kernel_atomic)
            .try_for_each(|atomic| atomics.push(atomic, GFP_KERNEL));
        atomics
    }
}

/// Asks for changes, for as long as that goes on.
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
    /// Whether what is to be found out is what words were.
    pub(in crate::vqp) fn has_kernel_atomics(&self) -> bool {
        let mut batches = self.batches.iter();
        batches.any(|batch| matches!(batch.state, VqpBatchState::ViaKernel))
    }

    /// Takes what words were that the batch of that number had changed, unless it is given up by now: whose memory it
    /// is may have taken it back.
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
            // It is there: that was checked.
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
