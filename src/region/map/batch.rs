// SPDX-License-Identifier: GPL-2.0

//! Short accesses of one mapping that are posted together, one way and to one node.
//!
//! What was looked up for the first, by which it may go, holds for those that join it: of them only the bytes
//! are looked at.

use super::{
    chunk_map::PieceLocation,
    io::{AccessRequest, SubmitContext},
    Mapping, OwnedRemoteAccess,
};
use crate::{
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
    prelude::*,
    sync::Arc,
    time::{Instant, Monotonic},
};
use kite_core::layout::Layout;

/// A batch of accesses. Dropping it gives them up.
pub(crate) struct AccessBatch {
    inner: batch::SegmentBatch<OwnedRemoteAccess>,
    layout: Layout,
}

impl AccessBatch {
    /// One for parts like this first one, of a region that is in the places of this version. There is none
    /// if the part is too long.
    ///
    /// # Errors
    ///
    /// `EAGAIN` if it would have to wait; else as for [`Access::run`].
    pub(in crate::region) fn new(
        poster: &SegmentPoster<'_>,
        mapping: &Arc<Mapping>,
        layout: Layout,
        version: u32,
        first_segment: Segment,
        arena: Option<&Arc<LongTermDmaMap>>,
    ) -> Result<Option<Self>> {
        let peer = poster.fabric.peer_by_instance(first_segment.instance)?;
        let conn = peer.select_conn(poster.tenant.conn_subset())?;
        let permit = || mapping.start_owned_remote_access(version);
        let inner = batch::SegmentBatch::new(poster, &conn, first_segment, arena, permit)?;
        let inner = inner.filter(|inner| inner.has_room(poster.buffer, first_segment.len));
        Ok(inner.map(|inner| Self { inner, layout }))
    }

    /// Which way its accesses go.
    pub(crate) fn direction(&self) -> Direction {
        self.inner.direction()
    }

    /// Whose they are.
    pub(crate) fn mapping(&self) -> &Arc<Mapping> {
        self.inner.guard().mapping()
    }

    /// Whether no other is to join them.
    pub(crate) fn is_full(&self) -> bool {
        self.inner.is_full()
    }

    /// Adds an access that can go with the others.
    ///
    /// # Errors
    ///
    /// `EAGAIN` if its turn has not come; else as for [`Access::run`].
    pub(in crate::region) fn try_join(
        &mut self,
        fabric: &Fabric,
        access: &AccessRequest,
        memory: &Buffer,
        context: &mut SubmitContext<'_>,
    ) -> Result<Option<BatchedSegment>> {
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
            return Err(EAGAIN);
        }
        let segment = access.to_segment(location);
        self.add_segment(fabric, memory, segment, context.wr_chain)
            .map(Some)
    }

    /// Adds a part for which there is room.
    ///
    /// # Errors
    ///
    /// As for [`batch::Batch::add`].
    pub(in crate::region) fn add_segment(
        &mut self,
        fabric: &Fabric,
        memory: &Buffer,
        segment: Segment,
        wr_chain: &mut WrChain,
    ) -> Result<BatchedSegment> {
        self.inner.add_segment(fabric, memory, segment, wr_chain)
    }

    /// Posts them.
    pub(crate) fn post(
        self,
        fabric: &Fabric,
        wr_chain: &mut WrChain,
        now: Instant<Monotonic>,
    ) -> PolledOp<OwnedRemoteAccess> {
        self.inner.post(fabric, wr_chain, now)
    }
}
