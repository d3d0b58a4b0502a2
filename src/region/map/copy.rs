// SPDX-License-Identifier: GPL-2.0

//! Filling regions, and copying between regions (LITE: `LT_memset`, `LT_memcpy`, `LT_memmove`).
//!
//! # Operation
//!
//! The CPU of the node that lends the memory fills, and copies between chunks of that node. The requesting
//! node sends one control request per step, as for an atomic operation ([`super::atomic`]). If source and
//! destination are on two other nodes, the source node pushes the bytes ([`crate::region::lend::push`]). If
//! only one of the two is on this node, the bytes pass through a bounce buffer of this node.
//!
//! # Recovery
//!
//! Each step repeats while a region moves. A step with unknown outcome is canceled before the mapping counts
//! as drained ([`Mapping::is_drained`]).

use super::{access::AccessRequest, chunk_map::PieceLocation, Mapping};
use crate::{
    control::client::ControlClient,
    errno::{TryError, TryResult},
    fabric::{qos::tenant::Tenant, send::inflight::Direction},
    region::MemoryService,
    stats::Stats,
    sys::{buffer::Buffer, deadline::Deadline},
    trace,
};
use core::ops::Deref;
use kernel::{alloc::flags::GFP_KERNEL_ACCOUNT, prelude::*, sync::Arc};
use kite_core::{
    copy::{CopySegment, CopySegments, RegionPosition},
    layout::Piece,
    wire::{ControlRequest, LentChunkAddr, PUSH_SEQUENCE_FLAG},
};

/// Maximum bytes of one copy or fill request. Other at-most-once requests of the requesting node wait
/// meanwhile.
const MAX_COPY_STEP_BYTES: u32 = 64 << 10;
const MAX_FILL_STEP_BYTES: u32 = 256 << 10;

/// Fill of a range of a region with one byte value.
pub(crate) struct FillRequest {
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) byte: u8,
    pub(crate) deadline: Deadline,
}

/// Source or destination of a copy.
#[derive(Clone, Copy)]
pub(crate) struct CopyOperand<'a> {
    pub(crate) mapping: &'a Arc<Mapping>,
    pub(crate) offset: u64,
}

/// Copy between two ranges of mapped regions.
pub(crate) struct CopyRequest<'a> {
    pub(crate) from: CopyOperand<'a>,
    pub(crate) to: CopyOperand<'a>,
    pub(crate) len: u64,
    pub(crate) deadline: Deadline,
    pub(crate) tenant: &'a Tenant,
}

impl FillRequest {
    /// Fills a range of a mapped region. `enter_service` returns a guard of the service for each attempt.
    ///
    /// # Errors
    ///
    /// See `struct kite_fill` in `include/uapi/kite.h`.
    pub(crate) fn run<L: Deref<Target = Arc<MemoryService>>>(
        &self,
        enter_service: impl Fn() -> Result<L>,
        mapping: &Arc<Mapping>,
        tenant: &Tenant,
        stats: &Stats,
    ) -> Result {
        let result = self.do_fill(enter_service, mapping, tenant);
        if result.is_ok() {
            stats.fills.add(1);
            stats.fill_bytes.add(self.len);
        } else {
            stats.errors.add(1);
        }
        trace::fill(
            mapping.home,
            mapping.region,
            self.offset,
            self.len,
            result.err().map_or(0, Error::to_errno),
        );
        result
    }

    fn do_fill<L: Deref<Target = Arc<MemoryService>>>(
        &self,
        enter_service: impl Fn() -> Result<L>,
        mapping: &Arc<Mapping>,
        tenant: &Tenant,
    ) -> Result {
        drop(enter_service()?);
        let layout = mapping.layout()?;
        let pieces = layout.pieces(self.offset, self.len).map_err(|_| ERANGE)?;
        for piece in pieces {
            for start in (0..piece.len).step_by(MAX_FILL_STEP_BYTES as usize) {
                self.deadline.check()?;
                let sub_piece = Piece {
                    offset: piece.offset + start,
                    len: MAX_FILL_STEP_BYTES.min(piece.len - start),
                    ..piece
                };
                if mapping.retry_on_move(self.deadline, || mapping.is_remote(sub_piece))? {
                    tenant.admit(u64::from(sub_piece.len), self.deadline)?;
                }
                mapping.retry_on_move(self.deadline, || {
                    self.fill_piece(&*enter_service()?, mapping, sub_piece)
                })?;
            }
        }
        Ok(())
    }

    fn fill_piece(
        &self,
        memory_service: &Arc<MemoryService>,
        mapping: &Arc<Mapping>,
        piece: Piece,
    ) -> TryResult {
        let (len, byte) = (piece.len, self.byte);
        // The guard keeps local memory from being freed.
        let chunk_map = mapping.access_chunks()?;
        match chunk_map.find(piece)? {
            PieceLocation::Local(chunk) => {
                chunk.fill(piece.offset as usize, len as usize, byte)?;
                memory_service.stats.local_bytes.add(len.into());
                Ok(())
            }
            PieceLocation::Remote(location) => {
                let request_guard = mapping.start_remote_request()?;
                drop(chunk_map);
                let destination = to_wire_span(mapping, location.addr, piece);
                let reply = memory_service.request_once(
                    request_guard,
                    (location.instance, 0),
                    self.deadline,
                    |sequence| ControlRequest::Fill {
                        sequence,
                        destination,
                        len,
                        byte,
                    },
                )?;
                Ok(reply.expect_done()?)
            }
        }
    }
}

/// Returns a piece in the form in which the lender identifies chunks. `addr` is the address of the piece
/// there.
fn to_wire_span(mapping: &Mapping, addr: u64, piece: Piece) -> LentChunkAddr {
    LentChunkAddr {
        home: mapping.home,
        region: mapping.region,
        chunk_addr: addr - u64::from(piece.offset),
        offset: piece.offset,
    }
}

impl CopyRequest<'_> {
    /// Copies between mapped regions. `enter_service` returns a guard of the service for each attempt.
    ///
    /// # Errors
    ///
    /// See `struct kite_copy` in `include/uapi/kite.h`.
    pub(crate) fn run<L: Deref<Target = Arc<MemoryService>>>(
        &self,
        enter_service: impl Fn() -> Result<L>,
        stats: &Stats,
    ) -> Result {
        let result = self.do_copy(enter_service, stats);
        if result.is_ok() {
            stats.copies.add(1);
            stats.copy_bytes.add(self.len);
        } else {
            stats.errors.add(1);
        }
        let (from, to) = (self.from.mapping, self.to.mapping);
        trace::copy(
            from.home,
            from.region,
            to.home,
            to.region,
            self.len,
            result.err().map_or(0, Error::to_errno),
        );
        result
    }

    fn do_copy<L: Deref<Target = Arc<MemoryService>>>(
        &self,
        enter_service: impl Fn() -> Result<L>,
        stats: &Stats,
    ) -> Result {
        drop(enter_service()?);
        let (from, to) = (self.from.mapping, self.to.mapping);
        let same_region = (from.home, from.region) == (to.home, to.region);
        let steps = CopySegments::new(
            self.from.region_position()?,
            self.to.region_position()?,
            self.len,
            same_region,
            MAX_COPY_STEP_BYTES,
        );
        let mut bounce = KVec::new();
        for step in steps.map_err(|_| ERANGE)? {
            self.deadline.check()?;
            if self.retry_on_move(|| self.is_all_remote(step))? {
                self.tenant.admit(u64::from(step.len), self.deadline)?;
            }
            if !self.retry_on_move(|| self.copy_at_lender(&*enter_service()?, step))? {
                self.copy_via_bounce(&enter_service, step, &mut bounce, stats)?;
            }
        }
        Ok(())
    }

    /// Calls `f`, and again after each move of either region for which `f` returns
    /// [`TryError::InTransition`].
    fn retry_on_move<T>(&self, mut f: impl FnMut() -> TryResult<T>) -> Result<T> {
        loop {
            match f() {
                Err(TryError::InTransition) => {
                    self.from.mapping.wait_resumed(self.deadline)?;
                    self.to.mapping.wait_resumed(self.deadline)?;
                }
                result => return Ok(result?),
            }
        }
    }

    /// Returns `true` if other nodes copy the step. Transfers from or to this node are admitted by
    /// [`AccessRequest::run`] instead.
    fn is_all_remote(&self, step: CopySegment) -> TryResult<bool> {
        let (from, to) = (self.from, self.to);
        Ok(from.mapping.is_remote(from.piece(step)?)? && to.mapping.is_remote(to.piece(step)?)?)
    }

    /// Copies a step if its source and destination are both on this node, or both on other nodes. Returns
    /// `false` otherwise, and copies nothing.
    fn copy_at_lender(
        &self,
        memory_service: &Arc<MemoryService>,
        step: CopySegment,
    ) -> TryResult<bool> {
        let (from_piece, to_piece) = (self.from.piece(step)?, self.to.piece(step)?);
        // The guards keep local memory from being freed.
        let (source_map, target_map) = (
            self.from.mapping.access_chunks()?,
            self.to.mapping.access_chunks()?,
        );
        match (source_map.find(from_piece)?, target_map.find(to_piece)?) {
            (PieceLocation::Local(from), PieceLocation::Local(to)) => {
                to.copy_from(
                    to_piece.offset as usize,
                    &from,
                    from_piece.offset as usize,
                    step.len as usize,
                )?;
                memory_service.stats.local_bytes.add(step.len.into());
                Ok(true)
            }
            (PieceLocation::Remote(source_location), PieceLocation::Remote(target_location)) => {
                let source_guard = self.from.mapping.start_remote_request()?;
                let request_guards = (source_guard, self.to.mapping.start_remote_request()?);
                drop((source_map, target_map));
                let source = to_wire_span(self.from.mapping, source_location.addr, from_piece);
                let destination = to_wire_span(self.to.mapping, target_location.addr, to_piece);
                let (len, instance) = (step.len, source_location.instance);
                let reply = if instance == target_location.instance {
                    memory_service.request_once(
                        request_guards,
                        (instance, 0),
                        self.deadline,
                        |sequence| ControlRequest::Copy {
                            sequence,
                            source,
                            destination,
                            len,
                        },
                    )
                } else {
                    memory_service.request_once(
                        request_guards,
                        (instance, PUSH_SEQUENCE_FLAG),
                        self.deadline,
                        |sequence| ControlRequest::PushCopy {
                            sequence,
                            source,
                            home: self.to.mapping.home_instance,
                            destination: target_location,
                            len,
                        },
                    )
                }?;
                reply.expect_done()?;
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    /// Reads the step into the bounce buffer, and writes it from there.
    fn copy_via_bounce<L: Deref<Target = Arc<MemoryService>>>(
        &self,
        enter_service: impl Fn() -> Result<L>,
        step: CopySegment,
        bounce: &mut KVec<u8>,
        stats: &Stats,
    ) -> Result {
        if bounce.is_empty() {
            bounce.resize(MAX_COPY_STEP_BYTES as usize, 0, GFP_KERNEL_ACCOUNT)?;
        }
        // SAFETY: The buffer has at least `step.len` bytes, since `step.len` is at most
        // `MAX_COPY_STEP_BYTES`. The vector is not reallocated while `memory` exists, and nothing else uses
        // the bytes meanwhile.
        let memory = unsafe { Buffer::from_kernel(bounce.as_mut_ptr(), step.len as usize) };
        let ends = [(&self.from, Direction::Read), (&self.to, Direction::Write)];
        let copied = ends.into_iter().try_for_each(|(end, direction)| {
            let access = AccessRequest {
                direction,
                offset: end.offset + step.offset,
                len: step.len.into(),
                deadline: self.deadline,
            };
            access.run(&enter_service, end.mapping, &memory, self.tenant, stats)
        });
        if copied == Err(EIO) {
            // The RNIC may still access the buffer. Leak the buffer rather than reuse its memory.
            core::mem::forget(core::mem::take(bounce));
        }
        copied
    }
}

impl CopyOperand<'_> {
    fn region_position(&self) -> Result<RegionPosition> {
        Ok(RegionPosition {
            layout: self.mapping.layout()?,
            offset: self.offset,
        })
    }

    /// Returns the piece of a step. Each step is within one chunk.
    fn piece(&self, step: CopySegment) -> Result<Piece> {
        let layout = self.mapping.layout()?;
        let pieces = layout.pieces(self.offset + step.offset, step.len.into());
        pieces.map_err(|_| ERANGE)?.next().ok_or(EIO)
    }
}
