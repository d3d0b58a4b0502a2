// SPDX-License-Identifier: GPL-2.0

//! Reads and writes of remote memory of any length.
//!
//! # Operation
//!
//! A [`Transfer`] is a sequence of segments ([`super::inflight`]), of which up to 4 are in flight. Each
//! segment is admitted by the priority and the rate limits of the tenant immediately before it is posted
//! (`admit_segment`). A transfer stops ([`TransferStop`]) where it would wait for a page fault, a moving
//! region or the rate limit. The caller waits with no segment in flight, and then starts a new transfer with
//! the same [`ResumeState`]. The caller has checked the rights and the range.
//!
//! # Recovery
//!
//! A segment that failed with its QP is retried, since a read or write of the same bytes is idempotent.
//! A new QP exists only when the old QP can no longer deliver (`kite_core::proto::conn`).
//! A segment that the peer or the local RNIC rejects more than 3 times fails with `EIO`.
//!
//! # Deadlock avoidance
//!
//! While a transfer holds guards or credits, it waits only for the RNIC. See [`Transfer`].

use super::{
    inflight::{
        copy_out, Direction, FailedOp, InflightGuard, InflightOp, Segment, SegmentPoster,
        SLOT_BUFFER_BYTES,
    },
    slots::SlotGuard,
};
use crate::{
    errno::{TryError, TryResult},
    fabric::conn::Conn,
    sys::{buffer::Buffer, deadline::Deadline},
};
use kernel::{alloc::flags::GFP_KERNEL_ACCOUNT, page::PAGE_SIZE, prelude::*, sync::Arc};

/// Maximum segments in flight in one transfer.
const MAX_INFLIGHT_SEGMENTS: usize = 4;

/// Maximum retries of a segment that the peer or the local RNIC rejected.
///
/// On a shared QP, the request reported as failed need not be the invalid one. Soft-RoCE also rejects some
/// requests with packets that arrived twice.
const MAX_REJECTIONS: u32 = 3;

/// Minimum bytes of a segment when memory is split to overlap pinning with transfers in flight.
const MIN_SEGMENT_BYTES: usize = 1 << 18;

/// Data of a short READ to memory that was not present.
pub(crate) struct DeferredCopyOut {
    buffer_offset: usize,
    bytes: KVec<u8>,
}

impl DeferredCopyOut {
    /// Copies the data to the memory of the caller. A page fault may block without bound.
    ///
    /// # Errors
    ///
    /// - `EFAULT`: the memory is invalid.
    fn copy_out(&self, buffer: &Buffer) -> Result {
        buffer.write_slice(self.buffer_offset, &self.bytes)
    }
}

/// Memory of the caller that is not present.
pub(crate) struct FaultNeeded {
    pub(crate) buffer_offset: usize,
    pub(crate) len: usize,
    pub(crate) writable: bool,
    /// `true` if the memory must be pinned, `false` if it is only copied.
    pub(crate) needs_pin: bool,
    /// Completed bytes, from the start of the buffer.
    pub(crate) completed: usize,
}

impl FaultNeeded {
    /// Faults in the memory, which may be evicted again later. The page fault may block without bound.
    ///
    /// # Errors
    ///
    /// - `EFAULT`: the memory is invalid.
    /// - `ENOMEM`: no memory is available, or the memory cannot be pinned.
    pub(crate) fn fault_in(&self, buffer: &Buffer) -> Result {
        if self.needs_pin {
            buffer.fault_in_for_pin(self.buffer_offset, self.len, self.writable)
        } else {
            buffer.fault_in(self.buffer_offset, self.len, self.writable)
        }
    }
}

/// Reason why a transfer stopped early.
pub(crate) enum TransferStop {
    /// The transfer failed.
    Failed(Error),
    /// The region has moved or is moving. Resume once the new chunk locations are known. No segment is in
    /// flight.
    RegionMoved {
        /// Completed bytes, from the start of the buffer.
        completed: usize,
    },
    /// Memory of the caller is not present. Resume after the page fault. No segment is in flight.
    FaultNeeded(FaultNeeded),
    /// The tenant is throttled. Resume once the tenant admits the next segment. No segment is in flight.
    Throttled {
        /// Bytes that the tenant must admit.
        bytes: u64,
        /// Completed bytes, from the start of the buffer.
        completed: usize,
    },
}

/// State that a stopped transfer passes to the next one.
#[derive(Default)]
pub(crate) struct ResumeState {
    /// Read data that must be copied to the memory of the caller.
    pub(crate) deferred: KVec<DeferredCopyOut>,
    /// Bytes that the tenant has admitted and that are not posted yet.
    pub(crate) admitted_bytes: u64,
    /// Offset in the buffer up to which data is copied through slot buffers, since the memory cannot be
    /// pinned.
    pub(crate) bounced_until: usize,
}

impl ResumeState {
    /// Copies all deferred data to the memory of the caller, and frees the data.
    ///
    /// # Errors
    ///
    /// - `EFAULT`: the memory is invalid.
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
    /// Converts an error at `offset`, before which all bytes are completed. [`TryError::InTransition`]
    /// means that the region moved.
    pub(crate) fn new(error: TryError, offset: usize) -> Self {
        match error {
            TryError::InTransition => Self::RegionMoved { completed: offset },
            error => Self::Failed(error.into()),
        }
    }

    /// Reduces the completed bytes to at most `offset`, so that the next transfer repeats the rest.
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

/// Read or write in progress.
///
/// `acquire_guard` is called before each segment is posted, and the guard is held until the segment has
/// completed.
///
/// # Deadlock avoidance
///
/// While a transfer holds guards or credits, it waits only for the RNIC. Before the transfer waits for a QP
/// or a slot, it drains its segments in flight. Where the transfer would wait for memory of the caller, it
/// stops with [`TransferStop::FaultNeeded`].
pub(crate) struct Transfer<'a, G: InflightGuard, P: Fn() -> TryResult<G>> {
    poster: SegmentPoster<'a>,
    deadline: Deadline,
    acquire_guard: P,
    inflight: [Option<InflightOp<G>>; MAX_INFLIGHT_SEGMENTS],
    /// Number of segments posted so far; determines the next entry of `inflight`.
    next: usize,
    resume: &'a mut ResumeState,
}

impl<'a, G: InflightGuard, P: Fn() -> TryResult<G>> Transfer<'a, G, P> {
    /// Starts a transfer, or resumes one.
    pub(crate) fn new(
        poster: SegmentPoster<'a>,
        deadline: Deadline,
        acquire_guard: P,
        resume: &'a mut ResumeState,
    ) -> Self {
        // List the elements: a repeated constant would zero the whole array, and most transfers have one
        // segment.
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

    /// Posts `segment`, split if necessary. Waits for the oldest segment if too many are in flight.
    ///
    /// # Errors
    ///
    /// Errors concern `segment` or an earlier segment.
    ///
    /// - The error of `acquire_guard`.
    /// - `EHOSTDOWN`: the node is not in the view.
    /// - `ETIMEDOUT`, `EINTR`: the deadline passed, or a signal arrived.
    /// - `EFAULT`: the buffer is invalid.
    /// - `ENOMEM`: no memory.
    /// - `EIO`: the peer or the RNIC rejected the segment, or QP recovery failed.
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
            let index = self.next % MAX_INFLIGHT_SEGMENTS;
            if let Some(oldest) = self.inflight[index].take() {
                self.reap(oldest)?;
            }
            // Last, since the bytes of a segment that is not posted must not be charged.
            self.admit_segment(front)?;
            let op = self.post_segment(&conn, front);
            if op.is_err() {
                // Admitted bytes are charged only once, so keep them for the next attempt.
                self.resume.admitted_bytes += front.len as u64;
            }
            self.inflight[index] = Some(op?);
            self.next += 1;
        }
        Ok(())
    }

    /// Returns the maximum bytes of the next segment.
    fn max_segment_bytes(&self, conn: &Conn, segment: Segment) -> usize {
        match segment.buffer_offset < self.resume.bounced_until {
            true => SLOT_BUFFER_BYTES,
            false => self.poster.max_segment_bytes(conn),
        }
    }

    /// Posts a segment. Drains the segments in flight first if posting would have to wait.
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

    /// Checks that the tenant admits a segment. Stops the transfer with [`TransferStop::Throttled`] if not.
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

    /// Waits for all segments in flight. The transfer then holds no guards, credits or slots.
    ///
    /// # Errors
    ///
    /// See [`Self::add_segment`].
    pub(crate) fn drain(&mut self) -> Result<(), TransferStop> {
        for i in 0..MAX_INFLIGHT_SEGMENTS {
            if let Some(op) = self.inflight[i].take() {
                self.reap(op)?;
            }
        }
        Ok(())
    }

    /// Posts a segment while no other one is in flight. Waits for a QP and a slot, but not for memory of the
    /// caller.
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

    /// Posts a segment. See [`SegmentPoster::post_segment`].
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

    /// Waits for an operation. If its QP failed, waits for the other operations too, and retries the failed
    /// ones.
    ///
    /// The failed QP is replaced only after all its credits are returned.
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
            // After a stop, the transfer may resume on another connection. The failed QP must be replaced
            // before.
            failed.wait_qp_replaced(self.deadline)?;
        }
        for failed in failed_ops.into_iter().flatten() {
            self.retry(failed)
                .map_err(|reason| reason.rewind_to(lowest_offset))?;
        }
        Ok(())
    }

    /// Retries a failed segment until it succeeds or is rejected more than [`MAX_REJECTIONS`] times.
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
        // If access is no longer permitted, return that error.
        let denied = (self.acquire_guard)().err();
        let error = denied.unwrap_or(TryError::Failed(EIO));
        Err(TransferStop::new(error, failed_op.segment.buffer_offset))
    }

    /// Waits for an operation, and copies the data of a short READ. Returns the failed operation if the QP
    /// failed.
    fn complete_op(&mut self, op: InflightOp<G>) -> Result<Option<FailedOp>> {
        let (poster, deferred) = (&self.poster, &mut self.resume.deferred);
        op.complete(&poster.fabric.stats, |slot, segment| {
            match copy_out(poster.direction, poster.buffer, slot, segment, 0) {
                Err(TryError::WouldBlock) => defer_copy_out(deferred, slot, segment),
                result => Ok(result?),
            }
        })
    }
}

/// Saves the data of a short READ for a later copy.
///
/// A page fault in the memory of the caller may block without bound, while the transfer holds a slot that
/// other requests need.
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

/// Waits for the segments in flight of a failed transfer, since they name memory of the caller.
impl<G: InflightGuard, P: Fn() -> TryResult<G>> Drop for Transfer<'_, G, P> {
    fn drop(&mut self) {
        for op in self.inflight.iter().flatten() {
            op.wait();
        }
    }
}
