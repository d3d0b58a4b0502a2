// SPDX-License-Identifier: GPL-2.0

//! Setting the bytes of a region, and copying between regions (LITE: `LT_memset`, `LT_memcpy`,
//! `LT_memmove`).
//!
//! What can be done where the memory is, is done there, by the processor of the node that lends it: it is
//! asked for one piece at a time, as for an atomic operation ([`super::atomic`]). Bytes that go from one other
//! node to another are pushed by the one that has them ([`crate::region::lend::push`]).

use super::{chunk_map::PieceLocation, io::AccessRequest, Mapping};
use crate::{
    errno,
    fabric::{qos::tenant::Tenant, send::inflight::Direction},
    region::{
        lend::loan::{LentChunk, NodeScopedId},
        MemoryService,
    },
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

/// Most bytes that a node is asked to copy, or to set, at a time: other numbered requests of the asking node wait
/// meanwhile.
const MAX_COPY_STEP_BYTES: u32 = 64 << 10;
const MAX_FILL_STEP_BYTES: u32 = 256 << 10;

/// Bytes to set.
pub(crate) struct FillRequest {
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) byte: u8,
    pub(crate) deadline: Deadline,
}

/// One end of a copy.
#[derive(Clone, Copy)]
pub(crate) struct CopyOperand<'a> {
    pub(crate) mapping: &'a Arc<Mapping>,
    pub(crate) offset: u64,
}

/// Bytes to copy.
pub(crate) struct CopyRequest<'a> {
    pub(crate) from: CopyOperand<'a>,
    pub(crate) to: CopyOperand<'a>,
    pub(crate) len: u64,
    pub(crate) deadline: Deadline,
    pub(crate) tenant: &'a Tenant,
}

impl FillRequest {
    /// Sets the bytes of a mapped region. The service is entered by `enter`.
    ///
    /// # Errors
    ///
    /// As `struct kite_fill` in `include/uapi/kite.h` says.
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
    ) -> Result {
        let (len, byte) = (piece.len, self.byte);
        // Our own memory stays while we are inside.
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
                let answer = memory_service.request_exactly_once(
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
                answer.expect_done()
            }
        }
    }
}

/// A piece as the node that lends it knows it; it is at `addr` there.
fn to_wire_span(mapping: &Mapping, addr: u64, piece: Piece) -> LentChunkAddr {
    LentChunkAddr {
        home: mapping.home,
        region: mapping.region,
        chunk_addr: addr - u64::from(piece.offset),
        offset: piece.offset,
    }
}

impl CopyRequest<'_> {
    /// Copies between mapped regions. The service is entered by `enter`.
    ///
    /// # Errors
    ///
    /// As `struct kite_copy` in `include/uapi/kite.h` says.
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

    /// Calls `f`, and again when either region has moved meanwhile.
    fn retry_on_move<T>(&self, mut f: impl FnMut() -> Result<T>) -> Result<T> {
        loop {
            match f() {
                Err(error) if error == errno::inprogress() => {
                    self.from.mapping.wait_resumed(self.deadline)?;
                    self.to.mapping.wait_resumed(self.deadline)?;
                }
                result => return result,
            }
        }
    }

    /// Whether others do it. What comes from or to this node asks by itself.
    fn is_all_remote(&self, step: CopySegment) -> Result<bool> {
        let (from, to) = (self.from, self.to);
        Ok(from.mapping.is_remote(from.piece(step)?)? && to.mapping.is_remote(to.piece(step)?)?)
    }

    /// Copies what is all at this node, or all at others. Returns whether it is.
    fn copy_at_lender(
        &self,
        memory_service: &Arc<MemoryService>,
        step: CopySegment,
    ) -> Result<bool> {
        let (from_piece, to_piece) = (self.from.piece(step)?, self.to.piece(step)?);
        // Our own memory stays while we are inside.
        let (source_map, target_map) = (
            self.from.mapping.access_chunks()?,
            self.to.mapping.access_chunks()?,
        );
        match (source_map.find(from_piece)?, target_map.find(to_piece)?) {
            (PieceLocation::Local(from), PieceLocation::Local(to)) => {
                copy_lent_bytes((&from, from_piece.offset), (&to, to_piece.offset), step.len)?;
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
                let answer = if instance == target_location.instance {
                    memory_service.request_exactly_once(
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
                    memory_service.request_exactly_once(
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
                answer.expect_done().map(|()| true)
            }
            _ => Ok(false),
        }
    }

    /// Reads or writes what comes from or goes to this node.
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
        // SAFETY: The buffer has so many bytes, stays where it is while this lives, and is used by nothing
        // else meanwhile.
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
            // The RNIC may not let go of it: better lost than used again.
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

    /// The piece of a step, which is in one chunk.
    fn piece(&self, step: CopySegment) -> Result<Piece> {
        let layout = self.mapping.layout()?;
        let pieces = layout.pieces(self.offset + step.offset, step.len.into());
        pieces.map_err(|_| ERANGE)?.next().ok_or(EIO)
    }
}

/// Copies within this node.
fn copy_lent_bytes(
    (from, from_offset): (&LentChunk, u32),
    (to, to_offset): (&LentChunk, u32),
    len: u32,
) -> Result {
    to.copy_from(to_offset as usize, from, from_offset as usize, len as usize)
}

/// At the node that lends the memory.
impl MemoryService {
    /// Finds memory that this node lends.
    ///
    /// # Errors
    ///
    /// `ESTALE` if it is not lent to that region any more, `EHOSTDOWN` if the home of it died.
    pub(in crate::region) fn find_lent_chunk(
        &self,
        home: u32,
        region: u64,
        chunk: u64,
    ) -> Result<Arc<LentChunk>> {
        // Else the memory of a home that died would be taken for freed.
        self.cluster.instance_of(home)?;
        let key: NodeScopedId = (home, region);
        self.loans.find_chunk(key, chunk).ok_or_else(errno::stale)
    }

    /// Sets bytes of memory that this node lends, for a peer.
    pub(in crate::region) fn serve_fill(
        &self,
        node: u32,
        sequence: u64,
        destination: LentChunkAddr,
        len: u32,
        byte: u8,
    ) -> Result {
        let done = self.fabric().peer(node)?.execute_once(sequence, || {
            let chunk =
                self.find_lent_chunk(destination.home, destination.region, destination.chunk_addr)?;
            chunk.fill(destination.offset as usize, len as usize, byte)?;
            Ok(0)
        });
        done.map(drop)
    }

    /// Copies within memory that this node lends, for a peer.
    pub(in crate::region) fn serve_copy(
        &self,
        node: u32,
        sequence: u64,
        source: LentChunkAddr,
        destination: LentChunkAddr,
        len: u32,
    ) -> Result {
        let done = self.fabric().peer(node)?.execute_once(sequence, || {
            let source_chunk =
                self.find_lent_chunk(source.home, source.region, source.chunk_addr)?;
            let target_chunk =
                self.find_lent_chunk(destination.home, destination.region, destination.chunk_addr)?;
            copy_lent_bytes(
                (&source_chunk, source.offset),
                (&target_chunk, destination.offset),
                len,
            )?;
            Ok(0)
        });
        done.map(drop)
    }
}
