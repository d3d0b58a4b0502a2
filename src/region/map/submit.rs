// SPDX-License-Identifier: GPL-2.0

//! Submission of short accesses without waiting.
//!
//! # Operation
//!
//! An access to one chunk of this node is copied at once. An access to one chunk of another node starts a
//! batch ([`super::batch`]), which later accesses can join until the caller posts the batch. All other
//! accesses need a worker, which runs them by [`AccessRequest::run`].

use super::{
    access::{AccessRequest, SubmitContext},
    batch::AccessBatch,
    chunk_map::PieceLocation,
    io::LocalCopy,
    Mapping,
};
use crate::{
    errno::{TryError, TryResult},
    fabric::{
        send::{
            batch::BatchedSegment,
            inflight::{SegmentPoster, SLOT_BUFFER_BYTES},
        },
        Fabric,
    },
    region::MemoryService,
    sys::buffer::Buffer,
};
use kernel::{prelude::*, sync::Arc};

impl AccessRequest {
    /// Submits a transfer between a region and `memory`, which must be present, without waiting. If a batch
    /// is returned, the caller must call [`Self::account`] when the access has completed.
    ///
    /// # Errors
    ///
    /// - [`TryError::WouldBlock`]: the call would have to wait.
    /// - `ETIMEDOUT`: the deadline expired.
    /// - Other errors: see [`Self::run`].
    pub(crate) fn submit(
        &self,
        service: &MemoryService,
        mapping: &Arc<Mapping>,
        memory: &Buffer,
        context: &mut SubmitContext<'_>,
    ) -> TryResult<SubmitResult> {
        let submitted = self.try_submit(service, mapping, memory, context);
        if matches!(&submitted, Ok(SubmitResult::Done)) {
            self.account(mapping, &service.stats, None);
        }
        self.account_unless_retry(mapping, &service.stats, context.now, submitted)
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
    ) -> TryResult<Option<BatchedSegment>> {
        let joined = batch.try_join(fabric, self, memory, context);
        self.account_unless_retry(batch.mapping(), &fabric.stats, context.now, joined)
    }

    /// Completes or submits an access that is short and within one chunk.
    fn try_submit(
        &self,
        service: &MemoryService,
        mapping: &Arc<Mapping>,
        memory: &Buffer,
        context: &mut SubmitContext<'_>,
    ) -> TryResult<SubmitResult> {
        let layout = mapping.layout()?;
        if self.len == 0 {
            layout.pieces(self.offset, 0).map_err(|_| ERANGE)?;
            return Ok(SubmitResult::Done);
        }
        let Some(piece) = self.single_chunk_piece(&layout, context)? else {
            return Ok(SubmitResult::NeedsWorker);
        };
        let chunk_map = mapping.access_chunks()?;
        match chunk_map.find(piece)? {
            // A long copy would delay other accesses of the submitter.
            PieceLocation::Local(_) if self.len as usize > SLOT_BUFFER_BYTES => {
                Ok(SubmitResult::NeedsWorker)
            }
            PieceLocation::Local(pages) => {
                let absent = LocalCopy {
                    direction: self.direction,
                    memory,
                    stats: &service.stats,
                }
                .run(&pages, piece, 0)?;
                Ok(absent.map_or(SubmitResult::Done, |_| SubmitResult::NeedsWorker))
            }
            PieceLocation::Remote(location) => {
                let poster = SegmentPoster {
                    fabric: service.fabric(),
                    direction: self.direction,
                    buffer: memory,
                    tenant: context.tenant,
                };
                let segment = self.to_segment(location);
                if !context.try_admit(self)? {
                    return Err(TryError::WouldBlock);
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
                let placed =
                    batch.add_segment(service.fabric(), memory, segment, context.wr_chain)?;
                Ok(SubmitResult::NewBatch(batch, placed))
            }
        }
    }
}

/// Result of [`AccessRequest::submit`].
pub(crate) enum SubmitResult {
    /// The access is complete.
    Done,
    /// The access is the first of a new batch, which the caller must post.
    NewBatch(AccessBatch, BatchedSegment),
    /// Nothing was posted: a worker must run the access, since it needs to wait or is long. The ticket may be
    /// admitted.
    NeedsWorker,
}
