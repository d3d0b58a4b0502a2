// SPDX-License-Identifier: GPL-2.0

//! Atomic operations of our RNIC on memory here, which are atomic with those that it does for others.
//!
//! Where verbs have none for the kernel they go by an RC queue pair of the hardware's ([`crate::dc`]), connected to
//! itself: so nothing of it is kept for any peer, and one that fails takes nothing of others along.

use super::{memory::Memory, wake::Wake, Fabric};
use crate::{
    dc::{
        cq::Cq,
        qp::Qp,
        work::{Av, Work},
        Hca,
    },
    errno,
    sys::{
        deadline::Deadline,
        pages::{Charge, Pages},
    },
    verbs::{
        cq::Status,
        dma::DmaPages,
        work::{Op, Remote, Sge, Verb},
    },
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::{Arc, Mutex},
};
use kite_core::atomic::{Atomic, WORD};

/// How long an operation may take: more than the RNIC tries.
const PATIENCE_MS: u32 = 3000;

/// How long nothing is tried, in ms, after something failed.
const PAUSE_MS: u32 = 100;

/// The queue pair, and where it puts what words were.
struct Desk {
    // Destroyed before its completion queue and the word: fields drop in this order.
    qp: Qp<Wake>,
    cq: Arc<Cq<Wake>>,
    wake: Arc<Wake>,
    word: Arc<DmaPages>,
    sges: [Sge; 1],
}

impl Desk {
    fn new(fabric: &Fabric, hca: &Arc<Hca>) -> Result<Self> {
        let word = DmaPages::new(fabric.device(), Pages::new(WORD as usize, Charge::Kernel)?)?;
        let sge = word.sge(fabric.local_key(), 0, WORD as usize);
        let wake = Wake::new()?;
        let cq = Cq::new(hca.clone(), 2, 0, wake.clone())?;
        let qp = Qp::new_rc(hca.clone(), cq.clone(), 1)?;
        let own = Av::new(hca, &fabric.route_to_itself()?)?;
        qp.connect_to_itself(fabric.source()?, &own)?;
        Ok(Self {
            qp,
            cq,
            wake,
            word: Arc::new(word, GFP_KERNEL)?,
            sges: [sge.ok_or(EINVAL)?],
        })
    }

    fn change(&self, remote: Remote, verb: Verb) -> Result<u64> {
        let op = Op {
            verb,
            sges: &self.sges,
            remote,
            fenced: false,
        };
        // SAFETY: The word stays mapped until the operation has ended, or else for ever.
        if unsafe { self.qp.post(&[Work::connected(&op, 0)]) } == 0 {
            return Err(errno::inprogress());
        }
        let mut done = None;
        let look = || {
            self.cq.poll(|completion| done = Some(completion.status));
            done
        };
        match self.wake.find(PATIENCE_MS, || self.cq.arm(), look) {
            Ok(Status::Success) => self.found(),
            _ => Err(self.give_up()),
        }
    }

    /// What the word was.
    fn found(&self) -> Result<u64> {
        let mut bytes = [0; WORD as usize];
        self.word.for_cpu(0, bytes.len());
        self.word.read(0, &mut bytes)?;
        Ok(u64::from_ne_bytes(bytes))
    }

    /// Ends the operation, whether or not it was done.
    fn give_up(&self) -> Error {
        if self.qp.reset().is_err() {
            // The hardware may go on using it.
            core::mem::forget(self.word.clone());
        }
        ETIMEDOUT
    }
}

struct State {
    /// Nothing before somebody wants something, or after that failed.
    desk: Option<Desk>,
    /// Since something failed nothing is tried until then: those who wait would do so one after the other.
    pause: Option<Deadline>,
}

/// What does them, once somebody wants one.
#[pin_data]
pub(super) struct Atomics {
    #[pin]
    state: Mutex<State>,
}

impl Atomics {
    pub(super) fn new() -> impl PinInit<Self> {
        let state = State {
            desk: None,
            pause: None,
        };
        pin_init!(Self { state <- new_mutex!(state) })
    }

    fn change(&self, fabric: &Fabric, hca: &Arc<Hca>, remote: Remote, verb: Verb) -> Result<u64> {
        let mut state = self.state.lock();
        if state.pause.is_some_and(|pause| !pause.passed()) {
            return Err(errno::inprogress());
        }
        let desk = state.desk.take();
        let desk = desk.map_or_else(|| Desk::new(fabric, hca), Ok);
        let changed = desk.map_err(|_| errno::inprogress()).and_then(|desk| {
            let was = desk.change(remote, verb)?;
            Ok((desk, was))
        });
        match changed {
            Ok((desk, was)) => {
                state.desk = Some(desk);
                Ok(was)
            }
            Err(error) => {
                state.pause = Some(Deadline::after_ms(PAUSE_MS));
                Err(error)
            }
        }
    }
}

/// An atomic operation as a request, if RNICs have it.
fn verb(atomic: Atomic) -> Option<Verb> {
    match atomic {
        Atomic::FetchAdd { operand } => Some(Verb::FetchAdd { operand }),
        Atomic::CompareSwap { expected, operand } => Some(Verb::CompareSwap {
            expected,
            new: operand,
        }),
        Atomic::Swap { .. } => None,
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
    pub(crate) fn change_registered(
        &self,
        memory: &Memory,
        addr: u64,
        atomic: Atomic,
    ) -> Result<u64> {
        if let Some(hca) = &self.hca {
            let verb = verb(atomic).ok_or(EINVAL)?;
            let key = memory.record.rkey;
            return self.atomics.change(self, hca, Remote { addr, key }, verb);
        }
        if self.device().has_atomics() {
            return Err(ENXIO);
        }
        memory.change(addr, atomic)
    }

    /// Gives up what is connected to our present address. Nobody may be about to change anything.
    pub(crate) fn end_atomics(&self) {
        self.atomics.state.lock().desk = None;
    }
}
