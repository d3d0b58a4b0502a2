// SPDX-License-Identifier: GPL-2.0

//! Short parts that are posted together, with one doorbell (KRCORE, section 4.4).
//!
//! They go to one peer, share a slot with its buffer and the use of a connection, and end together: what each
//! request would look up and count by itself, which takes longer than the request, is done once for all.
//! What is in memory that is mapped for the RNIC goes straight from and to there.

use super::{
    inflight::{Direction, InflightGuard, InflightOp, PolledOp, Segment, SegmentPoster},
    sgl::{SglSplitter, WrLimits},
    slots::{AttachedMemory, SlotClass, SLOT_BUFFER_BYTES},
};
use crate::{
    fabric::{conn::Conn, Fabric},
    sys::buffer::Buffer,
    verbs::{
        dma::LongTermDmaMap,
        work::{OwnedSendWr, RdmaOpcode, RemoteAddr, Sge, OWNED_WR_MAX_SGE},
    },
};
use kernel::{
    page::PAGE_SIZE,
    prelude::*,
    sync::Arc,
    time::{Instant, Monotonic},
};
use kite_core::view::NodeInstance;

/// Requests of a batch.
pub(crate) const MAX_BATCH_WRS: usize = 16;

/// Longest part that goes straight from or to mapped memory with others.
pub(crate) const ZERO_COPY_MAX_BYTES: usize = 1 << 16;

/// Parts begin at multiples of this in the buffer, so that no two share what an RNIC writes at once.
const BOUNCE_ALIGN_BYTES: usize = 64;

/// Room for the requests of a batch.
#[derive(Default)]
pub(crate) struct WrChain(KVec<OwnedSendWr>);

impl WrChain {
    /// Empty.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn new() -> Result<Self> {
        Ok(Self(KVec::with_capacity(MAX_BATCH_WRS, GFP_KERNEL)?))
    }
}

/// Where a part is in the buffer of its batch.
#[derive(Clone, Copy)]
pub(crate) struct BatchedSegment {
    pub(crate) segment: Segment,
    /// Nothing if it is not there, but in mapped memory.
    pub(crate) bounce_offset: Option<usize>,
    /// Requests of the batch up to the last of its own.
    pub(crate) wr_end: u32,
}

/// A batch to which parts are added. Dropping it gives them up.
pub(crate) struct SegmentBatch<G: InflightGuard> {
    direction: Direction,
    wr_limits: WrLimits,
    /// Its part is all of them.
    op: InflightOp<G>,
    /// Bytes of the buffer that are taken.
    bounce_used: usize,
    /// Requests.
    wr_count: usize,
}

impl<G: InflightGuard> SegmentBatch<G> {
    /// One for parts to the peer that this first one goes to, by `conn`, some of which may be in `arena`. There is
    /// none if the first is too long. Waits for nothing.
    ///
    /// # Errors
    ///
    /// `EAGAIN` if it would have to wait; those of `permit`, and as for [`Conn::begin`].
    pub(crate) fn new(
        poster: &SegmentPoster<'_>,
        conn: &Arc<Conn>,
        first: Segment,
        arena: Option<&Arc<LongTermDmaMap>>,
        acquire_guard: impl FnOnce() -> Result<G>,
    ) -> Result<Option<Self>> {
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

    /// Which way its parts go.
    pub(crate) fn direction(&self) -> Direction {
        self.direction
    }

    /// To whom.
    pub(crate) fn instance(&self) -> NodeInstance {
        self.op.segment.instance
    }

    /// What allows them.
    pub(crate) fn guard(&self) -> &G {
        &self.op.guard
    }

    /// Whether there is room for `len` bytes of `memory`.
    pub(crate) fn has_room(&self, buffer: &Buffer, len: usize) -> bool {
        let sge_count = match self.zero_copy_range(buffer, len) {
            Some(_) if len <= ZERO_COPY_MAX_BYTES => len / PAGE_SIZE + 2,
            None if len <= SLOT_BUFFER_BYTES - self.bounce_used => 1,
            _ => return false,
        };
        self.wr_count + self.wr_limits.max_wrs(sge_count, len) <= self.op.credit.wr_count as usize
    }

    /// Whether it is to be posted without others: there is no room, or it is measured how long it takes.
    pub(crate) fn is_full(&self) -> bool {
        let max_wrs = self.op.credit.wr_count as usize;
        self.op.probe.is_some() || self.wr_count == max_wrs || self.bounce_used == SLOT_BUFFER_BYTES
    }

    /// The arena with `len` bytes of `memory`, and where they begin there, if they go straight from or to it.
    fn zero_copy_range(&self, buffer: &Buffer, len: usize) -> Option<(&LongTermDmaMap, usize)> {
        let InflightOp { slot, credit, .. } = &self.op;
        let is_zero_copy = self.direction == Direction::Read || len > credit.inline_max();
        let arena = slot.arena().filter(|_| is_zero_copy)?;
        let (_, base) = buffer
            .as_pinned()
            .filter(|(pinned, _)| arena.is_backed_by(pinned))?;
        Some((arena, base))
    }

    /// Adds a part for which there is room, and copies what is to be written, unless it goes straight.
    ///
    /// # Errors
    ///
    /// `EAGAIN` if the memory is not present; `EFAULT`; `EINVAL` if there is no room.
    pub(crate) fn add_segment(
        &mut self,
        fabric: &Fabric,
        buffer: &Buffer,
        segment: Segment,
        wrs: &mut WrChain,
    ) -> Result<BatchedSegment> {
        if !self.has_room(buffer, segment.len) {
            return Err(EINVAL);
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

    /// Copies what is to be written to the next place in the buffer.
    fn fill_bounce(
        &self,
        fabric: &Fabric,
        buffer: &Buffer,
        segment: Segment,
    ) -> Result<(RdmaOpcode, Sge)> {
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
        wr.ok_or(EINVAL)
    }

    /// Makes requests for what is in these entries, and returns how many.
    fn build_wrs(
        &self,
        verb: RdmaOpcode,
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
            // There is room, as there are no more requests than were reckoned.
            let wr = OwnedSendWr::new(verb, wr_id, sges, remote);
            wrs.0.push(wr, GFP_ATOMIC)?;
            remote.addr += sges.iter().map(|sge| u64::from(sge.len())).sum::<u64>();
        }
    }

    /// Posts them.
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
        // SAFETY: The claim has what they name until they complete.
        let posted = unsafe { credit.endpoint.qp().post_list(&mut wrs.0) };
        for wr in wrs.0.iter().skip(posted) {
            fabric.send_engine().complete_unposted(wr.wr_id());
        }
        wrs.0.clear();
        PolledOp::new(self.op, now)
    }
}
