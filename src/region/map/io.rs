// SPDX-License-Identifier: GPL-2.0

//! Reads and writes of mapped regions.
//!
//! # Operation
//!
//! The range is checked completely before anything is posted; the session has checked the handle and the
//! rights. Chunks of this node are copied by the CPU, other chunks are transferred by [`Transfer`]. Short
//! accesses to one chunk can be submitted without waiting ([`AccessRequest::submit`]).
//!
//! # Recovery
//!
//! The caller's memory may be absent, and a fault on that memory may take arbitrarily long (FUSE,
//! userfaultfd). So an access stops at an absent page, drains its in-flight segments, faults the memory in,
//! and continues. An access also stops while the region moves and while the tenant is throttled.

use super::{batch::AccessBatch, chunk_map::PieceLocation, Mapping};
use crate::{
    errno,
    fabric::{
        qos::tenant::{AdmissionTicket, Tenant},
        send::{
            batch::{BatchedSegment, WrChain, ZERO_COPY_MAX_BYTES},
            inflight::{Direction, Segment, SegmentPoster, SLOT_BUFFER_BYTES},
            transfer::{FaultNeeded, ResumeState, Transfer, TransferStop},
        },
        Fabric,
    },
    region::MemoryService,
    stats::Stats,
    sys::{buffer::Buffer, deadline::Deadline},
    trace,
    verbs::dma::{DmaPages, LongTermDmaMap},
};
use core::ops::Deref;
use kernel::{
    page::PAGE_SIZE,
    prelude::*,
    sync::Arc,
    time::{Instant, Monotonic},
};
use kite_core::{
    layout::{Layout, Piece},
    wire::ChunkLocation,
};

/// Bytes that are copied locally before segments in flight are drained.
const MAX_LOCAL_COPY_BYTES: usize = 4 << 20;

/// Number of successive times that the caller's memory may be reclaimed between the fault-in and the use.
const MAX_FAULT_RETRIES: u32 = 16;

/// Range of a region, in bytes.
#[derive(Clone, Copy)]
pub(crate) struct RegionRange {
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

/// Transfer between ranges of a region and a buffer that holds the ranges one after the other.
pub(crate) struct VectoredAccess<'a> {
    pub(crate) direction: Direction,
    pub(crate) ranges: &'a [RegionRange],
    pub(crate) deadline: Deadline,
    pub(crate) tenant: &'a Tenant,
}

impl VectoredAccess<'_> {
    /// Transfers the bytes. `enter_service` returns a guard of the service for each attempt.
    ///
    /// # Errors
    ///
    /// See `struct kite_rw` in `include/uapi/kite.h`.
    pub(crate) fn run<L: Deref<Target = Arc<MemoryService>>>(
        &self,
        enter_service: impl Fn() -> Result<L>,
        mapping: &Mapping,
        memory: &Buffer,
    ) -> Result {
        let mut resume_state = ResumeState::default();
        let (mut bytes_done, mut fault_retries) = (0, 0);
        loop {
            let attempt = enter_service()?.transfer_vectored(
                mapping,
                self,
                bytes_done,
                memory,
                &mut resume_state,
            );
            let absent = match attempt {
                Ok(()) => break,
                Err(TransferStop::FaultNeeded(absent)) => absent,
                Err(TransferStop::Throttled {
                    bytes: due,
                    completed: done,
                }) => {
                    self.tenant.admit(due, self.deadline)?;
                    resume_state.admitted_bytes += due;
                    bytes_done = done;
                    continue;
                }
                Err(TransferStop::RegionMoved { completed: done }) => {
                    mapping.wait_resumed(self.deadline)?;
                    bytes_done = done;
                    continue;
                }
                Err(TransferStop::Failed(error)) => return Err(error),
            };
            fault_retries = if absent.completed > bytes_done {
                1
            } else {
                fault_retries + 1
            };
            bytes_done = absent.completed;
            let fetched = match fault_retries > MAX_FAULT_RETRIES {
                true => Err(ENOMEM),
                false => absent.fault_in(memory),
            };
            if absent.needs_pin && fetched == Err(ENOMEM) {
                // No page can be pinned: RLIMIT_MEMLOCK is reached, or pins of other threads use the limit
                // up. Slot buffers need no pins.
                memory.fault_in(absent.buffer_offset, absent.len, absent.writable)?;
                resume_state.bounced_until = absent.buffer_offset.saturating_add(absent.len);
                fault_retries = 0;
            } else {
                fetched?;
            }
            // A fault may take arbitrarily long here: no segment is in flight.
            resume_state.copy_out_deferred(memory)?;
        }
        resume_state.copy_out_deferred(memory)
    }

    /// Returns the pieces of the region, each with its offset in the buffer. The first `bytes_done` bytes are
    /// skipped.
    ///
    /// # Errors
    ///
    /// - `ERANGE`: a range is not entirely in the region.
    fn pieces<'a>(
        &'a self,
        layout: &'a Layout,
        bytes_done: usize,
    ) -> Result<impl Iterator<Item = (Piece, usize)> + 'a> {
        for range in self.ranges {
            layout.pieces(range.offset, range.len).map_err(|_| ERANGE)?;
        }
        let mut start = 0;
        Ok(self.ranges.iter().flat_map(move |range| {
            let skipped = (bytes_done as u64).saturating_sub(start).min(range.len);
            let buffer_offset = (start + skipped) as usize;
            start += range.len;
            let pieces = layout.pieces(range.offset + skipped, range.len - skipped);
            let with_offset =
                move |piece: Piece| (piece, buffer_offset + piece.buffer_offset as usize);
            pieces.into_iter().flatten().map(with_offset)
        }))
    }
}

/// Transfer between one range of a region and a buffer.
pub(crate) struct AccessRequest {
    pub(crate) direction: Direction,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) deadline: Deadline,
}

/// State that successive non-blocking accesses of one submitter share.
pub(crate) struct SubmitContext<'a> {
    pub(crate) tenant: &'a Tenant,
    /// Admission of the access by the priority and the rate limits of the tenant.
    pub(crate) admission: &'a mut AdmissionTicket,
    /// Scratch space for the work requests that are posted as one chain.
    pub(crate) wr_chain: &'a mut WrChain,
    /// Long-term DMA mapping in which buffers of the accesses may lie.
    pub(crate) arena: Option<&'a Arc<LongTermDmaMap>>,
    pub(crate) now: Instant<Monotonic>,
}

impl AccessRequest {
    /// Transfers bytes between a region and `memory`. `enter_service` returns a guard of the service for each
    /// attempt.
    ///
    /// # Errors
    ///
    /// See `struct kite_rw` in `include/uapi/kite.h`.
    pub(crate) fn run<L: Deref<Target = Arc<MemoryService>>>(
        &self,
        enter_service: impl Fn() -> Result<L>,
        mapping: &Mapping,
        memory: &Buffer,
        tenant: &Tenant,
        stats: &Stats,
    ) -> Result {
        let result = self.transfer(enter_service, mapping, memory, tenant);
        self.account(mapping, stats, result.err());
        result
    }

    /// Counts and traces a completed or failed access.
    pub(crate) fn account(&self, mapping: &Mapping, stats: &Stats, error: Option<Error>) {
        self.count_stats(stats, error.is_none());
        trace::access(
            self.direction == Direction::Write,
            mapping.home,
            mapping.region,
            self.offset,
            self.len,
            error.map_or(0, Error::to_errno),
        );
    }

    /// Submits a transfer between a region and `memory`, which must be present, without waiting. If a batch
    /// is returned, the caller must call [`Self::account`] when the access has completed.
    ///
    /// # Errors
    ///
    /// - `EAGAIN`: the call would have to wait.
    /// - `ETIMEDOUT`: the deadline expired.
    /// - Other errors: see [`Self::run`].
    pub(crate) fn submit(
        &self,
        memory_service: &MemoryService,
        mapping: &Arc<Mapping>,
        memory: &Buffer,
        context: &mut SubmitContext<'_>,
    ) -> Result<SubmitResult> {
        let submitted = memory_service.submit_access(mapping, self, memory, context);
        if matches!(&submitted, Ok(SubmitResult::Done)) {
            self.account(mapping, &memory_service.stats, None);
        }
        self.account_unless_retry(mapping, &memory_service.stats, context.now, submitted)
    }

    /// Adds the access to a batch that is not posted yet, without waiting. Returns `None` if the access does
    /// not fit the batch.
    ///
    /// # Errors
    ///
    /// See [`Self::submit`].
    pub(crate) fn try_join(
        &self,
        fabric: &Fabric,
        batch: &mut AccessBatch,
        memory: &Buffer,
        context: &mut SubmitContext<'_>,
    ) -> Result<Option<BatchedSegment>> {
        let joined = batch.try_join(fabric, self, memory, context);
        self.account_unless_retry(batch.mapping(), &fabric.stats, context.now, joined)
    }

    /// Returns the piece that the access covers. Returns `None` if the access crosses a chunk boundary, or is
    /// too long for a submission without waiting.
    ///
    /// # Errors
    ///
    /// - `ERANGE`: the access is not entirely in the region.
    pub(in crate::region) fn single_chunk_piece(
        &self,
        layout: &Layout,
        context: &SubmitContext<'_>,
    ) -> Result<Option<Piece>> {
        let pieces = layout.pieces(self.offset, self.len);
        let mut pieces = pieces.map_err(|_| ERANGE)?;
        let piece = pieces.next().filter(|_| pieces.next().is_none());
        let max_len = context
            .arena
            .map_or(SLOT_BUFFER_BYTES, |_| ZERO_COPY_MAX_BYTES);
        Ok(piece.filter(|piece| piece.len as usize <= max_len))
    }

    /// Returns the whole access as one segment at `location`.
    pub(in crate::region) fn to_segment(&self, location: ChunkLocation) -> Segment {
        Segment {
            instance: location.instance,
            addr: location.addr,
            len: self.len as usize,
            buffer_offset: 0,
        }
    }

    /// Counts and traces an error, unless the caller must retry the access. A moving region is reported as
    /// `EAGAIN`.
    fn account_unless_retry<T>(
        &self,
        mapping: &Mapping,
        stats: &Stats,
        now: Instant<Monotonic>,
        submitted: Result<T>,
    ) -> Result<T> {
        // Compare with `now` only: a pending signal of the polling thread must not fail the caller's access.
        let error = match submitted {
            Err(error) if error != EAGAIN && error != errno::inprogress() => error,
            Err(_) if self.deadline.has_expired_at(now) => ETIMEDOUT,
            submitted => return submitted.map_err(|_| EAGAIN),
        };
        self.account(mapping, stats, Some(error));
        Err(error)
    }

    /// Transfers bytes as [`Self::run`] does, but without statistics and trace: for accesses by the module
    /// itself.
    ///
    /// # Errors
    ///
    /// See [`Self::run`].
    pub(crate) fn transfer<L: Deref<Target = Arc<MemoryService>>>(
        &self,
        enter_service: impl Fn() -> Result<L>,
        mapping: &Mapping,
        memory: &Buffer,
        tenant: &Tenant,
    ) -> Result {
        let vectored = VectoredAccess {
            direction: self.direction,
            ranges: &[RegionRange {
                offset: self.offset,
                len: self.len,
            }],
            deadline: self.deadline,
            tenant,
        };
        vectored.run(enter_service, mapping, memory)
    }

    fn count_stats(&self, stats: &Stats, succeeded: bool) {
        let (operations, bytes) = match self.direction {
            Direction::Read => (&stats.reads, &stats.read_bytes),
            Direction::Write => (&stats.writes, &stats.write_bytes),
        };
        if succeeded {
            operations.add(1);
            bytes.add(self.len);
        } else {
            stats.errors.add(1);
        }
    }
}

impl SubmitContext<'_> {
    /// Returns `true` if the tenant's limits admit the access now.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory.
    pub(in crate::region) fn try_admit(&mut self, access: &AccessRequest) -> Result<bool> {
        self.tenant
            .try_admit(self.admission, access.len, access.deadline)
    }
}

/// Result of [`AccessRequest::submit`].
pub(crate) enum SubmitResult {
    /// The access is complete.
    Done,
    /// The access is the first of a new batch, which the caller must post.
    NewBatch(AccessBatch, BatchedSegment),
    /// Nothing was done: a worker must run the access, since it needs to wait or is long.
    NeedsWorker,
}

impl MemoryService {
    /// Completes or submits an access that is short and within one chunk.
    fn submit_access(
        &self,
        mapping: &Arc<Mapping>,
        access: &AccessRequest,
        memory: &Buffer,
        context: &mut SubmitContext<'_>,
    ) -> Result<SubmitResult> {
        let layout = mapping.layout()?;
        if access.len == 0 {
            layout.pieces(access.offset, 0).map_err(|_| ERANGE)?;
            return Ok(SubmitResult::Done);
        }
        let Some(piece) = access.single_chunk_piece(&layout, context)? else {
            return Ok(SubmitResult::NeedsWorker);
        };
        let chunk_map = mapping.access_chunks()?;
        match chunk_map.find(piece)? {
            // A long copy would delay other accesses of the submitter.
            PieceLocation::Local(_) if access.len as usize > SLOT_BUFFER_BYTES => {
                Ok(SubmitResult::NeedsWorker)
            }
            PieceLocation::Local(pages) => {
                let absent = self.copy_local(access.direction, &pages, piece, 0, memory)?;
                Ok(absent.map_or(SubmitResult::Done, |_| SubmitResult::NeedsWorker))
            }
            PieceLocation::Remote(location) => {
                let poster = SegmentPoster {
                    fabric: self.fabric(),
                    direction: access.direction,
                    buffer: memory,
                    tenant: context.tenant,
                };
                let segment = access.to_segment(location);
                if !context.try_admit(access)? {
                    return Err(EAGAIN);
                }
                let batch = AccessBatch::new(
                    &poster,
                    mapping,
                    layout,
                    chunk_map.version,
                    segment,
                    context.arena,
                )?;
                let Some(mut batch) = batch else {
                    return Ok(SubmitResult::NeedsWorker);
                };
                let placed = batch.add_segment(self.fabric(), memory, segment, context.wr_chain)?;
                Ok(SubmitResult::NewBatch(batch, placed))
            }
        }
    }

    /// Transfers the bytes of all ranges, except the first `bytes_done`.
    fn transfer_vectored(
        &self,
        mapping: &Mapping,
        vectored: &VectoredAccess<'_>,
        bytes_done: usize,
        memory: &Buffer,
        resume_state: &mut ResumeState,
    ) -> Result<(), TransferStop> {
        let layout = mapping.layout()?;
        let (direction, deadline) = (vectored.direction, vectored.deadline);
        let version = mapping
            .access_chunks()
            .map_err(|error| TransferStop::new(error, bytes_done))?
            .version;
        let permit = || mapping.start_remote_access(version);
        let poster = SegmentPoster {
            fabric: self.fabric(),
            direction,
            buffer: memory,
            tenant: vectored.tenant,
        };
        let mut transfer = Transfer::new(poster, deadline, permit, resume_state);
        let mut copied_bytes = 0;
        for (piece, buffer_offset) in vectored.pieces(&layout, bytes_done)? {
            let len = piece.len as usize;
            // Ending the mapping and moving the region both wait for this guard.
            let chunk_map = match mapping.access_chunks_at(version) {
                Ok(chunk_map) => chunk_map,
                Err(error) => {
                    transfer.drain()?;
                    return Err(TransferStop::new(error, buffer_offset));
                }
            };
            match chunk_map.find(piece)? {
                PieceLocation::Remote(location) => {
                    drop(chunk_map);
                    transfer.add_segment(Segment {
                        instance: location.instance,
                        addr: location.addr,
                        len,
                        buffer_offset,
                    })?;
                }
                PieceLocation::Local(pages) => {
                    deadline.check()?;
                    copied_bytes += len;
                    if copied_bytes > MAX_LOCAL_COPY_BYTES {
                        // Do not keep the credits and slots of in-flight segments during a long local copy.
                        transfer.drain()?;
                        copied_bytes = len;
                    }
                    if let Some(absent) =
                        self.copy_local(direction, &pages, piece, buffer_offset, memory)?
                    {
                        transfer.drain()?;
                        return Err(TransferStop::FaultNeeded(absent));
                    }
                }
            }
        }
        transfer.drain()
    }

    /// Copies between memory of this node and the caller's memory page by page. Stops at the first absent
    /// page of the caller. The mapping may end meanwhile: `pages` is a reference, so the memory is not
    /// reused.
    fn copy_local(
        &self,
        direction: Direction,
        pages: &DmaPages,
        piece: Piece,
        buffer_offset: usize,
        memory: &Buffer,
    ) -> Result<Option<FaultNeeded>> {
        for page_offset in (0..piece.len as usize).step_by(PAGE_SIZE) {
            let (offset, buffer_offset) = (
                piece.offset as usize + page_offset,
                buffer_offset + page_offset,
            );
            let len = PAGE_SIZE.min(piece.len as usize - page_offset);
            let copied = match direction {
                Direction::Write => memory.try_copy_to_pages(pages, offset, buffer_offset, len),
                Direction::Read => memory.try_copy_from_pages(pages, offset, buffer_offset, len),
            };
            match copied {
                Ok(()) => self.stats.local_bytes.add(len as u64),
                Err(error) if error == EAGAIN => {
                    return Ok(Some(FaultNeeded {
                        buffer_offset,
                        len,
                        writable: direction == Direction::Read,
                        needs_pin: false,
                        completed: buffer_offset,
                    }))
                }
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }
}
