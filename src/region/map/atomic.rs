// SPDX-License-Identifier: GPL-2.0

//! Atomic operations on words of regions (LITE, section 7.2).
//!
//! # Operation
//!
//! Drivers reject kernel RDMA atomics, or the RNIC executes them atomically only with respect to other RDMA
//! atomics. The CPU of the node that holds the word therefore executes all atomic operations. Other nodes
//! send a control request to that node.
//!
//! # Recovery
//!
//! A request must not be executed twice (`kite_core::proto::once`), so the request ends if either node
//! restarts or leaves. The request names the region: a delayed request does not find memory that was reused
//! for another region.

use super::{chunk_map::PieceLocation, remote::RemoteRequestGuard, Mapping};
use crate::{
    control::client::ControlClient, errno::TryResult, region::MemoryService,
    sys::deadline::Deadline, trace,
};
use kernel::{prelude::*, sync::Arc};
use kite_core::{
    atomic::{AtomicOp, WORD_BYTES},
    layout::Piece,
    wire::{ChunkLocation, ControlRequest},
};

/// Atomic operation on a word of a region.
pub(crate) struct AtomicRequest {
    pub(crate) offset: u64,
    pub(crate) op: AtomicOp,
    pub(crate) deadline: Deadline,
}

impl MemoryService {
    /// Executes an atomic operation on a word of a mapped region. Returns the old value.
    ///
    /// # Errors
    ///
    /// See `struct kite_atomic` in `include/uapi/kite.h`.
    pub(crate) fn atomic_update(
        self: &Arc<Self>,
        mapping: &Arc<Mapping>,
        update: &AtomicRequest,
    ) -> Result<u64> {
        let result =
            mapping.retry_on_move(update.deadline, || self.do_atomic_update(mapping, update));
        match result {
            Ok(_) => self.stats.atomics.add(1),
            Err(_) => self.stats.errors.add(1),
        }
        trace::atomic(
            mapping.home,
            mapping.region,
            update.offset,
            result.err().map_or(0, Error::to_errno),
        );
        result
    }

    fn do_atomic_update(
        self: &Arc<Self>,
        mapping: &Arc<Mapping>,
        update: &AtomicRequest,
    ) -> TryResult<u64> {
        if update.offset % WORD_BYTES != 0 {
            return Err(EINVAL.into());
        }
        let pieces = mapping.layout()?.pieces(update.offset, WORD_BYTES);
        let piece = pieces.map_err(|_| ERANGE)?.next().ok_or(ERANGE)?;
        // The guard keeps local memory from being freed. For remote memory, the lender checks the region.
        let chunk_map = mapping.access_chunks()?;
        match chunk_map.find(piece)? {
            PieceLocation::Local(chunk) => {
                update.deadline.check()?;
                Ok(chunk.apply_atomic(piece.offset as usize, update.op)?)
            }
            PieceLocation::Remote(location) => {
                let request_guard = mapping.start_remote_request()?;
                drop(chunk_map);
                Ok(self.request_from_lender(mapping, request_guard, location, piece, update)?)
            }
        }
    }

    fn request_from_lender(
        self: &Arc<Self>,
        mapping: &Mapping,
        request_guard: RemoteRequestGuard,
        location: ChunkLocation,
        piece: Piece,
        update: &AtomicRequest,
    ) -> Result<u64> {
        let answer = self.request_exactly_once(
            request_guard,
            (location.instance, 0),
            update.deadline,
            |sequence| ControlRequest::RegionAtomic {
                sequence,
                home: mapping.home,
                region: mapping.region,
                chunk_addr: location.addr - u64::from(piece.offset),
                offset: piece.offset,
                op: update.op,
            },
        )?;
        answer.old_value()
    }
}
