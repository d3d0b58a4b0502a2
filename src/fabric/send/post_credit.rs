// SPDX-License-Identifier: GPL-2.0

//! Credit to post work requests of a VQP, either on a DCI or on an RC connection.
//!
//! # Operation
//!
//! [`PostCredit::post`] encodes the operations for the transport of the credit, and posts them with one
//! doorbell.
//!
//! # Recovery
//!
//! Work requests that the RNIC rejects complete as flushed. The credit has timed out if no request of any
//! user completed on its DCI or connection in time ([`PostCredit::has_timed_out`]). [`PostCredit::recover`]
//! then moves the QP to ERR or RESET.

use super::slots::{Recovery, SlotGuard, STUCK_AFTER_MS};
use crate::{
    errno::TryResult,
    fabric::{conn::credit::ConnCredit, dc::DciCredit},
    mlx5::wr::{DcAddress, Mlx5SendWr},
    verbs::{
        cq::WcStatus,
        work::{OwnedSendWr, RdmaOp},
    },
};
use kernel::prelude::*;
use kite_core::view::NodeInstance;

/// Lowest assumed link rate, in bytes per millisecond.
const MIN_LINK_BYTES_PER_MS: u64 = 1 << 10;

/// Credit to post a number of work requests.
pub(crate) enum PostCredit {
    /// Credit on a DCI.
    Dc(DciCredit),
    /// Credit on an RC connection.
    Rc(ConnCredit),
}

impl PostCredit {
    /// Posts `ops` with one doorbell, within the credit. `dc_address` is the DC address of the peer.
    ///
    /// `is_admitted` is called as the last step before the doorbell, with preemption disabled, and must not
    /// sleep. Drivers post without sleeping. Work requests that the RNIC rejects complete as failed on `slot`.
    ///
    /// # Safety
    ///
    /// The local memory named by `ops` must stay mapped while `slot` has work requests in flight.
    ///
    /// # Errors
    ///
    /// - `EINVAL`: the credit is for a DCI, and `dc_address` is `None`.
    /// - `ENOMEM`: no memory for the work requests.
    /// - [`TryError::WouldBlock`](crate::errno::TryError::WouldBlock): `is_admitted` returned `false`.
    pub(crate) unsafe fn post(
        &self,
        slot: &SlotGuard,
        dc_address: Option<&DcAddress>,
        ops: &[RdmaOp<'_>],
        is_admitted: impl Fn() -> bool,
    ) -> TryResult {
        match self {
            // SAFETY: The caller guarantees that the memory stays mapped.
            Self::Dc(credit) => unsafe {
                credit.post_ops(slot, dc_address.ok_or(EINVAL)?, ops, is_admitted)
            },
            // SAFETY: The caller guarantees that the memory stays mapped.
            Self::Rc(credit) => unsafe { credit.post_ops(slot, ops, is_admitted) },
        }
    }

    /// Reports that a request to `peer` failed with `status`, and marks the DCI or the QP as failed.
    pub(crate) fn report_failure(&self, status: WcStatus, peer: NodeInstance) {
        match self {
            Self::Dc(credit) => credit.report_failure(status, peer),
            Self::Rc(credit) => credit.report_failure(status),
        }
    }

    /// Returns `true` if no request of any user completed on the DCI or connection within the timeout.
    ///
    /// The timeout is [`STUCK_AFTER_MS`] plus the time of the bytes in flight at [`MIN_LINK_BYTES_PER_MS`].
    pub(crate) fn has_timed_out(&self) -> bool {
        let (last_progress, bytes) = match self {
            Self::Dc(credit) => credit.last_progress(),
            Self::Rc(credit) => credit.conn.last_progress(),
        };
        let timeout_ms = i64::from(STUCK_AFTER_MS) + (bytes / MIN_LINK_BYTES_PER_MS) as i64;
        last_progress.elapsed().as_millis() > timeout_ms
    }

    /// Returns `true` if the DCI or the QP of the credit was not reported as failed.
    pub(crate) fn is_healthy(&self) -> bool {
        match self {
            Self::Dc(credit) => credit.failed_by().is_none(),
            Self::Rc(credit) => credit.is_current(),
        }
    }

    /// Marks the DCI or the QP as failed and moves its QP to ERR or RESET, because completions are missing.
    ///
    /// # Errors
    ///
    /// The error of the state transition, if the RNIC rejects it.
    pub(crate) fn recover(&self, recovery: Recovery) -> Result {
        match self {
            Self::Dc(credit) => credit.recover(recovery),
            Self::Rc(credit) => credit.recover(recovery),
        }
    }
}

impl DciCredit {
    /// Posts `ops` on the DCI. See [`PostCredit::post`].
    ///
    /// # Safety
    ///
    /// The local memory named by `ops` must stay mapped while `slot` has work requests in flight.
    unsafe fn post_ops(
        &self,
        slot: &SlotGuard,
        dc_address: &DcAddress,
        ops: &[RdmaOp<'_>],
        is_admitted: impl Fn() -> bool,
    ) -> TryResult {
        let to_wr = |op| Mlx5SendWr::new_dc(op, slot.wr_id(), dc_address);
        // SAFETY: The caller guarantees that the memory named by `ops` stays mapped.
        let post = |wrs: &[Mlx5SendWr<'_>]| unsafe { self.post(slot, wrs, &is_admitted) };
        match ops {
            // Most calls have one operation. One or two operations need no allocation.
            [op] => post(&[to_wr(op)]),
            [first, second] => post(&[to_wr(first), to_wr(second)]),
            _ => {
                let mut wrs = KVec::with_capacity(ops.len(), GFP_KERNEL)?;
                for op in ops {
                    wrs.push(to_wr(op), GFP_KERNEL)?;
                }
                post(&wrs)
            }
        }
    }
}

impl ConnCredit {
    /// Posts `ops` on the RC QP. See [`PostCredit::post`].
    ///
    /// # Safety
    ///
    /// The local memory named by `ops` must stay mapped while `slot` has work requests in flight.
    unsafe fn post_ops(
        &self,
        slot: &SlotGuard,
        ops: &[RdmaOp<'_>],
        is_admitted: impl Fn() -> bool,
    ) -> TryResult {
        let to_wr = |op| OwnedSendWr::new(op, slot.wr_id());
        let post = |wrs: &mut [OwnedSendWr]| {
            let count = wrs.len();
            // SAFETY: The caller guarantees that the memory named by `ops` stays mapped.
            let post = || unsafe { self.endpoint.qp().post_list(wrs) };
            let posted = slot.post_if(count as u32, &is_admitted, post)?;
            (posted..count).for_each(|_| slot.complete_unposted());
            Ok(())
        };
        if let [op] = ops {
            return post(&mut [to_wr(op)]);
        }
        let mut wrs = KVec::with_capacity(ops.len(), GFP_KERNEL)?;
        for op in ops {
            wrs.push(to_wr(op), GFP_KERNEL)?;
        }
        post(&mut wrs)
    }
}
