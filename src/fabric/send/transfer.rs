// SPDX-License-Identifier: GPL-2.0

//! Reads and writes of remote memory.
//!
//! A transfer is a sequence of parts ([`super::inflight`]), of which several are under way at once. A part whose
//! queue pair failed is done again: a read or write of the same bytes may be repeated, and a new queue pair
//! exists only when the old one can no longer deliver (`kite_core::proto::conn`).

use super::{
    inflight::{
        copy_out, Direction, FailedOp, InflightGuard, InflightOp, Segment, SegmentPoster,
        SLOT_BUFFER_BYTES,
    },
    slots::SlotGuard,
};
use crate::{
    errno,
    fabric::conn::Conn,
    sys::{buffer::Buffer, deadline::Deadline},
};
use kernel::{alloc::flags::GFP_KERNEL_ACCOUNT, page::PAGE_SIZE, prelude::*, sync::Arc};

/// Parts under way at once in one transfer.
const MAX_INFLIGHT_SEGMENTS: usize = 4;

/// Times that a part is done again that the peer or our RNIC refused. On a shared queue pair the request
/// that is blamed need not be the one at fault, and Soft-RoCE refuses some of which packets came twice.
const MAX_REJECTIONS: u32 = 3;

/// Shortest part that a piece of memory is cut into so that one is pinned while another is under way.
const MIN_SEGMENT_BYTES: usize = 1 << 18;

/// What a short read brought for memory that was not present.
pub(crate) struct DeferredCopyOut {
    buffer_offset: usize,
    bytes: KVec<u8>,
}

impl DeferredCopyOut {
    /// Gives it to the caller, whose memory may keep us waiting.
    ///
    /// # Errors
    ///
    /// `EFAULT`.
    fn copy_out(&self, buffer: &Buffer) -> Result {
        buffer.write_slice(self.buffer_offset, &self.bytes)
    }
}

/// Memory of the caller's that is not present.
pub(crate) struct FaultNeeded {
    pub(crate) buffer_offset: usize,
    pub(crate) len: usize,
    pub(crate) writable: bool,
    /// Whether it is to be pinned, or just copied.
    pub(crate) needs_pin: bool,
    /// Bytes of the buffer, from its start, for which nothing is left to do.
    pub(crate) completed: usize,
}

impl FaultNeeded {
    /// Makes it present, for now. That may take as long as the owner of the memory likes.
    ///
    /// # Errors
    ///
    /// `EFAULT` if there is no such memory, `ENOMEM` if there is none for it or it cannot be pinned.
    pub(crate) fn fault_in(&self, buffer: &Buffer) -> Result {
        if self.needs_pin {
            buffer.fault_in_for_pin(self.buffer_offset, self.len, self.writable)
        } else {
            buffer.fault_in(self.buffer_offset, self.len, self.writable)
        }
    }
}

/// Why a transfer stops before its end.
pub(crate) enum TransferStop {
    Failed(Error),
    /// The region is elsewhere, or about to be. It may go on when that is known. Nothing is under way.
    RegionMoved {
        /// Bytes of the buffer, from its start, for which nothing is left to do.
        completed: usize,
    },
    /// It may go on when this memory was fetched. Nothing is under way.
    FaultNeeded(FaultNeeded),
    /// It may go on when the tenant may have so many bytes more go. Nothing is under way.
    Throttled {
        bytes: u64,
        /// Bytes of the buffer, from its start, for which nothing is left to do.
        completed: usize,
    },
}

/// What a transfer is to go on with when it has stopped.
#[derive(Default)]
pub(crate) struct ResumeState {
    /// What it brought, and is to be stored at the end.
    pub(crate) deferred: KVec<DeferredCopyOut>,
    /// Bytes that the tenant may have go without being asked.
    pub(crate) admitted_bytes: u64,
    /// Bytes of the buffer before this one are copied by slot buffers, since they cannot be pinned.
    pub(crate) bounced_until: usize,
}

impl ResumeState {
    /// Stores what short reads brought, and frees it.
    ///
    /// # Errors
    ///
    /// `EFAULT`.
    pub(crate) fn copy_out_deferred(&mut self, buffer: &Buffer) -> Result {
        self.deferred
            .iter()
            .try_for_each(|copy| copy.copy_out(buffer))?;
        self.deferred.clear();
        Ok(())
    }
}

impl From<Error> for TransferStop {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl TransferStop {
    /// With this error, when nothing is left to do for the bytes before `at`.
    pub(crate) fn new(error: Error, offset: usize) -> Self {
        if error == errno::inprogress() {
            Self::RegionMoved { completed: offset }
        } else {
            Self::Failed(error)
        }
    }

    /// Says that it is to go on with byte `at` of the buffer at the latest.
    fn rewind_to(mut self, offset: usize) -> Self {
        match &mut self {
            Self::FaultNeeded(FaultNeeded {
                completed: moved, ..
            })
            | Self::RegionMoved { completed: moved } => *moved = offset.min(*moved),
            _ => {}
        }
        self
    }
}

/// One read or write.
///
/// `permit` is asked before each part is posted, and what it gives is held until the part is done. While
/// a transfer holds permits or credits it waits for nothing but the RNIC: where it would have to wait
/// for a queue pair or a slot it first lands what is under way, and where for the caller's memory, it
/// stops.
pub(crate) struct Transfer<'a, G: InflightGuard, P: Fn() -> Result<G>> {
    poster: SegmentPoster<'a>,
    deadline: Deadline,
    acquire_guard: P,
    inflight: [Option<InflightOp<G>>; MAX_INFLIGHT_SEGMENTS],
    next: usize,
    resume: &'a mut ResumeState,
}

impl<'a, G: InflightGuard, P: Fn() -> Result<G>> Transfer<'a, G, P> {
    /// Begins a transfer, or goes on with it.
    pub(crate) fn new(
        poster: SegmentPoster<'a>,
        deadline: Deadline,
        acquire_guard: P,
        resume: &'a mut ResumeState,
    ) -> Self {
        // One by one: a repeated constant would be zeroed whole, and most accesses have one part.
        let inflight: [_; MAX_INFLIGHT_SEGMENTS] = [None, None, None, None];
        Self {
            poster,
            deadline,
            acquire_guard,
            inflight,
            next: 0,
            resume,
        }
    }

    /// Adds `part`, and waits for an older one if too many are under way.
    ///
    /// # Errors
    ///
    /// Of this part or of one before it:
    /// - those of `permit`.
    /// - `EHOSTDOWN` if the node is not in the view, `ETIMEDOUT`, `EINTR`.
    /// - `EFAULT` for a bad buffer, `ENOMEM`.
    /// - `EIO` if the peer or the RNIC refused.
    pub(crate) fn add_segment(&mut self, mut segment: Segment) -> Result<(), TransferStop> {
        let stride = segment
            .len
            .div_ceil(MAX_INFLIGHT_SEGMENTS)
            .next_multiple_of(PAGE_SIZE);
        while segment.len != 0 {
            self.deadline.check()?;
            let subset = self.poster.tenant.conn_subset();
            let conn = self
                .poster
                .fabric
                .peer_by_instance(segment.instance)?
                .select_conn(subset)?;
            let max_bytes = self.max_segment_bytes(&conn, segment);
            let front = segment.split_front(stride.max(MIN_SEGMENT_BYTES).min(max_bytes));
            self.admit_segment(front)?;
            let index = self.next % MAX_INFLIGHT_SEGMENTS;
            if let Some(oldest) = self.inflight[index].take() {
                self.reap(oldest)?;
            }
            let op = self.post_segment(&conn, front);
            if op.is_err() {
                // It is asked for once.
                self.resume.admitted_bytes += front.len as u64;
            }
            self.inflight[index] = Some(op?);
            self.next += 1;
        }
        Ok(())
    }

    /// Maximum bytes of the next part.
    fn max_segment_bytes(&self, conn: &Conn, segment: Segment) -> usize {
        match segment.buffer_offset < self.resume.bounced_until {
            true => SLOT_BUFFER_BYTES,
            false => self.poster.max_segment_bytes(conn),
        }
    }

    /// Posts a part, when others have landed if need be.
    fn post_segment(
        &mut self,
        conn: &Arc<Conn>,
        segment: Segment,
    ) -> Result<InflightOp<G>, TransferStop> {
        match self.try_post(conn, segment, None) {
            Ok(Some(op)) => Ok(op),
            Ok(None) => {
                self.drain()?;
                self.post_alone(conn, segment)
            }
            Err(reason) => {
                if let TransferStop::RegionMoved { .. } = reason {
                    self.drain()?;
                }
                Err(reason)
            }
        }
    }

    /// Asks whether a part may go by the priority and limits of the tenant.
    fn admit_segment(&mut self, segment: Segment) -> Result<(), TransferStop> {
        let admitted = self.resume.admitted_bytes.min(segment.len as u64);
        let (bytes, completed) = (segment.len as u64 - admitted, segment.buffer_offset);
        if bytes != 0 && !self.poster.tenant.try_admit_now(bytes)? {
            self.drain()?;
            return Err(TransferStop::Throttled { bytes, completed });
        }
        self.resume.admitted_bytes -= admitted;
        Ok(())
    }

    /// Waits for all parts so far: afterwards the transfer holds nothing that others need.
    ///
    /// # Errors
    ///
    /// As for [`Self::add`].
    pub(crate) fn drain(&mut self) -> Result<(), TransferStop> {
        for i in 0..MAX_INFLIGHT_SEGMENTS {
            if let Some(op) = self.inflight[i].take() {
                self.reap(op)?;
            }
        }
        Ok(())
    }

    /// Posts a part while nothing else is under way: waits for what it needs, but the caller's memory.
    fn post_alone(
        &self,
        conn: &Arc<Conn>,
        segment: Segment,
    ) -> Result<InflightOp<G>, TransferStop> {
        let posted = self.try_post(conn, segment, Some(self.deadline))?;
        posted.ok_or(TransferStop::FaultNeeded(FaultNeeded {
            buffer_offset: segment.buffer_offset,
            len: segment.len,
            writable: self.poster.direction == Direction::Read,
            needs_pin: !segment.fits_slot_buffer(),
            completed: segment.buffer_offset,
        }))
    }

    fn try_post(
        &self,
        conn: &Arc<Conn>,
        segment: Segment,
        deadline: Option<Deadline>,
    ) -> Result<Option<InflightOp<G>>, TransferStop> {
        let posted = self
            .poster
            .post_segment(conn, segment, &self.acquire_guard, deadline);
        posted.map_err(|error| TransferStop::new(error, segment.buffer_offset))
    }

    /// Waits for a flight. If its queue pair failed, waits for the others too, so that nothing keeps the
    /// queue pair from being replaced, and does again what failed.
    fn reap(&mut self, op: InflightOp<G>) -> Result<(), TransferStop> {
        let Some(first_failed) = self.complete_op(op)? else {
            return Ok(());
        };
        let mut lowest_offset = first_failed.segment.buffer_offset;
        let mut failed_ops = [const { None }; MAX_INFLIGHT_SEGMENTS + 1];
        for (i, failed) in failed_ops
            .iter_mut()
            .take(MAX_INFLIGHT_SEGMENTS)
            .enumerate()
        {
            if let Some(op) = self.inflight[i].take() {
                *failed = self.complete_op(op)?;
            }
        }
        failed_ops[MAX_INFLIGHT_SEGMENTS] = Some(first_failed);
        for failed in failed_ops.iter().flatten() {
            lowest_offset = lowest_offset.min(failed.segment.buffer_offset);
            // Who stops for memory may go on with another connection: not before this one was replaced.
            failed.wait_qp_replaced(self.deadline)?;
        }
        for failed in failed_ops.into_iter().flatten() {
            self.retry(failed)
                .map_err(|reason| reason.rewind_to(lowest_offset))?;
        }
        Ok(())
    }

    fn retry(&mut self, mut failed_op: FailedOp) -> Result<(), TransferStop> {
        while failed_op.rejections <= MAX_REJECTIONS {
            let op = self.post_alone(&failed_op.conn, failed_op.segment)?;
            let Some(next) = self.complete_op(op)? else {
                return Ok(());
            };
            failed_op = FailedOp {
                rejections: failed_op.rejections + next.rejections,
                ..next
            };
        }
        // If it may not be done any more, that is the reason to give.
        let error = (self.acquire_guard)().err().unwrap_or(EIO);
        Err(TransferStop::new(error, failed_op.segment.buffer_offset))
    }

    /// Waits for a flight, and copies what a short read brought. Returns the part if its queue pair
    /// failed.
    fn complete_op(&mut self, op: InflightOp<G>) -> Result<Option<FailedOp>> {
        let (poster, deferred) = (&self.poster, &mut self.resume.deferred);
        op.complete(&poster.fabric.stats, |slot, segment| {
            match copy_out(poster.direction, poster.buffer, slot, segment, 0) {
                Err(error) if error == EAGAIN => defer_copy_out(deferred, slot, segment),
                result => result,
            }
        })
    }
}

/// Keeps what a short read brought: the caller's memory may keep us waiting for as long as its owner likes,
/// and others need what we hold.
fn defer_copy_out(
    deferred: &mut KVec<DeferredCopyOut>,
    slot: &SlotGuard,
    segment: Segment,
) -> Result {
    let mut bytes = KVec::from_elem(0, segment.len, GFP_KERNEL_ACCOUNT)?;
    slot.buffer().read(0, &mut bytes)?;
    let copy = DeferredCopyOut {
        buffer_offset: segment.buffer_offset,
        bytes,
    };
    Ok(deferred.push(copy, GFP_KERNEL_ACCOUNT)?)
}

/// What is under way when a transfer fails is waited for: it names the caller's memory.
impl<G: InflightGuard, P: Fn() -> Result<G>> Drop for Transfer<'_, G, P> {
    fn drop(&mut self) {
        for op in self.inflight.iter().flatten() {
            op.wait();
        }
    }
}
