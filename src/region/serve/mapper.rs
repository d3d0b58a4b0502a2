// SPDX-License-Identifier: GPL-2.0

//! Requests served by a node as a mapper of a region: the node has the region open. The home sends them.
//!
//! # Operation
//!
//! The home invalidates mappings, quiesces and resumes the region around a migration, and notifies waiters of
//! granted locks and barriers.
//!
//! # Recovery
//!
//! An invalidation returns `EAGAIN` while an access of this node can still reach the memory, or a request to
//! a lender is outstanding, and the home retries it. Quiesce and resume are executed once by sequence number.

use super::{to_done, ControlServer};
use crate::region::map::local_mappings::LocalMappings;
use kernel::prelude::*;
use kite_core::{
    sync::ticket::AcquireReply,
    wire::{ControlReply, ControlRequest, InvalidateReason, MovedChunks},
};

impl ControlServer<'_> {
    /// Serves a request to a node that maps a region. Returns `None` for any other request.
    pub(super) fn serve_as_mapper(
        &self,
        request: &ControlRequest<'_>,
    ) -> Option<Result<ControlReply<'static>>> {
        let done = match *request {
            ControlRequest::InvalidateMapping { mapping, reason } => {
                self.serve_invalidate(mapping, reason)
            }
            ControlRequest::QuiesceRegion { sequence, region } => {
                self.serve_quiesce(sequence, region)
            }
            ControlRequest::ResumeRegion {
                sequence,
                region,
                ref moved,
            } => self.serve_resume(sequence, region, moved),
            ControlRequest::NotifyGranted { ticket, reply } => self.serve_granted(ticket, reply),
            _ => return None,
        };
        Some(done.map(to_done))
    }

    /// Invalidates a mapping of a region of the requesting home. On success, no access of this node reaches
    /// the region's memory any longer, and no request to the lenders is outstanding.
    ///
    /// # Errors
    ///
    /// - `EAGAIN`: not certain yet. Also returned while the home has an older view than this node: the home
    ///   must not request memory back from a lender that only this node has removed from its view.
    fn serve_invalidate(&self, mapping: u64, reason: InvalidateReason) -> Result {
        let found = self.service.mapping(mapping);
        let Some(found) = found.ok().filter(|found| found.home == self.node) else {
            return Ok(());
        };
        found.invalidate(reason);
        let is_drained = self.service.is_drained(&found) && self.check_requester_view().is_ok();
        is_drained.then_some(()).ok_or(EAGAIN)
    }

    /// Blocks accesses of this node to a region of the requesting home.
    ///
    /// # Errors
    ///
    /// - `EINPROGRESS`: an access is in progress, or a sent packet may still arrive. Also returned while the
    ///   home has an older view than this node: a lender that only this node has removed may still be written
    ///   to.
    fn serve_quiesce(&self, sequence: u64, region: u64) -> Result {
        let quiesce = || {
            self.local_mappings(region).try_quiesce()?;
            self.check_requester_view()?;
            Ok(0)
        };
        self.peer()?.execute_once(sequence, quiesce)?;
        Ok(())
    }

    /// Resumes accesses of this node to a region of the requesting home, with the new locations `moved`.
    fn serve_resume(&self, sequence: u64, region: u64, moved: &MovedChunks<'_>) -> Result {
        let resume = || {
            self.local_mappings(region).resume(moved.clone());
            Ok(0)
        };
        self.peer()?.execute_once(sequence, resume)?;
        Ok(())
    }

    /// Returns the mappings of a region of the requesting home.
    fn local_mappings(&self, region: u64) -> LocalMappings<'_> {
        LocalMappings::new(self.service, self.node, region)
    }

    /// Processes the notification of a home that a ticket was granted or a barrier was passed.
    fn serve_granted(&self, ticket: u64, reply: AcquireReply) -> Result {
        let home = self.service.cluster.instance_of(self.node)?;
        self.service.waiters().complete(home, ticket, reply);
        Ok(())
    }
}
