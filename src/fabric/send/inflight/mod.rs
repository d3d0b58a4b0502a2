// SPDX-License-Identifier: GPL-2.0

//! Posting and completion of one segment of a read or write.
//!
//! # Operation
//!
//! A segment is contiguous memory of one node. A short segment is copied through the buffer of its slot
//! (bounced). A long segment is transferred directly from or to the pages of the caller (zero copy), which
//! stay pinned until completion. Posting waits only if the caller passes a deadline. A context that must not
//! wait can therefore post short segments, and poll for completion ([`PolledOp`]).
//!
//! # Recovery
//!
//! If the QP fails, [`InflightOp::complete`] reports the failure to the connection and to the
//! [`InflightGuard`] of the operation, and returns a [`FailedOp`]. The caller retries the segment on the same
//! connection.

mod poster;

pub(crate) use self::poster::{copy_out, SegmentPoster};
pub(crate) use super::slots::SLOT_BUFFER_BYTES;

use super::slots::SlotGuard;
use crate::{
    fabric::{
        conn::{
            credit::{ConnCredit, StaleQp},
            Conn,
        },
        qos::LatencyProbe,
        Fabric,
    },
    stats::Stats,
    sys::deadline::Deadline,
    trace,
    verbs::{
        cq::WcStatus,
        work::{RdmaOpcode, Sge},
    },
};
use kernel::{
    prelude::*,
    sync::Arc,
    time::{Instant, Monotonic},
};
use kite_core::view::NodeInstance;

/// Age of a polled operation, in ms, after which a thread must wait for the operation.
const POLLED_STUCK_AFTER_MS: i64 = 1000;

/// Direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// From the region to the caller.
    Read,
    /// From the caller to the region.
    Write,
}

impl Direction {
    /// Returns the opcode of a zero-copy work request.
    pub(in crate::fabric) fn verb(self) -> RdmaOpcode {
        match self {
            Self::Read => RdmaOpcode::Read,
            Self::Write => RdmaOpcode::Write,
        }
    }

    /// Returns the opcode and the SGE for `len` bytes at `bounce_offset` in the buffer of `slot`. A short
    /// WRITE is inline. Returns `None` if the range exceeds the buffer.
    pub(in crate::fabric) fn bounce_sge(
        self,
        fabric: &Fabric,
        credit: &ConnCredit,
        slot: &SlotGuard,
        bounce_offset: usize,
        len: usize,
    ) -> Option<(RdmaOpcode, Sge)> {
        let buffer = slot.buffer();
        if self == Self::Write && len <= credit.inline_max() {
            let addr = buffer.as_ptr().wrapping_add(bounce_offset);
            return Some((
                RdmaOpcode::WriteInline,
                Sge::new(addr as u64, len as u32, 0),
            ));
        }
        Some((
            self.verb(),
            buffer.sge(fabric.local_key(), bounce_offset, len)?,
        ))
    }
}

/// Contiguous memory of one node incarnation, and the corresponding range of the caller's buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment {
    pub(crate) instance: NodeInstance,
    /// Address at the node.
    pub(crate) addr: u64,
    pub(crate) len: usize,
    /// Offset in the buffer of the caller, in bytes.
    pub(crate) buffer_offset: usize,
}

impl Segment {
    /// Removes the first `len` bytes, or all bytes if the segment is shorter, and returns them as a segment.
    pub(in crate::fabric) fn split_front(&mut self, len: usize) -> Self {
        let len = len.min(self.len);
        let front = Self { len, ..*self };
        self.addr += len as u64;
        self.buffer_offset += len;
        self.len -= len;
        front
    }

    /// Returns `true` if the segment fits the buffer of a slot.
    pub(crate) fn fits_slot_buffer(&self) -> bool {
        self.len <= SLOT_BUFFER_BYTES
    }
}

/// Guard that permits a segment to be in flight. Held until the segment has completed.
pub(crate) trait InflightGuard {
    /// Records that the QP of the segment failed. The implementer must not let the target memory be reused
    /// until the QP is fenced ([`StaleQp::is_fenced`]).
    fn add_stale_qp(&self, stale_qp: StaleQp);
}

/// Posted segment. The owner must call [`Self::wait`] or one of the `complete` functions.
///
/// The order of the fields is the drop order. The slot is freed before the credit, since a waiter woken by
/// the credit checks the number of free slots.
pub(crate) struct InflightOp<G> {
    pub(in crate::fabric) slot: SlotGuard,
    pub(in crate::fabric) credit: ConnCredit,
    pub(in crate::fabric) guard: G,
    pub(in crate::fabric) segment: Segment,
    /// Latency measurement, if the low-priority class is throttled.
    pub(in crate::fabric) probe: Option<LatencyProbe>,
}

/// Segment that failed with its QP. The segment itself may be the cause.
///
/// The segment may be retried only on `conn`. A new QP there guarantees that the first attempt delivers
/// nothing more.
#[derive(Clone)]
pub(crate) struct FailedOp {
    pub(in crate::fabric) segment: Segment,
    pub(in crate::fabric) conn: Arc<Conn>,
    /// Number of attempts that the peer or the local RNIC rejected.
    pub(in crate::fabric) rejections: u32,
}

impl FailedOp {
    /// Waits until the failed QP is replaced: requests of the old QP can no longer reach the memory of the
    /// peer.
    ///
    /// # Errors
    ///
    /// See [`Conn::acquire`].
    pub(crate) fn wait_qp_replaced(&self, deadline: Deadline) -> Result {
        self.conn.acquire(1, Some(deadline))?;
        Ok(())
    }
}

impl<G: InflightGuard> InflightOp<G> {
    /// Waits until the local RNIC has completed the segment, and returns the status. On failure, reports the
    /// QP to the connection and to the guard.
    pub(in crate::fabric) fn wait(&self) -> WcStatus {
        let status = self.slot.wait(|recovery| self.credit.recover(recovery));
        if status != WcStatus::Success {
            self.credit.report_failure(status);
            self.guard.add_stale_qp(self.credit.stale_qp());
        }
        status
    }

    /// Waits for the segment, and calls `on_complete` on success. Returns the failed operation if the QP
    /// failed.
    ///
    /// # Errors
    ///
    /// - `EIO`: the segment did not complete, and QP recovery failed.
    /// - The error of `on_complete`.
    pub(crate) fn complete(
        self,
        stats: &Stats,
        on_complete: impl FnOnce(&SlotGuard, Segment) -> Result,
    ) -> Result<Option<FailedOp>> {
        match self.wait() {
            WcStatus::Success => {
                if let Some(probe) = self.probe {
                    probe.finish();
                }
                on_complete(&self.slot, self.segment).map(|()| None)
            }
            WcStatus::TimedOut => Err(EIO),
            status => Ok(Some(self.failed_op(stats, status))),
        }
    }

    /// Waits for a batch, and passes the number of successful work requests to `on_complete`. Returns the
    /// failed operation if the QP failed.
    ///
    /// `on_complete` is also called if the QP failed. Work requests of a QP complete in order, so the
    /// successful ones are the first ones.
    ///
    /// # Errors
    ///
    /// - `EIO`: the batch did not complete, and QP recovery failed.
    pub(crate) fn complete_batch(
        self,
        stats: &Stats,
        on_complete: impl FnOnce(&SlotGuard, u32),
    ) -> Result<Option<FailedOp>> {
        let status = self.wait();
        if status == WcStatus::TimedOut {
            return Err(EIO);
        }
        on_complete(
            &self.slot,
            self.credit
                .wr_count
                .saturating_sub(self.slot.failed_count()),
        );
        if status != WcStatus::Success {
            return Ok(Some(self.failed_op(stats, status)));
        }
        if let Some(probe) = self.probe {
            probe.finish();
        }
        Ok(None)
    }

    /// Counts a retry, and returns the segment for it.
    fn failed_op(&self, stats: &Stats, status: WcStatus) -> FailedOp {
        let segment = self.segment;
        stats.retries.add(1);
        trace::retry(segment.instance.node, segment.len as u64, status.code());
        let is_rejected = matches!(status, WcStatus::RemoteError | WcStatus::LocalError);
        FailedOp {
            segment,
            conn: self.credit.conn.clone(),
            rejections: is_rejected.into(),
        }
    }
}

/// Operation in flight that is polled instead of waited for. Dropping waits for completion.
pub(crate) struct PolledOp<G: InflightGuard> {
    /// `None` once completed.
    op: Option<InflightOp<G>>,
    /// Time of posting.
    posted_at: Instant<Monotonic>,
}

impl<G: InflightGuard> PolledOp<G> {
    /// Wraps an operation posted at `now`.
    pub(crate) fn new(op: InflightOp<G>, now: Instant<Monotonic>) -> Self {
        Self {
            op: Some(op),
            posted_at: now,
        }
    }

    /// Polls the send CQs. Processes completions of all slots.
    pub(crate) fn poll_cq(&self) {
        if let Some(op) = &self.op {
            op.slot.poll_cq();
        }
    }

    /// Returns `true` if all work requests have completed.
    pub(crate) fn is_done(&self) -> bool {
        let op = self.op.as_ref();
        op.is_none_or(|op| op.slot.is_done())
    }

    /// Returns `true` if the operation is older than [`POLLED_STUCK_AFTER_MS`]. A thread must then wait for
    /// the operation, since only a wait starts QP recovery.
    pub(crate) fn is_stuck(&self, now: Instant<Monotonic>) -> bool {
        (now - self.posted_at).as_millis() > POLLED_STUCK_AFTER_MS
    }

    /// Completes the operation. See [`InflightOp::complete`].
    ///
    /// # Errors
    ///
    /// See [`InflightOp::complete`].
    pub(crate) fn complete(
        mut self,
        stats: &Stats,
        on_complete: impl FnOnce(&SlotGuard, Segment) -> Result,
    ) -> Result<Option<FailedOp>> {
        let op = self.op.take().ok_or(EIO)?;
        op.complete(stats, on_complete)
    }

    /// Completes the batch. See [`InflightOp::complete_batch`].
    ///
    /// # Errors
    ///
    /// See [`InflightOp::complete_batch`].
    pub(crate) fn complete_batch(
        mut self,
        stats: &Stats,
        on_complete: impl FnOnce(&SlotGuard, u32),
    ) -> Result<Option<FailedOp>> {
        let op = self.op.take().ok_or(EIO)?;
        op.complete_batch(stats, on_complete)
    }
}

impl<G: InflightGuard> Drop for PolledOp<G> {
    fn drop(&mut self) {
        if let Some(op) = self.op.take() {
            op.wait();
        }
    }
}
