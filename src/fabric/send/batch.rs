// SPDX-License-Identifier: GPL-2.0

//! Batch of short segments that are posted together, with one doorbell (KRCORE, section 4.4).
//!
//! # Operation
//!
//! All segments of a batch go to one peer in one direction, and share one slot and one connection credit.
//! Lookup and accounting, which take longer than a short request, are therefore done once per batch.
//! A segment in memory that is mapped for the RNIC (the arena) is transferred directly (zero copy).
//! Other segments are copied through the bounce buffer of the slot.
//!
//! # Recovery
//!
//! If the QP fails, the batch completes partially. [`InflightOp::complete_batch`] returns the number of
//! successful work requests, and [`BatchedSegment::wr_end`] determines which segments are done.

use super::{
    inflight::{Direction, InflightGuard, InflightOp, PolledOp, Segment, SegmentPoster},
    sgl::{SglSplitter, WrLimits},
    slots::{AttachedMemory, SlotClass, SLOT_BUFFER_BYTES},
};
use crate::{
    errno::TryResult,
    fabric::{conn::Conn, Fabric},
    sys::buffer::Buffer,
    verbs::{
        dma::LongTermDmaMap,
        work::{OwnedSendWr, RdmaOp, RdmaOpcode, RemoteAddr, Sge, OWNED_WR_MAX_SGE},
    },
};
use kernel::{
    page::PAGE_SIZE,
    prelude::*,
    sync::Arc,
    time::{Instant, Monotonic},
};
use kite_core::view::NodeInstance;

/// Maximum work requests of a batch.
pub(crate) const MAX_BATCH_WRS: usize = 16;

/// Maximum bytes of a zero-copy segment in a batch.
pub(crate) const ZERO_COPY_MAX_BYTES: usize = 1 << 16;

/// Alignment of segments in the bounce buffer, in bytes. No two segments share a cache line that the RNIC
/// writes.
const BOUNCE_ALIGN_BYTES: usize = 64;

/// Work requests of a batch before posting. Reused for later batches.
#[derive(Default)]
pub(crate) struct WrChain(KVec<OwnedSendWr>);

impl WrChain {
    /// Creates an empty chain with capacity for [`MAX_BATCH_WRS`].
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: no memory for the chain.
    pub(crate) fn new() -> Result<Self> {
        Ok(Self(KVec::with_capacity(MAX_BATCH_WRS, GFP_KERNEL)?))
    }
}

/// Segment that was added to a batch.
#[derive(Clone, Copy)]
pub(crate) struct BatchedSegment {
    pub(crate) segment: Segment,
    /// Offset in the bounce buffer; `None` for a zero-copy segment.
    pub(crate) bounce_offset: Option<usize>,
    /// Number of work requests of the batch up to and including the last one of the segment.
    pub(crate) wr_end: u32,
}

/// Batch under construction. Dropping the batch discards the segments without posting.
pub(crate) struct SegmentBatch<G: InflightGuard> {
    direction: Direction,
    wr_limits: WrLimits,
    /// Slot, credit and guard of the batch. The segment has the total length of all segments.
    op: InflightOp<G>,
    /// Used bytes of the bounce buffer.
    bounce_used: usize,
    /// Work requests built so far.
    wr_count: usize,
}

impl<G: InflightGuard> SegmentBatch<G> {
    /// Creates an empty batch for the peer of `first`, over `conn`. Segments may lie in `arena`. Does not
    /// wait.
    ///
    /// Returns `None` if `first` needs more than [`MAX_BATCH_WRS`] work requests. `first` is not added.
    ///
    /// # Errors
    ///
    /// - [`TryError::WouldBlock`]: no credit or no slot is available.
    /// - The error of `acquire_guard`.
    /// - See [`Conn::acquire`] for errors of the connection.
    pub(crate) fn new(
        poster: &SegmentPoster<'_>,
        conn: &Arc<Conn>,
        first: Segment,
        arena: Option<&Arc<LongTermDmaMap>>,
        acquire_guard: impl FnOnce() -> TryResult<G>,
    ) -> TryResult<Option<Self>> {
        let (direction, mut limits) = (poster.direction, poster.wr_limits(conn));
        limits.max_sges = limits.max_sges.min(OWNED_WR_MAX_SGE);
        let sge_count = arena.map_or(1, |_| first.len / PAGE_SIZE + 2);
        let wr_count = limits.max_wrs(sge_count, first.len);
        if wr_count > MAX_BATCH_WRS {
            return Ok(None);
        }
        let probe = poster.tenant.start_probe(first.len);
        let credit =
            conn.try_acquire_batch(wr_count as u32, MAX_BATCH_WRS as u32, poster.fabric)?;
        let mut slot = poster
            .fabric
            .send_engine()
            .acquire_slot(SlotClass::Data, None)?;
        if let Some(arena) = arena {
            slot.attach(AttachedMemory::Arena(arena.clone()));
        }
        let guard = acquire_guard()?;
        let segment = Segment { len: 0, ..first };
        let op = InflightOp {
            slot,
            credit,
            guard,
            segment,
            probe,
        };
        Ok(Some(Self {
            direction,
            wr_limits: limits,
            op,
            bounce_used: 0,
            wr_count: 0,
        }))
    }

    /// Returns the direction of all segments.
    pub(crate) fn direction(&self) -> Direction {
        self.direction
    }

    /// Returns the peer of all segments.
    pub(crate) fn instance(&self) -> NodeInstance {
        self.op.segment.instance
    }

    /// Returns the guard, which is held until the batch has completed.
    pub(crate) fn guard(&self) -> &G {
        &self.op.guard
    }

    /// Returns `true` if the batch has room for a segment of `len` bytes in `buffer`.
    pub(crate) fn has_room(&self, buffer: &Buffer, len: usize) -> bool {
        let sge_count = match self.zero_copy_range(buffer, len) {
            Some(_) if len <= ZERO_COPY_MAX_BYTES => len / PAGE_SIZE + 2,
            None if len <= SLOT_BUFFER_BYTES - self.bounce_used => 1,
            _ => return false,
        };
        self.wr_count + self.wr_limits.max_wrs(sge_count, len) <= self.op.credit.wr_count as usize
    }

    /// Returns `true` if the batch must be posted now: no room is left, or the latency of the batch is
    /// measured.
    pub(crate) fn is_full(&self) -> bool {
        let max_wrs = self.op.credit.wr_count as usize;
        self.op.probe.is_some() || self.wr_count == max_wrs || self.bounce_used == SLOT_BUFFER_BYTES
    }

    /// Returns the arena and the offset of `buffer` in the arena if a segment of `len` bytes is zero copy.
    ///
    /// A short WRITE is sent inline instead, which needs no DMA read by the RNIC.
    fn zero_copy_range(&self, buffer: &Buffer, len: usize) -> Option<(&LongTermDmaMap, usize)> {
        let InflightOp { slot, credit, .. } = &self.op;
        let is_zero_copy = self.direction == Direction::Read || len > credit.inline_max();
        let arena = slot.arena().filter(|_| is_zero_copy)?;
        let (_, base) = buffer
            .as_pinned()
            .filter(|(pinned, _)| arena.is_backed_by(pinned))?;
        Some((arena, base))
    }

    /// Adds a segment, and appends its work requests to `wrs`. Copies the data of a bounced WRITE.
    ///
    /// # Errors
    ///
    /// - [`TryError::WouldBlock`]: memory of the process is not present.
    /// - `EFAULT`: the memory is invalid.
    /// - `EINVAL`: the batch has no room, see [`Self::has_room`].
    /// - `ENOMEM`: no memory for the work requests.
    pub(crate) fn add_segment(
        &mut self,
        fabric: &Fabric,
        buffer: &Buffer,
        segment: Segment,
        wrs: &mut WrChain,
    ) -> TryResult<BatchedSegment> {
        if !self.has_room(buffer, segment.len) {
            return Err(EINVAL.into());
        }
        let remote = RemoteAddr {
            addr: segment.addr,
            rkey: self.op.credit.rkey,
        };
        let (count, bounce_offset) = match self.zero_copy_range(buffer, segment.len) {
            Some((arena, base)) => {
                let offset = base.wrapping_add(segment.buffer_offset);
                let sges = arena
                    .sges(fabric.local_key(), offset, segment.len)
                    .ok_or(EFAULT)?;
                let verb = self.direction.verb();
                (self.build_wrs(verb, sges, remote, wrs)?, None)
            }
            None => {
                let (verb, sge) = self.fill_bounce(fabric, buffer, segment)?;
                let count = self.build_wrs(verb, Some(sge).into_iter(), remote, wrs)?;
                (count, Some(self.bounce_used))
            }
        };
        if let Some(bounce_offset) = bounce_offset {
            self.bounce_used = (bounce_offset + segment.len)
                .next_multiple_of(BOUNCE_ALIGN_BYTES)
                .min(SLOT_BUFFER_BYTES);
        }
        self.wr_count += count;
        self.op.segment.len += segment.len;
        let wr_end = self.wr_count as u32;
        Ok(BatchedSegment {
            segment,
            bounce_offset,
            wr_end,
        })
    }

    /// Copies the data of a WRITE to the next free offset of the bounce buffer. Returns the opcode and the
    /// SGE.
    fn fill_bounce(
        &self,
        fabric: &Fabric,
        buffer: &Buffer,
        segment: Segment,
    ) -> TryResult<(RdmaOpcode, Sge)> {
        let (bounce_offset, InflightOp { slot, credit, .. }) = (self.bounce_used, &self.op);
        if self.direction == Direction::Write {
            buffer.try_copy_to_pages(
                slot.buffer(),
                bounce_offset,
                segment.buffer_offset,
                segment.len,
            )?;
        }
        let wr = self
            .direction
            .bounce_sge(fabric, credit, slot, bounce_offset, segment.len);
        Ok(wr.ok_or(EINVAL)?)
    }

    /// Builds work requests for `sges`, appends them to `wrs`, and returns their number.
    fn build_wrs(
        &self,
        opcode: RdmaOpcode,
        sges: impl Iterator<Item = Sge>,
        mut remote: RemoteAddr,
        wrs: &mut WrChain,
    ) -> Result<usize> {
        let (wr_id, first_wr) = (self.op.slot.wr_id(), wrs.0.len());
        let mut splitter = SglSplitter::new(sges, self.wr_limits);
        let mut sgl = [Sge::new(0, 0, 0); OWNED_WR_MAX_SGE];
        loop {
            let sges = splitter.next_sgl(&mut sgl);
            if sges.is_empty() {
                return Ok(wrs.0.len() - first_wr);
            }
            // The capacity suffices: `has_room` counted at least as many work requests. No memory is
            // allocated.
            let op = RdmaOp {
                opcode,
                sges,
                remote,
                fence: false,
            };
            wrs.0.push(OwnedSendWr::new(&op, wr_id), GFP_ATOMIC)?;
            remote.addr += sges.iter().map(|sge| u64::from(sge.len())).sum::<u64>();
        }
    }

    /// Posts the batch with one doorbell, and returns unused credits. Work requests that the RNIC rejects
    /// complete as failed.
    pub(crate) fn post(
        mut self,
        fabric: &Fabric,
        wrs: &mut WrChain,
        now: Instant<Monotonic>,
    ) -> PolledOp<G> {
        let InflightOp { slot, credit, .. } = &mut self.op;
        credit.release_unused(self.wr_count as u32);
        slot.buffer().sync_for_device(self.bounce_used);
        slot.account_post(self.wr_count as u32);
        // SAFETY: The work requests name the buffer of the slot or the attached arena. The slot keeps both
        // mapped until all of them have completed.
        let posted = unsafe { credit.endpoint.qp().post_list(&mut wrs.0) };
        for wr in wrs.0.iter().skip(posted) {
            fabric.send_engine().complete_unposted(wr.wr_id());
        }
        wrs.0.clear();
        PolledOp::new(self.op, now)
    }
}
