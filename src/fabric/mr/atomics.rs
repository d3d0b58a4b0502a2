// SPDX-License-Identifier: GPL-2.0

//! Atomic operations of our RNIC on memory here, which are atomic with those that it does for others.
//!
//! Where verbs have none for the kernel they go by an RC queue pair of the hardware's ([`crate::mlx5`]), connected to
//! itself: so nothing of it is kept for any peer, and one that fails takes nothing of others along.

use super::table::UserMr;
use crate::{
    errno,
    fabric::{recv::wake::ThreadWaker, Fabric},
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

/// How long an operation may take: more than the RNIC tries.
const ATOMIC_TIMEOUT_MS: u32 = 3000;

/// How long nothing is tried, in ms, after something failed.
const RETRY_BACKOFF_MS: u32 = 100;

/// The queue pair, and where it puts what words were.
struct LoopbackQp {
    // Destroyed before its completion queue and the word: fields drop in this order.
    qp: Mlx5Qp<ThreadWaker>,
    cq: Arc<Mlx5Cq<ThreadWaker>>,
    waker: Arc<ThreadWaker>,
    result: Arc<DmaPages>,
    sges: [Sge; 1],
}

impl LoopbackQp {
    fn new(fabric: &Fabric, hca: &Arc<Mlx5Device>) -> Result<Self> {
        let result = DmaPages::new(
            fabric.device(),
            ContiguousPages::new(WORD_BYTES as usize, MemcgCharge::Kernel)?,
        )?;
        let sge = result.sge(fabric.local_key(), 0, WORD_BYTES as usize);
        let wake = ThreadWaker::new()?;
        let cq = Mlx5Cq::new(hca.clone(), 2, 0, wake.clone())?;
        let qp = Mlx5Qp::new_rc(hca.clone(), cq.clone(), 1)?;
        let own_av = AddressVector::new(hca, &fabric.loopback_route()?)?;
        qp.connect_loopback(fabric.local_port()?, &own_av)?;
        Ok(Self {
            qp,
            cq,
            waker: wake,
            result: Arc::new(result, GFP_KERNEL)?,
            sges: [sge.ok_or(EINVAL)?],
        })
    }

    fn execute(&self, remote: RemoteAddr, verb: RdmaOpcode) -> Result<u64> {
        let op = RdmaOp {
            opcode: verb,
            sges: &self.sges,
            remote,
            fence: false,
        };
        // SAFETY: The word stays mapped until the operation has ended, or else for ever.
        if unsafe { self.qp.post(&[Mlx5SendWr::new_rc(&op, 0)]) } == 0 {
            return Err(errno::inprogress());
        }
        let mut status = None;
        let poll = || {
            self.cq.poll(|completion| status = Some(completion.status));
            status
        };
        match self
            .waker
            .wait_for(ATOMIC_TIMEOUT_MS, || self.cq.arm(), poll)
        {
            Ok(WcStatus::Success) => self.read_result(),
            _ => Err(self.abort()),
        }
    }

    /// What the word was.
    fn read_result(&self) -> Result<u64> {
        let mut bytes = [0; WORD_BYTES as usize];
        self.result.sync_for_cpu(0, bytes.len());
        self.result.read(0, &mut bytes)?;
        Ok(u64::from_ne_bytes(bytes))
    }

    /// Ends the operation, whether or not it was done.
    fn abort(&self) -> Error {
        if self.qp.reset().is_err() {
            // The hardware may go on using it.
            core::mem::forget(self.result.clone());
        }
        ETIMEDOUT
    }
}

struct AtomicEngineState {
    /// Nothing before somebody wants something, or after that failed.
    qp: Option<LoopbackQp>,
    /// Since something failed nothing is tried until then: those who wait would do so one after the other.
    backoff_until: Option<Deadline>,
}

/// What does them, once somebody wants one.
#[pin_data]
pub(in crate::fabric) struct AtomicEngine {
    #[pin]
    state: Mutex<AtomicEngineState>,
}

impl AtomicEngine {
    pub(in crate::fabric) fn new() -> impl PinInit<Self> {
        let state = AtomicEngineState {
            qp: None,
            backoff_until: None,
        };
        pin_init!(Self { state <- new_mutex!(state) })
    }

    fn execute(
        &self,
        fabric: &Fabric,
        hca: &Arc<Mlx5Device>,
        remote: RemoteAddr,
        verb: RdmaOpcode,
    ) -> Result<u64> {
        let mut state = self.state.lock();
        if state
            .backoff_until
            .is_some_and(|until| !until.has_expired())
        {
            return Err(errno::inprogress());
        }
        let qp = state.qp.take();
        let qp = qp.map_or_else(|| LoopbackQp::new(fabric, hca), Ok);
        let result = qp.map_err(|_| errno::inprogress()).and_then(|qp| {
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
}

/// An atomic operation as a request, if RNICs have it.
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

impl Fabric {
    /// Changes a word of memory that a process here has registered, as one step to all who reach it by this RNIC. Where
    /// that has no atomic operations, our processor does it. Returns what the word was.
    ///
    /// # Errors
    ///
    /// - `ENXIO` if the RNIC has atomic operations, but not for peers that ask.
    /// - `ETIMEDOUT` when it may have been done; `EINPROGRESS` if that was not begun.
    /// - `EFAULT`, `EINVAL`.
    pub(crate) fn execute_atomic(&self, mr: &UserMr, addr: u64, op: AtomicOp) -> Result<u64> {
        if let Some(hca) = &self.hca {
            let verb = atomic_verb(op).ok_or(EINVAL)?;
            let key = mr.entry.rkey;
            return self
                .atomic_engine
                .execute(self, hca, RemoteAddr { addr, rkey: key }, verb);
        }
        if self.device().has_kernel_atomics() {
            return Err(ENXIO);
        }
        mr.execute_atomic(addr, op)
    }

    /// Gives up what is connected to our present address. Nobody may be about to change anything.
    pub(crate) fn close_atomic_qp(&self) {
        self.atomic_engine.state.lock().qp = None;
    }
}
