// SPDX-License-Identifier: GPL-2.0

//! Reading and writing a mapped region.
//!
//! The request is checked whole before anything is posted (handle and rights by the session, range
//! here). Chunks of this node are copied, others go through the fabric.
//!
//! The caller's memory may not be present, and its owner may let us wait for it for as long as he likes
//! (FUSE, userfaultfd). So an access stops there, leaves the RNIC, and goes on when the memory has come.

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

/// Bytes that are copied while parts are under way.
const MAX_LOCAL_COPY_BYTES: usize = 4 << 20;

/// Times in a row that the caller's memory may go away between being made present and being used.
const MAX_FAULT_RETRIES: u32 = 16;

/// Part of a region.
#[derive(Clone, Copy)]
pub(crate) struct RegionRange {
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

/// Bytes to move between parts of a region, and as many of a buffer, which has them one after the other.
pub(crate) struct VectoredAccess<'a> {
    pub(crate) direction: Direction,
    pub(crate) ranges: &'a [RegionRange],
    pub(crate) deadline: Deadline,
    pub(crate) tenant: &'a Tenant,
}

impl VectoredAccess<'_> {
    /// Moves them. The service is entered by `enter`.
    ///
    /// # Errors
    ///
    /// As `struct kite_rw` in `include/uapi/kite.h` says.
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
                // RLIMIT_MEMLOCK or the pins of other threads leave no room. Slot buffers need no pins.
                memory.fault_in(absent.buffer_offset, absent.len, absent.writable)?;
                resume_state.bounced_until = absent.buffer_offset.saturating_add(absent.len);
                fault_retries = 0;
            } else {
                fetched?;
            }
            // Nothing is under way, so the memory's owner may take its time.
            resume_state.copy_out_deferred(memory)?;
        }
        resume_state.copy_out_deferred(memory)
    }

    /// The pieces of the region, each with its place in the buffer, but for the first `moved` bytes.
    ///
    /// # Errors
    ///
    /// `ERANGE` if not all are in the region.
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

/// Part of a region, and a deadline.
pub(crate) struct AccessRequest {
    pub(crate) direction: Direction,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) deadline: Deadline,
}

/// Who looks after many accesses, and begins more, without waiting.
pub(crate) struct SubmitContext<'a> {
    pub(crate) tenant: &'a Tenant,
    /// When it may go, by the priority and limits of the tenant.
    pub(crate) admission: &'a mut AdmissionTicket,
    /// Where requests are put that are posted together.
    pub(crate) wr_chain: &'a mut WrChain,
    /// Memory that some of them may name.
    pub(crate) arena: Option<&'a Arc<LongTermDmaMap>>,
    pub(crate) now: Instant<Monotonic>,
}

impl AccessRequest {
    /// Moves bytes between a region and `memory`. The service is entered by `enter`.
    ///
    /// # Errors
    ///
    /// As `struct kite_rw` in `include/uapi/kite.h` says.
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

    /// Takes note of its end, by an error or without.
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

    /// Begins to move bytes between a region and `memory`, which has to be present, without waiting. When
    /// what is posted has landed, [`Self::ended`] is to be told.
    ///
    /// # Errors
    ///
    /// `EAGAIN` if it would have to wait; else as for [`Self::run`].
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

    /// As [`Self::begin`], but it goes with others. Returns nothing if it cannot.
    ///
    /// # Errors
    ///
    /// As there.
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

    /// The piece of a region in which it is, if it is short and in one.
    ///
    /// # Errors
    ///
    /// `ERANGE` if it is not in the region.
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

    /// All of it, which is at this place.
    pub(in crate::region) fn to_segment(&self, location: ChunkLocation) -> Segment {
        Segment {
            instance: location.instance,
            addr: location.addr,
            len: self.len as usize,
            buffer_offset: 0,
        }
    }

    /// Takes note of an error, unless it is to be tried again.
    fn account_unless_retry<T>(
        &self,
        mapping: &Mapping,
        stats: &Stats,
        now: Instant<Monotonic>,
        submitted: Result<T>,
    ) -> Result<T> {
        // Signals to whoever looks are not the caller's.
        let error = match submitted {
            Err(error) if error != EAGAIN && error != errno::inprogress() => error,
            Err(_) if self.deadline.has_expired_at(now) => ETIMEDOUT,
            submitted => return submitted.map_err(|_| EAGAIN),
        };
        self.account(mapping, stats, Some(error));
        Err(error)
    }

    /// As [`Self::run`], for what is no access of a user.
    ///
    /// # Errors
    ///
    /// As there.
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
    /// Whether it may go now.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(in crate::region) fn try_admit(&mut self, access: &AccessRequest) -> Result<bool> {
        self.tenant
            .try_admit(self.admission, access.len, access.deadline)
    }
}

/// What became of an access at once.
pub(crate) enum SubmitResult {
    /// It is done.
    Done,
    /// It is the first of a batch, which is to be posted.
    NewBatch(AccessBatch, BatchedSegment),
    /// Nothing: it takes longer.
    NeedsWorker,
}

impl MemoryService {
    /// Begins an access, or does it, if it is short and of one piece.
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
            // That would keep others waiting.
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

    /// Moves bytes but for the first `moved`.
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
            // Who ends the mapping, or moves the region, waits for this.
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
                        // Others need what is held for parts that are under way.
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

    /// Copies between memory of this node and the caller's, page by page, until some of that is absent.
    /// The mapping may end meanwhile; the memory is not reused before we let go of it.
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
