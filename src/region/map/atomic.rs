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
    view::NodeInstance,
    wire::{ControlRequest, LentChunkAddr},
};

/// Atomic operation on a word of a region.
pub(crate) struct AtomicRequest {
    pub(crate) offset: u64,
    pub(crate) op: AtomicOp,
    pub(crate) deadline: Deadline,
}

impl AtomicRequest {
    /// Executes the operation on a word of a mapped region. Returns the old value.
    ///
    /// # Errors
    ///
    /// See `struct kite_atomic` in `include/uapi/kite.h`.
    pub(crate) fn run(&self, service: &Arc<MemoryService>, mapping: &Arc<Mapping>) -> Result<u64> {
        let result = mapping.retry_on_move(self.deadline, || self.execute(service, mapping));
        match result {
            Ok(_) => service.stats.atomics.add(1),
            Err(_) => service.stats.errors.add(1),
        }
        trace::atomic(
            mapping.home,
            mapping.region,
            self.offset,
            result.err().map_or(0, Error::to_errno),
        );
        result
    }

    fn execute(&self, service: &Arc<MemoryService>, mapping: &Arc<Mapping>) -> TryResult<u64> {
        if self.offset % WORD_BYTES != 0 {
            return Err(EINVAL.into());
        }
        let pieces = mapping.layout()?.pieces(self.offset, WORD_BYTES);
        let piece = pieces.map_err(|_| ERANGE)?.next().ok_or(ERANGE)?;
        // The guard keeps local memory from being freed. For remote memory, the lender checks the region.
        let chunk_map = mapping.access_chunks()?;
        match chunk_map.find(piece)? {
            PieceLocation::Local(chunk) => {
                self.deadline.check()?;
                Ok(chunk.apply_atomic(piece.offset as usize, self.op)?)
            }
            PieceLocation::Remote(location) => {
                let request_guard = mapping.start_remote_request()?;
                drop(chunk_map);
                let word = LentChunkAddr {
                    home: mapping.home,
                    region: mapping.region,
                    chunk_addr: location.addr - u64::from(piece.offset),
                    offset: piece.offset,
                };
                Ok(self.request_from_lender(service, request_guard, location.instance, word)?)
            }
        }
    }

    fn request_from_lender(
        &self,
        service: &Arc<MemoryService>,
        request_guard: RemoteRequestGuard,
        lender: NodeInstance,
        word: LentChunkAddr,
    ) -> Result<u64> {
        let request = |sequence| ControlRequest::RegionAtomic {
            sequence,
            home: word.home,
            region: word.region,
            chunk_addr: word.chunk_addr,
            offset: word.offset,
            op: self.op,
        };
        let reply = service.request_once(request_guard, (lender, 0), self.deadline, request)?;
        reply.old_value()
    }
}
