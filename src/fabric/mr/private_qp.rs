// SPDX-License-Identifier: GPL-2.0

//! QP for work requests of one thread at a time, which waits for each of them.
//!
//! # Recovery
//!
//! The owner destroys the QP after a failure, and creates another for the next request.
//!
//! # Locking
//!
//! The owner serializes the requests by its own mutex.

use crate::{
    fabric::recv::wake::ThreadWaker,
    mlx5::cq::Mlx5Cq,
    verbs::cq::{Cq, WcStatus},
};
use kernel::{prelude::*, sync::Arc};

/// Entries of the CQ: for one work request at a time, and a spare entry.
pub(super) const CQ_ENTRIES: u32 = 2;

/// CQ that a waiting thread polls and arms.
pub(super) trait PolledCq {
    /// Takes the completions, and returns the status of the last one.
    fn poll_status(&self) -> Option<WcStatus>;

    /// Requests a notification for the next completion.
    fn arm(&self);
}

impl PolledCq for Cq<ThreadWaker> {
    fn poll_status(&self) -> Option<WcStatus> {
        let mut status = None;
        self.poll(|completion| status = Some(completion.status));
        status
    }

    fn arm(&self) {
        // The waiter polls again after arming, which covers missed completions.
        let _ = Cq::arm(self);
    }
}

impl PolledCq for Mlx5Cq<ThreadWaker> {
    fn poll_status(&self) -> Option<WcStatus> {
        let mut status = None;
        self.poll(|completion| status = Some(completion.status));
        status
    }

    fn arm(&self) {
        Mlx5Cq::arm(self);
    }
}

/// QP, its CQ, and the thread that waits for completions.
pub(super) struct PrivateQp<Q, C> {
    // Fields drop in this order: the QP is destroyed before its CQ.
    pub(super) qp: Q,
    cq: Arc<C>,
    waker: Arc<ThreadWaker>,
}

impl<Q, C: PolledCq> PrivateQp<Q, C> {
    /// Creates the CQ, then the QP.
    pub(super) fn new(
        create_cq: impl FnOnce(Arc<ThreadWaker>) -> Result<Arc<C>>,
        create_qp: impl FnOnce(&Arc<C>) -> Result<Q>,
    ) -> Result<Self> {
        let waker = ThreadWaker::new()?;
        let cq = create_cq(waker.clone())?;
        let qp = create_qp(&cq)?;
        Ok(Self { qp, cq, waker })
    }

    /// Waits for the completion of the posted work request. Returns its status.
    ///
    /// # Errors
    ///
    /// - `ETIMEDOUT`: no completion within `timeout_ms`.
    pub(super) fn wait(&self, timeout_ms: u32) -> Result<WcStatus> {
        self.waker
            .wait_for(timeout_ms, || self.cq.arm(), || self.cq.poll_status())
    }
}
