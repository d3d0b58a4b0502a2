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
//! If the QP fails, [`InflightOp::complete`] reports the failure to the connection and to the guard, and
//! returns a [`FailedOp`]. The caller repeats the segment on the same connection.

pub(crate) use super::slots::SLOT_BUFFER_BYTES;
use super::{
    sgl::{SglSplitter, WrLimits},
    slots::{AttachedMemory, SlotClass, SlotGuard, MAX_WRS_PER_SLOT},
};
use crate::{
    fabric::{
        conn::{
            credit::{ConnCredit, StaleQp},
            Conn,
        },
        qos::{tenant::Tenant, LatencyProbe},
        Fabric,
    },
    stats::Stats,
    sys::{buffer::Buffer, deadline::Deadline},
    trace,
    verbs::{
        cq::WcStatus,
        dma::RequestDmaMap,
        work::{RdmaOpcode, Sge, MAX_SGE},
    },
};
use kernel::{
    page::PAGE_SIZE,
    prelude::*,
    sync::Arc,
    time::{Instant, Monotonic},
};
use kite_core::view::NodeInstance;

/// Maximum bytes of a segment. An RNIC with short scatter-gather lists has a lower limit.
const MAX_SEGMENT_BYTES: usize = 1 << 20;

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

/// Segment whose QP failed, possibly because of the segment itself.
///
/// The segment may be repeated only on `conn`. A new QP there guarantees that the first attempt delivers
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
        self.conn.acquire(1, 0, Some(deadline)).map(drop)
    }
}

impl<G: InflightGuard> InflightOp<G> {
    /// Waits until the local RNIC has completed the segment, and returns the status. On failure, reports the
    /// QP to the connection and to the guard.
    pub(in crate::fabric) fn wait(&self) -> WcStatus {
        let status = self.slot.wait(|recovery| self.credit.recover(recovery));
        if status != WcStatus::Success {
            self.credit.report_failure(status);
            self.guard
                .add_stale_qp(self.credit.stale_qp(self.segment.instance));
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

    /// Counts a retry, and returns the segment for repetition.
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

/// Posts segments between `buffer` and other nodes, in one direction.
#[derive(Clone, Copy)]
pub(crate) struct SegmentPoster<'a> {
    pub(crate) fabric: &'a Fabric,
    pub(crate) direction: Direction,
    pub(crate) buffer: &'a Buffer,
    pub(crate) tenant: &'a Tenant,
}

impl SegmentPoster<'_> {
    /// Posts a segment. Returns `None` if the memory of the caller is not present.
    ///
    /// Without a deadline, does not wait, and also returns `None` if no credit or slot is available.
    /// If the RNIC rejects a work request, the segment completes as failed.
    ///
    /// # Errors
    ///
    /// - `EIO`: the segment needs too many work requests after a reconnect with a smaller MTU.
    /// - `EFAULT`: the memory of the caller is invalid.
    /// - `ENOMEM`: no memory for the DMA mapping.
    /// - The error of `acquire_guard`.
    /// - See [`Conn::acquire`] for errors of the connection.
    pub(crate) fn post_segment<G: InflightGuard>(
        &self,
        conn: &Arc<Conn>,
        segment: Segment,
        acquire_guard: impl FnOnce() -> Result<G>,
        deadline: Option<Deadline>,
    ) -> Result<Option<InflightOp<G>>> {
        let posted = if segment.fits_slot_buffer() {
            self.post_bounced(conn, segment, acquire_guard, deadline)
        } else {
            self.post_zero_copy(conn, segment, acquire_guard, deadline)
        };
        match posted {
            Ok(op) => Ok(Some(op)),
            Err(error) if error == EAGAIN => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Posts a short segment through the buffer of the slot. Returns `EAGAIN` instead of waiting or faulting.
    fn post_bounced<G: InflightGuard>(
        &self,
        conn: &Arc<Conn>,
        segment: Segment,
        acquire_guard: impl FnOnce() -> Result<G>,
        deadline: Option<Deadline>,
    ) -> Result<InflightOp<G>> {
        let limits = self.wr_limits(conn);
        let wr_count = limits.max_wrs(1, segment.len) as u32;
        // Start before the waits for credits and a slot: requests of other tenants cause these delays, too.
        let probe = self.tenant.start_probe(segment.len);
        let credit = conn.acquire_segment(wr_count, self.fabric, deadline)?;
        let slot = self
            .fabric
            .send_engine()
            .acquire_slot(SlotClass::Data, deadline)?;
        if self.direction == Direction::Write {
            self.buffer
                .try_copy_to_pages(slot.buffer(), 0, segment.buffer_offset, segment.len)?;
        }
        let guard = acquire_guard()?;
        let wr = self
            .direction
            .bounce_sge(self.fabric, &credit, &slot, 0, segment.len);
        let (verb, sge) = wr.ok_or(EINVAL)?;
        slot.buffer().sync_for_device(segment.len);
        if verb == RdmaOpcode::WriteInline {
            // SAFETY: The work request names the buffer of `slot`, which is kernel memory.
            if unsafe { credit.write_inline(&slot, &[sge], segment.addr) }.is_err() {
                slot.mark_failed();
            }
        } else {
            let sges = SglSplitter::new(Some(sge).into_iter(), limits);
            // SAFETY: `sges` names the buffer of `slot`.
            unsafe { self.post_wrs(&credit, &slot, sges, segment) };
        }
        Ok(InflightOp {
            slot,
            credit,
            guard,
            segment,
            probe,
        })
    }

    /// Posts a long segment directly from or to the pages of the caller. Returns `EAGAIN` instead of waiting
    /// or faulting.
    fn post_zero_copy<G: InflightGuard>(
        &self,
        conn: &Arc<Conn>,
        segment: Segment,
        acquire_guard: impl FnOnce() -> Result<G>,
        deadline: Option<Deadline>,
    ) -> Result<InflightOp<G>> {
        let writable = self.direction == Direction::Read;
        let pinned = self
            .buffer
            .try_pin(segment.buffer_offset, segment.len, writable)?;
        let mapped = RequestDmaMap::new(self.fabric.device(), pinned, writable)?;
        let mapped = KBox::new(mapped, GFP_KERNEL)?;
        let limits = self.wr_limits(conn);
        let wr_count = limits.max_wrs(mapped.len(), segment.len);
        if wr_count > MAX_WRS_PER_SLOT as usize {
            // The connection was reestablished with a smaller MTU than the segment was split for.
            return Err(EIO);
        }
        let probe = self.tenant.start_probe(segment.len);
        let credit = conn.acquire_segment(wr_count as u32, self.fabric, deadline)?;
        let mut slot = self
            .fabric
            .send_engine()
            .acquire_slot(SlotClass::Data, deadline)?;
        slot.attach(AttachedMemory::User(mapped));
        let guard = acquire_guard()?;
        let sges = slot.attached_sges(self.fabric.local_key());
        // SAFETY: `sges` names the memory that is attached to `slot`.
        unsafe { self.post_wrs(&credit, &slot, SglSplitter::new(sges, limits), segment) };
        Ok(InflightOp {
            slot,
            credit,
            guard,
            segment,
            probe,
        })
    }

    /// Returns the limits of one work request on `conn`.
    pub(in crate::fabric) fn wr_limits(&self, conn: &Conn) -> WrLimits {
        let one_packet =
            self.direction == Direction::Read && self.fabric.device().needs_single_packet_reads();
        WrLimits {
            max_sges: self.fabric.max_sges(),
            max_bytes: one_packet.then(|| conn.mtu()),
        }
    }

    /// Returns the maximum bytes of a segment on `conn`. Without a byte limit, each page may need one SGE,
    /// and the first page may be partial.
    pub(in crate::fabric) fn max_segment_bytes(&self, conn: &Conn) -> usize {
        let (limits, max_wrs) = (self.wr_limits(conn), MAX_WRS_PER_SLOT as usize);
        MAX_SEGMENT_BYTES.min(match limits.max_bytes {
            Some(bytes) => max_wrs * bytes,
            None => (max_wrs * limits.max_sges - 1) * PAGE_SIZE,
        })
    }

    /// Posts the work requests of a segment. If the RNIC rejects one, the segment completes as failed.
    ///
    /// # Safety
    ///
    /// The entries of `splitter` must name the buffer of `slot`, or memory attached to `slot`.
    unsafe fn post_wrs<I: Iterator<Item = Sge>>(
        &self,
        credit: &ConnCredit,
        slot: &SlotGuard,
        mut splitter: SglSplitter<I>,
        segment: Segment,
    ) {
        let mut sgl = [Sge::new(0, 0, 0); MAX_SGE];
        let mut addr = segment.addr;
        loop {
            let sges = splitter.next_sgl(&mut sgl);
            if sges.is_empty() {
                return;
            }
            // SAFETY: The caller guarantees that `sges` names the buffer of `slot` or memory attached to
            // `slot`.
            let posted = unsafe {
                match self.direction {
                    Direction::Write => credit.write(slot, sges, addr),
                    Direction::Read => credit.read(slot, sges, addr),
                }
            };
            if posted.is_err() {
                return slot.mark_failed();
            }
            addr += sges.iter().map(|sge| u64::from(sge.len())).sum::<u64>();
        }
    }
}

/// Copies the data of a bounced READ from `bounce_offset` in the buffer of `slot` to the memory of the
/// caller. Does nothing for a WRITE or a long segment.
///
/// # Errors
///
/// - `EAGAIN`: the memory of the caller is not present.
/// - `EFAULT`: the memory of the caller is invalid.
pub(crate) fn copy_out(
    direction: Direction,
    buffer: &Buffer,
    slot: &SlotGuard,
    segment: Segment,
    bounce_offset: usize,
) -> Result {
    if direction == Direction::Write || !segment.fits_slot_buffer() {
        return Ok(());
    }
    slot.buffer().sync_for_cpu(bounce_offset, segment.len);
    buffer.try_copy_from_pages(
        slot.buffer(),
        bounce_offset,
        segment.buffer_offset,
        segment.len,
    )
}

impl Fabric {
    /// Returns the maximum scatter-gather entries of one work request.
    fn max_sges(&self) -> usize {
        (self.device().limits().max_send_sge as usize).clamp(1, MAX_SGE)
    }
}
