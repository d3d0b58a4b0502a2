// SPDX-License-Identifier: GPL-2.0

//! Requests served by a node as a mapper of a region. The home sends them.
//!
//! # Operation
//!
//! The home invalidates mappings, quiesces and resumes the region around a migration, and notifies waiters of
//! granted locks and barriers.
//!
//! # Recovery
//!
//! An invalidation returns `EAGAIN` until no access and no request of this node can take effect, and the home
//! repeats it. Quiesce and resume are executed once by sequence number.

use super::to_done;
use crate::region::MemoryService;
use kernel::prelude::*;
use kite_core::wire::{ControlHeader, ControlReply, ControlRequest, InvalidateReason, MovedChunks};

impl MemoryService {
    /// Serves a request to a node that maps a region. Returns `None` for any other request.
    pub(super) fn serve_as_mapper(
        &self,
        node: u32,
        header: &ControlHeader,
        request: &ControlRequest<'_>,
    ) -> Option<Result<ControlReply<'static>>> {
        let done = match *request {
            ControlRequest::InvalidateMapping { mapping, reason } => {
                self.serve_invalidate(node, header, mapping, reason)
            }
            ControlRequest::QuiesceRegion { sequence, region } => {
                self.serve_quiesce_once(node, header, sequence, region)
            }
            ControlRequest::ResumeRegion {
                sequence,
                region,
                ref moved,
            } => self.serve_resume_once(node, sequence, region, moved),
            ControlRequest::NotifyGranted { ticket, reply } => {
                self.serve_granted(node, ticket, reply)
            }
            _ => return None,
        };
        Some(done.map(to_done))
    }

    /// Invalidates a mapping of a region of home `node`. On success, no access of this node reaches the
    /// region's memory any longer, and no request to the lenders is outstanding.
    ///
    /// # Errors
    ///
    /// - `EAGAIN`: not certain yet. Also returned while the home has an older view than this node: the home
    ///   must not request memory back from a lender that only this node has removed from its view.
    fn serve_invalidate(
        &self,
        node: u32,
        header: &ControlHeader,
        mapping: u64,
        reason: InvalidateReason,
    ) -> Result {
        let found = self.mappings.get(mapping);
        let Some(found) = found.ok().filter(|found| found.home == node) else {
            return Ok(());
        };
        found.invalidate(reason);
        let is_drained = self.is_drained(&found) && header.epoch >= self.cluster.epoch();
        is_drained.then_some(()).ok_or(EAGAIN)
    }

    fn serve_quiesce_once(
        &self,
        node: u32,
        header: &ControlHeader,
        sequence: u64,
        region: u64,
    ) -> Result {
        let quiesce = || self.serve_quiesce(node, header, region).map(|()| 0);
        self.fabric().peer(node)?.execute_once(sequence, quiesce)?;
        Ok(())
    }

    fn serve_resume_once(
        &self,
        node: u32,
        sequence: u64,
        region: u64,
        moved: &MovedChunks<'_>,
    ) -> Result {
        let resume = || {
            self.resume_local(node, region, moved.clone());
            Ok(0)
        };
        self.fabric().peer(node)?.execute_once(sequence, resume)?;
        Ok(())
    }
}
