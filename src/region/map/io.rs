// SPDX-License-Identifier: GPL-2.0

//! Reads and writes of mapped regions.
//!
//! # Operation
//!
//! The range is checked completely before anything is posted; the session has checked the handle and the
//! rights. Chunks of this node are copied by the CPU, other chunks are transferred by [`Transfer`].
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

impl MemoryService {
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
    pub(super) fn copy_local(
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
                Err(TryError::WouldBlock) => {
                    return Ok(Some(FaultNeeded {
                        buffer_offset,
                        len,
                        writable: direction == Direction::Read,
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
