// SPDX-License-Identifier: GPL-2.0

//! Read or write of one range of a region: the request, its statistics and trace event, and the state that
//! submissions without waiting share.
//!
//! [`super::io`] runs an access. [`super::submit`] submits an access without waiting, after
//! [`SubmitContext::try_admit`] has admitted it by the rate limits. The session checks the rights of the
//! handle before (`src/session/handles.rs`). The range is checked here and in [`super::io`].

use super::Mapping;
use crate::{
    errno::{TryError, TryResult},
    fabric::{
        qos::tenant::{AdmissionTicket, Tenant},
        send::{
            batch::{WrChain, ZERO_COPY_MAX_BYTES},
            inflight::{Direction, Segment, SLOT_BUFFER_BYTES},
        },
    },
    stats::Stats,
    sys::deadline::Deadline,
    trace,
    verbs::dma::LongTermDmaMap,
};
use kernel::{
    prelude::*,
    sync::Arc,
    time::{Instant, Monotonic},
};
use kite_core::{
    layout::{Layout, Piece},
    wire::ChunkLocation,
};

/// Range of a region, in bytes.
#[derive(Clone, Copy)]
pub(crate) struct RegionRange {
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

/// Transfer between one range of a region and a buffer.
pub(crate) struct AccessRequest {
    pub(crate) direction: Direction,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) deadline: Deadline,
}

impl AccessRequest {
    /// Counts and traces a completed or failed access.
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

    /// Counts and traces an error, unless the caller must retry the access. A moving region is reported as
    /// [`TryError::WouldBlock`].
    pub(super) fn account_unless_retry<T>(
        &self,
        mapping: &Mapping,
        stats: &Stats,
        now: Instant<Monotonic>,
        submitted: TryResult<T>,
    ) -> TryResult<T> {
        // Compare with `now` only: a pending signal of the polling thread must not fail the caller's access.
        let error = match submitted {
            Err(TryError::Failed(error)) => error,
            Err(_) if self.deadline.has_expired_at(now) => ETIMEDOUT,
            submitted => return submitted.map_err(|_| TryError::WouldBlock),
        };
        self.account(mapping, stats, Some(error));
        Err(error.into())
    }

    /// Returns the piece that the access covers. Returns `None` if the access crosses a chunk boundary, or is
    /// too long for a submission without waiting.
    ///
    /// # Errors
    ///
    /// - `ERANGE`: the access is not entirely in the region.
    pub(super) fn single_chunk_piece(
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

    /// Returns the whole access as one segment at `location`.
    pub(super) fn to_segment(&self, location: ChunkLocation) -> Segment {
        Segment {
            instance: location.instance,
            addr: location.addr,
            len: self.len as usize,
            buffer_offset: 0,
        }
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

/// State that successive non-blocking accesses of one submitter share.
pub(crate) struct SubmitContext<'a> {
    pub(crate) tenant: &'a Tenant,
    /// Admission of the access by the priority and the rate limits of the tenant.
    pub(crate) admission: &'a mut AdmissionTicket,
    /// Scratch space for the work requests that are posted as one chain.
    pub(crate) wr_chain: &'a mut WrChain,
    /// Long-term DMA mapping in which buffers of the accesses may lie.
    pub(crate) arena: Option<&'a Arc<LongTermDmaMap>>,
    pub(crate) now: Instant<Monotonic>,
}

impl SubmitContext<'_> {
    /// Returns `true` if the tenant's limits admit the access now.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory.
    pub(super) fn try_admit(&mut self, access: &AccessRequest) -> Result<bool> {
        self.tenant
            .try_admit(self.admission, access.len, access.deadline)
    }
}
