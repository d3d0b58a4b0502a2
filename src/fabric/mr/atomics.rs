// SPDX-License-Identifier: GPL-2.0

//! Atomic operations of the local RNIC on local memory, atomic with respect to those that the RNIC executes
//! for peers.
//!
//! # Operation
//!
//! Some drivers offer no atomic operations to kernel users. With mlx5 hardware, the operations therefore use
//! an RC QP of [`crate::mlx5`], connected to itself and created on demand. No per-peer state is needed, and a
//! failure affects no other user.
//!
//! # Recovery
//!
//! A QP that fails or times out is destroyed. For [`RETRY_BACKOFF_MS`] afterwards, all operations fail at
//! once with `EINPROGRESS`.
//!
//! # Locking
//!
//! `AtomicEngine::state` is a mutex for the QP and the back-off. It is held during an operation, at most
//! about [`ATOMIC_TIMEOUT_MS`].

use super::{
    private_qp::{PrivateQp, CQ_ENTRIES},
    table::UserMr,
};
use crate::{
    errno::{TryError, TryResult},
    fabric::{address::LocalAddress, recv::wake::ThreadWaker},
    mlx5::{
        cq::Mlx5Cq,
        qp::Mlx5Qp,
        wr::{AddressVector, Mlx5SendWr},
        Mlx5Device,
    },
    sys::{
        deadline::Deadline,
        pages::{ContiguousPages, MemcgCharge},
    },
    verbs::{
        cq::WcStatus,
        dma::DmaPages,
        work::{RdmaOp, RdmaOpcode, RemoteAddr, Sge},
    },
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::{Arc, Mutex},
};
use kite_core::atomic::{AtomicOp, WORD_BYTES};

/// Timeout of an operation in ms: longer than the RNIC retries.
const ATOMIC_TIMEOUT_MS: u32 = 3000;

/// Time in ms after a failure during which no operation is tried.
const RETRY_BACKOFF_MS: u32 = 100;

/// RC QP connected to itself, and the buffer for the old value of a word.
struct LoopbackQp {
    // Fields drop in this order: the QP is destroyed before the result buffer.
    private: PrivateQp<Mlx5Qp<ThreadWaker>, Mlx5Cq<ThreadWaker>>,
    result: Arc<DmaPages>,
    sges: [Sge; 1],
}

impl LoopbackQp {
    fn new(local_address: &LocalAddress, hca: &Arc<Mlx5Device>) -> Result<Self> {
        let result = DmaPages::new(
            local_address.device(),
            ContiguousPages::new(WORD_BYTES as usize, MemcgCharge::Kernel)?,
        )?;
        let sge = result.sge(local_address.pd().local_dma_lkey(), 0, WORD_BYTES as usize);
        let private = PrivateQp::new(
            |waker| Mlx5Cq::new(hca.clone(), CQ_ENTRIES, 0, waker),
            |cq| Mlx5Qp::new_rc(hca.clone(), cq.clone(), 1),
        )?;
        let own_av = AddressVector::new(hca, &local_address.loopback_route()?)?;
        private
            .qp
            .connect_loopback(local_address.port_config()?, &own_av)?;
        Ok(Self {
            private,
            result: Arc::new(result, GFP_KERNEL)?,
            sges: [sge.ok_or(EINVAL)?],
        })
    }

    fn execute(&self, remote: RemoteAddr, verb: RdmaOpcode) -> TryResult<u64> {
        let op = RdmaOp {
            opcode: verb,
            sges: &self.sges,
            remote,
            fence: false,
        };
        // SAFETY: `result` stays mapped until the operation completes or the QP is reset. If the reset fails,
        // `abort` leaks it.
        if unsafe { self.private.qp.post(&[Mlx5SendWr::new_rc(&op, 0)]) } == 0 {
            return Err(TryError::InTransition);
        }
        match self.private.wait(ATOMIC_TIMEOUT_MS) {
            Ok(WcStatus::Success) => Ok(self.read_result()?),
            _ => Err(self.abort().into()),
        }
    }

    /// Returns the old value of the word.
    fn read_result(&self) -> Result<u64> {
        let mut bytes = [0; WORD_BYTES as usize];
        self.result.sync_for_cpu(0, bytes.len());
        self.result.read(0, &mut bytes)?;
        Ok(u64::from_ne_bytes(bytes))
    }

    /// Stops the operation, which may or may not have been executed. Returns `ETIMEDOUT`.
    fn abort(&self) -> Error {
        if self.private.qp.reset().is_err() {
            // The hardware may still write the result buffer, so leak it.
            core::mem::forget(self.result.clone());
        }
        ETIMEDOUT
    }
}

struct AtomicEngineState {
    /// `None` before the first operation and after a failure.
    qp: Option<LoopbackQp>,
    /// No operation is tried before this time after a failure. Otherwise every queued caller would run into
    /// the timeout, one after another.
    backoff_until: Option<Deadline>,
}

/// Executes atomic operations on local memory. Creates its QP on demand.
#[pin_data]
pub(crate) struct AtomicEngine {
    local_address: Arc<LocalAddress>,
    /// `None` if the operations cannot use mlx5 hardware.
    hca: Option<Arc<Mlx5Device>>,
    #[pin]
    state: Mutex<AtomicEngineState>,
}

impl AtomicEngine {
    /// Creates the engine without a QP.
    pub(in crate::fabric) fn new(
        local_address: Arc<LocalAddress>,
        hca: Option<Arc<Mlx5Device>>,
    ) -> impl PinInit<Self> {
        let state = AtomicEngineState {
            qp: None,
            backoff_until: None,
        };
        pin_init!(Self {
            local_address,
            hca,
            state <- new_mutex!(state, "AtomicEngine::state"),
        })
    }

    /// Executes an operation on the QP, which is created if there is none.
    fn execute_on_qp(
        &self,
        hca: &Arc<Mlx5Device>,
        remote: RemoteAddr,
        verb: RdmaOpcode,
    ) -> TryResult<u64> {
        let mut state = self.state.lock();
        if state
            .backoff_until
            .is_some_and(|until| !until.has_expired())
        {
            return Err(TryError::InTransition);
        }
        let qp = state.qp.take();
        let qp = qp.map_or_else(|| LoopbackQp::new(&self.local_address, hca), Ok);
        let result = qp.map_err(|_| TryError::InTransition).and_then(|qp| {
            let old_value = qp.execute(remote, verb)?;
            Ok((qp, old_value))
        });
        match result {
            Ok((qp, old_value)) => {
                state.qp = Some(qp);
                Ok(old_value)
            }
            Err(error) => {
                state.backoff_until = Some(Deadline::after_ms(RETRY_BACKOFF_MS));
                Err(error)
            }
        }
    }

    /// Applies an atomic operation to a word of a registered local MR, atomically for all accesses through
    /// this RNIC. If the RNIC has no atomic operations, the CPU executes it. Returns the old value.
    ///
    /// # Errors
    ///
    /// - `ENXIO`: the RNIC executes atomic operations for peers, but they cannot be issued by this module.
    /// - `ETIMEDOUT`: the operation may have been executed.
    /// - [`TryError::InTransition`]: the operation was not started.
    /// - `EFAULT`: the word is not in the MR.
    /// - `EINVAL`: the RNIC lacks the operation, or the word is misaligned.
    pub(crate) fn execute(&self, mr: &UserMr, addr: u64, op: AtomicOp) -> TryResult<u64> {
        if let Some(hca) = &self.hca {
            let verb = atomic_verb(op).ok_or(EINVAL)?;
            let key = mr.entry.rkey;
            let remote = RemoteAddr { addr, rkey: key };
            return self.execute_on_qp(hca, remote, verb);
        }
        if self.local_address.device().has_kernel_atomics() {
            return Err(ENXIO.into());
        }
        Ok(mr.execute_atomic(addr, op)?)
    }

    /// Destroys the QP, which is connected to the present address of this node. No operation may be in
    /// flight.
    pub(crate) fn close_qp(&self) {
        self.state.lock().qp = None;
    }
}

/// Returns the operation as an RDMA opcode. `None` if RNICs do not have it.
fn atomic_verb(op: AtomicOp) -> Option<RdmaOpcode> {
    match op {
        AtomicOp::FetchAdd { operand } => Some(RdmaOpcode::FetchAdd { operand }),
        AtomicOp::CompareSwap { expected, operand } => Some(RdmaOpcode::CompareSwap {
            expected,
            new: operand,
        }),
        AtomicOp::Swap { .. } => None,
    }
}
