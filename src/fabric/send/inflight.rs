// SPDX-License-Identifier: GPL-2.0

//! One part of a read or write: how it is posted, and what came of it.
//!
//! A part is within one node's contiguous memory. A short one goes through the buffer of its slot, a long one
//! straight from and to the caller's pages, pinned for as long as it takes. Posting waits for nothing unless
//! it is given a deadline, so who must not wait can move short parts too, and look now and then for their end.

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

/// Longest part, unless the RNIC's scatter lists are too short for it.
const MAX_SEGMENT_BYTES: usize = 1 << 20;

/// Time after which somebody should wait for what was posted.
const POLLED_STUCK_AFTER_MS: i64 = 1000;

/// Which way the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// From the region to the caller.
    Read,
    /// From the caller to the region.
    Write,
}

impl Direction {
    /// What to do with memory that goes that way.
    pub(in crate::fabric) fn verb(self) -> RdmaOpcode {
        match self {
            Self::Read => RdmaOpcode::Read,
            Self::Write => RdmaOpcode::Write,
        }
    }

    /// What to do with `len` bytes at `place` of the buffer of a claim. Returns nothing if they are not all there.
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

/// Contiguous memory of one node in one life, and where in the caller's buffer its bytes go or come from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment {
    pub(crate) instance: NodeInstance,
    pub(crate) addr: u64,
    pub(crate) len: usize,
    pub(crate) buffer_offset: usize,
}

impl Segment {
    /// Cuts off the first `len` bytes, or takes all if there are no more.
    pub(in crate::fabric) fn split_front(&mut self, len: usize) -> Self {
        let len = len.min(self.len);
        let front = Self { len, ..*self };
        self.addr += len as u64;
        self.buffer_offset += len;
        self.len -= len;
        front
    }

    /// Whether it fits the buffer of a slot.
    pub(crate) fn fits_slot_buffer(&self) -> bool {
        self.len <= SLOT_BUFFER_BYTES
    }
}

/// What allows a part to be under way.
pub(crate) trait InflightGuard {
    /// The part's queue pair failed. The memory that it is for must not be another's before that is over.
    fn add_stale_qp(&self, stale_qp: StaleQp);
}

/// A part that has been posted, and has to be waited for. Who waits for room looks for a slot first, so that
/// is given back first.
pub(crate) struct InflightOp<G> {
    pub(in crate::fabric) slot: SlotGuard,
    pub(in crate::fabric) credit: ConnCredit,
    pub(in crate::fabric) guard: G,
    pub(in crate::fabric) segment: Segment,
    /// How long it takes, if somebody wants to know.
    pub(in crate::fabric) probe: Option<LatencyProbe>,
}

/// A part whose queue pair failed, perhaps by what it asked for, and the connection on which it may be
/// done again: only there is it certain that the first attempt delivers nothing any more.
#[derive(Clone)]
pub(crate) struct FailedOp {
    pub(in crate::fabric) segment: Segment,
    pub(in crate::fabric) conn: Arc<Conn>,
    /// Times that it was refused.
    pub(in crate::fabric) rejections: u32,
}

impl FailedOp {
    /// Waits until what it sent can reach the peer's memory no more.
    ///
    /// # Errors
    ///
    /// As for [`Conn::begin`].
    pub(crate) fn wait_qp_replaced(&self, deadline: Deadline) -> Result {
        self.conn.acquire(1, 0, Some(deadline)).map(drop)
    }
}

impl<G: InflightGuard> InflightOp<G> {
    /// Waits until nothing of it is under way at this node. If its queue pair failed, says so to all who
    /// have to know.
    pub(in crate::fabric) fn wait(&self) -> WcStatus {
        let status = self.slot.wait(|recovery| self.credit.recover(recovery));
        if status != WcStatus::Success {
            self.credit.report_failure(status);
            self.guard
                .add_stale_qp(self.credit.stale_qp(self.segment.instance));
        }
        status
    }

    /// Waits for it. What a short read brought is given to `deliver`. Returns the part if its queue pair
    /// failed.
    ///
    /// # Errors
    ///
    /// `EIO` if the RNIC does not let go of it; those of `deliver`.
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

    /// As [`Self::settle`], of parts that were posted together, but `deliver` is told how many of all requests
    /// succeeded, which are the first ones, also if the queue pair failed.
    ///
    /// # Errors
    ///
    /// `EIO` if the RNIC does not let go of them.
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

/// A flight that nobody waits for: somebody looks after it. Dropping it waits for it.
pub(crate) struct PolledOp<G: InflightGuard> {
    /// Nothing once it was settled.
    op: Option<InflightOp<G>>,
    posted_at: Instant<Monotonic>,
}

impl<G: InflightGuard> PolledOp<G> {
    /// Watches from now on.
    pub(crate) fn new(op: InflightOp<G>, now: Instant<Monotonic>) -> Self {
        Self {
            op: Some(op),
            posted_at: now,
        }
    }

    /// Looks for completions of everybody.
    pub(crate) fn poll_cq(&self) {
        if let Some(op) = &self.op {
            op.slot.poll_cq();
        }
    }

    /// Whether all its requests have completed.
    pub(crate) fn is_done(&self) -> bool {
        let op = self.op.as_ref();
        op.is_none_or(|op| op.slot.is_done())
    }

    /// Whether it takes so long by now that somebody should wait for it, who makes its queue pair fail in the end.
    pub(crate) fn is_stuck(&self, now: Instant<Monotonic>) -> bool {
        (now - self.posted_at).as_millis() > POLLED_STUCK_AFTER_MS
    }

    /// As [`Flight::settle`].
    ///
    /// # Errors
    ///
    /// As there.
    pub(crate) fn complete(
        mut self,
        stats: &Stats,
        on_complete: impl FnOnce(&SlotGuard, Segment) -> Result,
    ) -> Result<Option<FailedOp>> {
        let op = self.op.take().ok_or(EIO)?;
        op.complete(stats, on_complete)
    }

    /// As [`Flight::settle_batch`].
    ///
    /// # Errors
    ///
    /// As there.
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

/// Moves parts between `memory` and other nodes, one way.
#[derive(Clone, Copy)]
pub(crate) struct SegmentPoster<'a> {
    pub(crate) fabric: &'a Fabric,
    pub(crate) direction: Direction,
    pub(crate) buffer: &'a Buffer,
    pub(crate) tenant: &'a Tenant,
}

impl SegmentPoster<'_> {
    /// Posts a part. Without a deadline it waits for nothing, and returns nothing if it would have to;
    /// with one, it returns nothing if the caller's memory is not present. Requests that the RNIC refuses
    /// make the part fail when it lands.
    ///
    /// # Errors
    ///
    /// Those of `permit`, and as for [`Conn::begin`]; `EIO`, `ENOMEM`.
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

    /// Posts a short part, by way of the slot's buffer.
    fn post_bounced<G: InflightGuard>(
        &self,
        conn: &Arc<Conn>,
        segment: Segment,
        acquire_guard: impl FnOnce() -> Result<G>,
        deadline: Option<Deadline>,
    ) -> Result<InflightOp<G>> {
        let limits = self.wr_limits(conn);
        let wr_count = limits.max_wrs(1, segment.len) as u32;
        // What it waits for is others', too.
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
            // SAFETY: The request names the claim's buffer.
            if unsafe { credit.write_inline(&slot, &[sge], segment.addr) }.is_err() {
                slot.mark_failed();
            }
        } else {
            let sges = SglSplitter::new(Some(sge).into_iter(), limits);
            // SAFETY: As above.
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

    /// Posts a long part, straight from or to the caller's pages.
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
            // Connected anew, and to smaller packets than it was cut for.
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
        // SAFETY: The entries name memory that the claim holds.
        unsafe { self.post_wrs(&credit, &slot, SglSplitter::new(sges, limits), segment) };
        Ok(InflightOp {
            slot,
            credit,
            guard,
            segment,
            probe,
        })
    }

    /// What a request to `conn` may have.
    pub(in crate::fabric) fn wr_limits(&self, conn: &Conn) -> WrLimits {
        let one_packet =
            self.direction == Direction::Read && self.fabric.device().needs_single_packet_reads();
        WrLimits {
            max_sges: self.fabric.max_sges(),
            max_bytes: one_packet.then(|| conn.mtu()),
        }
    }

    /// Bytes of a part to `conn`. Without a bound on bytes each page may need an entry, and the first may be
    /// cut.
    pub(in crate::fabric) fn max_segment_bytes(&self, conn: &Conn) -> usize {
        let (limits, max_wrs) = (self.wr_limits(conn), MAX_WRS_PER_SLOT as usize);
        MAX_SEGMENT_BYTES.min(match limits.max_bytes {
            Some(bytes) => max_wrs * bytes,
            None => (max_wrs * limits.max_sges - 1) * PAGE_SIZE,
        })
    }

    /// Posts the requests for a part. If the RNIC refuses one, the part fails when it lands.
    ///
    /// # Safety
    ///
    /// `sges` must name the buffer of `claim`, or memory that it holds.
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
            // SAFETY: By the safety requirements.
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

/// Copies what a short read brought to `place` of its buffer to the caller's memory.
///
/// # Errors
///
/// `EAGAIN` if that is not present; `EFAULT`.
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
    /// Scatter-gather entries of a request.
    fn max_sges(&self) -> usize {
        (self.device().limits().max_send_sge as usize).clamp(1, MAX_SGE)
    }
}
