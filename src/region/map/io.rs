// SPDX-License-Identifier: GPL-2.0

//! Reads and writes of mapped regions.
//!
//! # Operation
//!
//! The ranges are checked completely before anything is posted; the session has checked the handle and its
//! rights (`src/session/handles.rs`). Chunks of this node are copied by the CPU, other chunks are transferred
//! by [`Transfer`], which admits each segment by the rate limits.
//!
//! # Recovery
//!
//! The caller's memory may be absent, and a fault on that memory may take arbitrarily long (FUSE,
//! userfaultfd). So an access stops at an absent page, drains its in-flight segments, faults the memory in,
//! and continues. An access also stops while the region moves and while the tenant is throttled.

use super::{
    access::{AccessRequest, RegionRange},
    chunk_map::PieceLocation,
    Mapping,
};
use crate::{
    errno::TryError,
    fabric::{
        qos::tenant::Tenant,
        send::{
            inflight::{Direction, Segment, SegmentPoster},
            transfer::{FaultNeeded, ResumeState, Transfer, TransferStop},
        },
    },
    region::MemoryService,
    stats::Stats,
    sys::{buffer::Buffer, deadline::Deadline},
    verbs::dma::DmaPages,
};
use core::ops::Deref;
use kernel::{page::PAGE_SIZE, prelude::*, sync::Arc};
use kite_core::layout::{Layout, Piece};

/// Bytes that are copied locally before segments in flight are drained.
const MAX_LOCAL_COPY_BYTES: usize = 4 << 20;

/// Number of successive times that the caller's memory may be reclaimed between the fault-in and the use.
const MAX_FAULT_RETRIES: u32 = 16;

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
        let transfer = VectoredTransfer {
            access: self,
            mapping,
            memory,
            resume_state: ResumeState::default(),
            bytes_done: 0,
            fault_retries: 0,
        };
        transfer.run(enter_service)
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
}

/// Transfer of a vectored access, in one attempt or several.
struct VectoredTransfer<'a> {
    access: &'a VectoredAccess<'a>,
    mapping: &'a Mapping,
    memory: &'a Buffer,
    resume_state: ResumeState,
    /// Bytes that are transferred already.
    bytes_done: usize,
    /// Number of successive faults of the caller's memory since the last progress.
    fault_retries: u32,
}

impl VectoredTransfer<'_> {
    /// Transfers the bytes. See [`VectoredAccess::run`].
    fn run<L: Deref<Target = Arc<MemoryService>>>(
        mut self,
        enter_service: impl Fn() -> Result<L>,
    ) -> Result {
        loop {
            // The guard of the service is dropped before the wait for the next attempt.
            let attempt = self.attempt(&*enter_service()?);
            match attempt {
                Ok(()) => return self.resume_state.copy_out_deferred(self.memory),
                Err(stop) => self.prepare_next(stop)?,
            }
        }
    }

    /// Waits until the cause of a stop is removed.
    fn prepare_next(&mut self, stop: TransferStop) -> Result {
        let deadline = self.access.deadline;
        match stop {
            TransferStop::FaultNeeded(absent) => self.fault_in(&absent),
            TransferStop::Throttled { bytes, completed } => {
                self.access.tenant.admit(bytes, deadline)?;
                self.resume_state.admitted_bytes += bytes;
                self.bytes_done = completed;
                Ok(())
            }
            TransferStop::RegionMoved { completed } => {
                self.mapping.wait_resumed(deadline)?;
                self.bytes_done = completed;
                Ok(())
            }
            TransferStop::Failed(error) => Err(error),
        }
    }

    /// Makes absent memory of the caller present.
    fn fault_in(&mut self, absent: &FaultNeeded) -> Result {
        self.fault_retries = if absent.completed > self.bytes_done {
            1
        } else {
            self.fault_retries + 1
        };
        self.bytes_done = absent.completed;
        let memory = self.memory;
        let fetched = match self.fault_retries > MAX_FAULT_RETRIES {
            true => Err(ENOMEM),
            false => absent.fault_in(memory),
        };
        if absent.needs_pin && fetched == Err(ENOMEM) {
            // No page can be pinned: RLIMIT_MEMLOCK is reached, or pins of other threads use the limit up.
            // Slot buffers need no pins.
            memory.fault_in(absent.buffer_offset, absent.len, absent.writable)?;
            self.resume_state.bounced_until = absent.buffer_offset.saturating_add(absent.len);
            self.fault_retries = 0;
        } else {
            fetched?;
        }
        // A fault may take arbitrarily long here: no segment is in flight.
        self.resume_state.copy_out_deferred(memory)
    }

    /// Transfers the bytes of all ranges, except those that are transferred already.
    fn attempt(&mut self, service: &MemoryService) -> Result<(), TransferStop> {
        let (access, mapping, memory) = (self.access, self.mapping, self.memory);
        let (direction, deadline) = (access.direction, access.deadline);
        let layout = mapping.layout()?;
        let version = mapping
            .access_chunks()
            .map_err(|error| TransferStop::new(error, self.bytes_done))?
            .version;
        let permit = || mapping.start_remote_access(version);
        let poster = SegmentPoster {
            fabric: service.fabric(),
            direction,
            buffer: memory,
            tenant: access.tenant,
        };
        let local_copy = LocalCopy {
            direction,
            memory,
            stats: &service.stats,
        };
        let mut transfer = Transfer::new(poster, deadline, permit, &mut self.resume_state);
        let mut copied_bytes = 0;
        for (piece, buffer_offset) in access.pieces(&layout, self.bytes_done)? {
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
                    if let Some(absent) = local_copy.run(&pages, piece, buffer_offset)? {
                        transfer.drain()?;
                        return Err(TransferStop::FaultNeeded(absent));
                    }
                }
            }
        }
        transfer.drain()
    }
}

/// Copy between memory of this node and the caller's memory.
pub(super) struct LocalCopy<'a> {
    pub(super) direction: Direction,
    pub(super) memory: &'a Buffer,
    pub(super) stats: &'a Stats,
}

impl LocalCopy<'_> {
    /// Copies a piece page by page. Stops at the first absent page of the caller. The mapping may end
    /// meanwhile: `pages` is a reference, so the memory is not reused.
    pub(super) fn run(
        &self,
        pages: &DmaPages,
        piece: Piece,
        buffer_offset: usize,
    ) -> Result<Option<FaultNeeded>> {
        for page_offset in (0..piece.len as usize).step_by(PAGE_SIZE) {
            let (offset, buffer_offset) = (
                piece.offset as usize + page_offset,
                buffer_offset + page_offset,
            );
            let len = PAGE_SIZE.min(piece.len as usize - page_offset);
            let memory = self.memory;
            let copied = match self.direction {
                Direction::Write => memory.try_copy_to_pages(pages, offset, buffer_offset, len),
                Direction::Read => memory.try_copy_from_pages(pages, offset, buffer_offset, len),
            };
            match copied {
                Ok(()) => self.stats.local_bytes.add(len as u64),
                Err(TryError::WouldBlock) => {
                    return Ok(Some(FaultNeeded {
                        buffer_offset,
                        len,
                        writable: self.direction == Direction::Read,
                        needs_pin: false,
                        completed: buffer_offset,
                    }))
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(None)
    }
}
