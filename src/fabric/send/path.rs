// SPDX-License-Identifier: GPL-2.0

//! What carries requests of a virtual queue pair: an initiator of DC, or a connection.

use super::slots::{Recovery, SlotGuard, STUCK_AFTER_MS};
use crate::{
    fabric::{conn::credit::ConnCredit, dc::DciCredit},
    mlx5::wr::{DcAddress, Mlx5SendWr},
    verbs::{
        cq::WcStatus,
        work::{OwnedSendWr, RdmaOp},
    },
};
use kernel::prelude::*;
use kite_core::view::NodeInstance;

/// Bytes in a millisecond that the slowest network moves.
const MIN_LINK_BYTES_PER_MS: u64 = 1 << 10;

/// The right to post a number of requests.
pub(crate) enum PostCredit {
    Dc(DciCredit),
    Rc(ConnCredit),
}

impl PostCredit {
    /// Posts requests that were announced, with one doorbell; `way` is that to the peer by DC. Those that are refused
    /// make the claim fail.
    ///
    /// # Safety
    ///
    /// The local memory that they name must be mapped for as long as `claim` has requests under way.
    ///
    /// # Errors
    ///
    /// `EINVAL` without a way, `ENOMEM`.
    pub(crate) unsafe fn post(
        &self,
        slot: &SlotGuard,
        dc_address: Option<&DcAddress>,
        ops: &[RdmaOp<'_>],
    ) -> Result {
        match self {
            // SAFETY: By the safety requirements.
            Self::Dc(credit) => unsafe { credit.post_ops(slot, dc_address.ok_or(EINVAL)?, ops) },
            // SAFETY: By the safety requirements.
            Self::Rc(credit) => unsafe { credit.post_ops(slot, ops) },
        }
    }

    /// Reports how a request to `peer` failed, and with it what carried it.
    pub(crate) fn report_failure(&self, status: WcStatus, peer: NodeInstance) {
        match self {
            Self::Dc(credit) => credit.report_failure(status, peer),
            Self::Rc(credit) => credit.report_failure(status),
        }
    }

    /// Whether it takes longer than any RNIC should until anybody's requests end by it.
    pub(crate) fn has_timed_out(&self) -> bool {
        let (last_progress, bytes) = match self {
            Self::Dc(credit) => credit.last_progress(),
            Self::Rc(credit) => credit.conn.last_progress(),
        };
        let timeout_ms = i64::from(STUCK_AFTER_MS) + (bytes / MIN_LINK_BYTES_PER_MS) as i64;
        last_progress.elapsed().as_millis() > timeout_ms
    }

    /// Whether nobody has given up what carries them.
    pub(crate) fn is_healthy(&self) -> bool {
        match self {
            Self::Dc(credit) => credit.failed_by().is_none(),
            Self::Rc(credit) => credit.is_current(),
        }
    }

    /// Gives up what carries them, for want of completions.
    pub(crate) fn recover(&self, recovery: Recovery) -> Result {
        match self {
            Self::Dc(credit) => credit.recover(recovery),
            Self::Rc(credit) => credit.recover(recovery),
        }
    }
}

impl DciCredit {
    /// # Safety
    ///
    /// As for [`Carrier::post`].
    unsafe fn post_ops(
        &self,
        slot: &SlotGuard,
        dc_address: &DcAddress,
        ops: &[RdmaOp<'_>],
    ) -> Result {
        let to_wr = |op| Mlx5SendWr::new_dc(op, slot.wr_id(), dc_address);
        // SAFETY: By the safety requirements.
        let post = |wrs: &[Mlx5SendWr<'_>]| unsafe { self.post(slot, wrs) };
        match ops {
            // Most are alone.
            [op] => post(&[to_wr(op)]),
            [first, second] => post(&[to_wr(first), to_wr(second)]),
            _ => {
                let mut wrs = KVec::with_capacity(ops.len(), GFP_KERNEL)?;
                for op in ops {
                    wrs.push(to_wr(op), GFP_KERNEL)?;
                }
                post(&wrs);
            }
        }
        Ok(())
    }
}

impl ConnCredit {
    /// # Safety
    ///
    /// As for [`Carrier::post`].
    unsafe fn post_ops(&self, slot: &SlotGuard, ops: &[RdmaOp<'_>]) -> Result {
        let to_wr = |op| OwnedSendWr::from_op(op, slot.wr_id());
        let post = |wrs: &mut [OwnedSendWr]| {
            slot.account_post(wrs.len() as u32);
            // SAFETY: By the safety requirements.
            let posted = unsafe { self.endpoint.qp().post_list(wrs) };
            (posted..wrs.len()).for_each(|_| slot.complete_unposted());
        };
        if let [op] = ops {
            post(&mut [to_wr(op)]);
            return Ok(());
        }
        let mut wrs = KVec::with_capacity(ops.len(), GFP_KERNEL)?;
        for op in ops {
            wrs.push(to_wr(op), GFP_KERNEL)?;
        }
        post(&mut wrs);
        Ok(())
    }
}
