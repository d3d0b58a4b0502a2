// SPDX-License-Identifier: GPL-2.0

//! Batches of short accesses of one mapping that have the same direction and the same target node.
//!
//! The connection, the credits and the mapping guard of the first access serve the accesses that join. For a
//! joining access, the batch needs only the chunk location.

use super::{
    access::{AccessRequest, SubmitContext},
    chunk_map::PieceLocation,
    remote::OwnedRemoteAccess,
    Mapping,
};
use crate::{
    errno::{TryError, TryResult},
    fabric::{
        send::{
            batch::{self, BatchedSegment, WrChain},
            inflight::{Direction, PolledOp, Segment, SegmentPoster},
        },
        Fabric,
    },
    sys::buffer::Buffer,
    verbs::dma::LongTermDmaMap,
};
use kernel::{
    sync::Arc,
    time::{Instant, Monotonic},
};
use kite_core::layout::Layout;

/// Batch of accesses that is not posted yet. Dropping the batch cancels the accesses.
pub(crate) struct AccessBatch {
    inner: batch::SegmentBatch<OwnedRemoteAccess>,
    layout: Layout,
}

impl AccessBatch {
    /// Creates a batch for segments like `first_segment`, with chunk locations of `version`. Returns `None`
    /// if the segment is too long for a batch.
    ///
    /// # Errors
    ///
    /// - [`TryError::WouldBlock`]: the call would have to wait, for example for credits or a slot.
    /// - Other errors: see [`AccessRequest::run`].
    pub(super) fn new(
        poster: &SegmentPoster<'_>,
        mapping: &Arc<Mapping>,
        layout: Layout,
        version: u32,
        first_segment: Segment,
        arena: Option<&Arc<LongTermDmaMap>>,
    ) -> TryResult<Option<Self>> {
        let peer = poster.fabric.peer_by_instance(first_segment.instance)?;
        let conn = peer.select_conn(poster.tenant.conn_subset())?;
        let permit = || mapping.start_owned_remote_access(version);
        let inner = batch::SegmentBatch::new(poster, &conn, first_segment, arena, permit)?;
        let inner = inner.filter(|inner| inner.has_room(poster.buffer, first_segment.len));
        Ok(inner.map(|inner| Self { inner, layout }))
    }

    /// Returns the direction of all accesses.
    pub(crate) fn direction(&self) -> Direction {
        self.inner.direction()
    }

    /// Returns the mapping of all accesses.
    pub(crate) fn mapping(&self) -> &Arc<Mapping> {
        self.inner.guard().mapping()
    }

    /// Returns `true` if no other access can join.
    pub(crate) fn is_full(&self) -> bool {
        self.inner.is_full()
    }

    /// Adds an access if possible. Returns `None` if the access does not fit the batch: by direction, by
    /// size, or because the bytes are not in one chunk on the node of the batch.
    ///
    /// # Errors
    ///
    /// - [`TryError::WouldBlock`]: the tenant's rate limit does not admit the access yet.
    /// - Other errors: see [`AccessRequest::run`].
    pub(super) fn try_join(
        &mut self,
        fabric: &Fabric,
        access: &AccessRequest,
        memory: &Buffer,
        context: &mut SubmitContext<'_>,
    ) -> TryResult<Option<BatchedSegment>> {
        let fits = access.len != 0 && self.inner.has_room(memory, access.len as usize);
        if access.direction != self.direction() || !fits {
            return Ok(None);
        }
        let Some(piece) = access.single_chunk_piece(&self.layout, context)? else {
            return Ok(None);
        };
        let found = self.inner.guard().chunk_map().find(piece)?;
        let location = match found {
            PieceLocation::Remote(location) if location.instance == self.inner.instance() => {
                location
            }
            _ => return Ok(None),
        };
        if !context.try_admit(access)? {
            return Err(TryError::WouldBlock);
        }
        let segment = access.to_segment(location);
        self.add_segment(fabric, memory, segment, context.wr_chain)
            .map(Some)
    }

    /// Adds a segment for which [`Self::try_join`] or [`Self::new`] has found room.
    ///
    /// # Errors
    ///
    /// See [`batch::SegmentBatch::add_segment`].
    pub(super) fn add_segment(
        &mut self,
        fabric: &Fabric,
        memory: &Buffer,
        segment: Segment,
        wr_chain: &mut WrChain,
    ) -> TryResult<BatchedSegment> {
        self.inner.add_segment(fabric, memory, segment, wr_chain)
    }

    /// Posts all accesses as one chain of work requests.
    pub(crate) fn post(
        self,
        fabric: &Fabric,
        wr_chain: &mut WrChain,
        now: Instant<Monotonic>,
    ) -> PolledOp<OwnedRemoteAccess> {
        self.inner.post(fabric, wr_chain, now)
    }
}
