// SPDX-License-Identifier: GPL-2.0

//! Posting of one segment of a read or write.
//!
//! # Operation
//!
//! [`SegmentPoster`] acquires a credit of the connection, a slot, and the guard of the caller, in this order.
//! A short segment is copied through the buffer of the slot. The memory of a long segment is pinned and
//! mapped before the credit is acquired, since a credit limits other users while it is held.

use super::{Direction, InflightGuard, InflightOp, Segment};
use crate::{
    errno::{TryError, TryResult},
    fabric::{
        conn::{credit::ConnCredit, Conn},
        qos::tenant::Tenant,
        send::{
            sgl::{SglSplitter, WrLimits},
            slots::{AttachedMemory, SlotClass, SlotGuard, MAX_WRS_PER_SLOT},
        },
        Fabric,
    },
    sys::{buffer::Buffer, deadline::Deadline},
    verbs::{
        device::IbDevice,
        dma::RequestDmaMap,
        work::{RdmaOpcode, Sge, MAX_SGE},
    },
};
use kernel::{page::PAGE_SIZE, prelude::*, sync::Arc};

/// Maximum bytes of a segment. An RNIC with short scatter-gather lists has a lower limit.
const MAX_SEGMENT_BYTES: usize = 1 << 20;

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
        acquire_guard: impl FnOnce() -> TryResult<G>,
        deadline: Option<Deadline>,
    ) -> TryResult<Option<InflightOp<G>>> {
        let posted = if segment.fits_slot_buffer() {
            self.post_bounced(conn, segment, acquire_guard, deadline)
        } else {
            self.post_zero_copy(conn, segment, acquire_guard, deadline)
        };
        match posted {
            Ok(op) => Ok(Some(op)),
            Err(TryError::WouldBlock) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Posts a short segment through the buffer of the slot. Returns
    /// [`TryError::WouldBlock`] instead of waiting or faulting.
    fn post_bounced<G: InflightGuard>(
        &self,
        conn: &Arc<Conn>,
        segment: Segment,
        acquire_guard: impl FnOnce() -> TryResult<G>,
        deadline: Option<Deadline>,
    ) -> TryResult<InflightOp<G>> {
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
            if unsafe { credit.post(&slot, verb, &[sge], segment.addr) }.is_err() {
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

    /// Posts a long segment directly from or to the pages of the caller. Returns
    /// [`TryError::WouldBlock`] instead of waiting
    /// or faulting.
    fn post_zero_copy<G: InflightGuard>(
        &self,
        conn: &Arc<Conn>,
        segment: Segment,
        acquire_guard: impl FnOnce() -> TryResult<G>,
        deadline: Option<Deadline>,
    ) -> TryResult<InflightOp<G>> {
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
            return Err(EIO.into());
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
            max_sges: max_sges(self.fabric.device()),
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
            let posted = unsafe { credit.post(slot, self.direction.verb(), sges, addr) };
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
/// - [`TryError::WouldBlock`]: the memory of the caller is not present.
/// - `EFAULT`: the memory of the caller is invalid.
pub(crate) fn copy_out(
    direction: Direction,
    buffer: &Buffer,
    slot: &SlotGuard,
    segment: Segment,
    bounce_offset: usize,
) -> TryResult {
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

/// Returns the maximum scatter-gather entries of one work request.
fn max_sges(device: IbDevice) -> usize {
    (device.limits().max_send_sge as usize).clamp(1, MAX_SGE)
}
