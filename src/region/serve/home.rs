// SPDX-License-Identifier: GPL-2.0

//! Requests served by a node as the home of a region.
//!
//! # Operation
//!
//! Requests map, unmap and free the region, grant rights, migrate and rename the region, and enqueue and remove
//! waiters. Requests that take long start the work and return: the requester retries a request to free, and polls
//! `ChangeStatus`.
//!
//! # Recovery
//!
//! A request to free starts the work or reports its progress with `EINPROGRESS`, and succeeds if the region
//! does not exist. Grants, migrations, renames and waiters are executed once by sequence number or ticket.

use super::{to_done, to_old_value, ControlServer};
use crate::{
    bindings,
    control::{
        priority::WorkPriority,
        reply_code::{errno_of, result_from_errno},
    },
    errno::{self, TryError},
    fabric::peer::Peer,
    region::grant::RightsChange,
    region::home::{
        change::RequestedChange,
        lock_table::{EnqueueRequest, WaitQueueKey, WaiterId},
        mappers::MapRequest,
        reclaim::Teardown,
        waiters::{WaiterNotifier, WaiterRemoval},
        Grantee, Region, RegionSpec,
    },
    sys::deadline::Deadline,
};
use kernel::prelude::*;
use kite_core::{
    sync::ticket::AcquireReply,
    wire::{ControlReply, ControlRequest, ListWriter, RegionInfo},
};

/// Returns the waiter of a peer with this ticket.
fn peer_waiter(peer: &Peer, ticket: u64) -> WaiterId {
    WaiterId {
        instance: peer.instance(),
        admission: peer.identity.admission,
        ticket,
    }
}

impl ControlServer<'_> {
    /// Serves a request to the home of a region. Returns `None` for any other request.
    pub(super) fn serve_as_home(
        &self,
        request: &ControlRequest<'_>,
    ) -> Option<Result<ControlReply<'static>>> {
        let done = match *request {
            ControlRequest::MapRegion {
                region,
                mapping,
                uid,
                rights,
            } => {
                let map_request = MapRequest {
                    node: self.node,
                    mapping,
                    rights,
                    uid,
                };
                return Some(self.serve_map(map_request, region));
            }
            ControlRequest::UnmapRegion { region, mapping } => self.serve_unmap(region, mapping),
            ControlRequest::FreeRegion { region, mapping } => self.serve_free(region, mapping),
            ControlRequest::GrantRights {
                sequence,
                region,
                mapping,
                grantee,
                rights,
            } => {
                let change = RightsChange {
                    mapper: (self.node, mapping),
                    region,
                    grantee: Grantee::from_wire(grantee),
                    rights,
                };
                self.serve_grant(sequence, &change)
            }
            ControlRequest::RevokeStatus { region } => self.serve_revoke_status(region),
            ControlRequest::MigrateRegion {
                sequence,
                region,
                mapping,
                token,
                timeout_ms,
                ref nodes,
            } => {
                let change = self.requested_change(mapping, region, token, timeout_ms);
                self.serve_change(sequence, || change.migrate(self.service, nodes.clone()))
            }
            ControlRequest::RenameRegion {
                sequence,
                region,
                mapping,
                token,
                timeout_ms,
                name,
            } => {
                let change = self.requested_change(mapping, region, token, timeout_ms);
                self.serve_change(sequence, || change.rename(self.service, name))
            }
            ControlRequest::ChangeStatus { region, token } => {
                self.serve_change_status(region, token)
            }
            ControlRequest::EnqueueWaiter {
                ticket,
                region,
                mapping,
                sync_id,
                kind,
                is_blocking,
            } => {
                let word = self.serve_enqueue(region, |peer| EnqueueRequest {
                    waiter_id: peer_waiter(peer, ticket),
                    mapping,
                    sync_id,
                    kind,
                    is_blocking,
                });
                return Some(word.map(to_old_value));
            }
            ControlRequest::RemoveWaiter {
                ticket,
                region,
                sync_id,
                kind,
                reason,
            } => {
                let removal = |peer: &Peer| WaiterRemoval {
                    region,
                    queue_key: WaitQueueKey::new(kind, sync_id),
                    waiter_id: peer_waiter(peer, ticket),
                    reason,
                };
                self.serve_remove_waiter(ticket, removal)
            }
            _ => return None,
        };
        Some(done.map(to_done))
    }

    fn serve_map(&self, request: MapRequest, region: u64) -> Result<ControlReply<'static>> {
        let region = self.service.region(region)?;
        region.map(request)?;
        let RegionSpec { layout, owner, .. } = region.spec;
        Ok(ControlReply::Mapped {
            len: layout.len(),
            shift: layout.shift(),
            owner_uid: owner,
            is_named: region.published_name().is_some(),
        })
    }

    fn serve_unmap(&self, region: u64, mapping: u64) -> Result {
        self.check_own_view()?;
        if let Ok(region) = self.service.region(region) {
            region.unmap(self.node, mapping);
            WaiterNotifier::new(self.service, &region).notify_all();
        }
        Ok(())
    }

    /// Starts freeing a region, or returns its progress. Memory of unreachable lenders is returned later.
    ///
    /// # Errors
    ///
    /// - `EINPROGRESS`: the region's memory may still be accessed. The requester must retry the request.
    /// - Other errors: see [`Region::start_free`].
    fn serve_free(&self, region: u64, mapping: u64) -> Result {
        let Ok(region) = self.service.region(region) else {
            return Ok(());
        };
        if region.start_free(self.node, mapping)? {
            Teardown::start_deferred(self.service, &region, WorkPriority::Foreground);
        }
        if region.has_access_ended() && self.has_unreachable_lender(&region) {
            return Ok(());
        }
        Err(TryError::InTransition.into())
    }

    fn has_unreachable_lender(&self, region: &Region) -> bool {
        let cluster = &self.service.cluster;
        let mut lenders = region.loans().map(|(lender, _)| lender);
        lenders.any(|lender| cluster.instance_of(lender).is_err())
    }

    fn serve_grant(&self, sequence: u64, change: &RightsChange) -> Result {
        let peer = self.peer()?;
        change.apply(self.service, Some((&peer, sequence)))
    }

    /// Checks that all revoked mappings have ended, including those of dead nodes.
    ///
    /// # Errors
    ///
    /// - `EINPROGRESS`: a revoked mapping remains, or not all members have synchronized the current view.
    /// - `ENOENT`: the region does not exist.
    fn serve_revoke_status(&self, region: u64) -> Result {
        let has_revoked = self.service.region(region)?.has_revoked_mappers();
        // Mappings of removed nodes are not counted, but members that have not synchronized the view may
        // still serve such a node.
        let is_complete = !has_revoked && self.service.cluster.synced_epoch().is_some();
        is_complete.then_some(()).ok_or_else(errno::inprogress)
    }

    /// Returns the change that a mapping of the requester requests.
    fn requested_change(
        &self,
        mapping: u64,
        region: u64,
        token: u64,
        timeout_ms: u32,
    ) -> RequestedChange {
        RequestedChange {
            mapper: (self.node, mapping),
            region,
            token,
            deadline: Deadline::after_ms(timeout_ms.min(bindings::KITE_TIMEOUT_MAX_MS)),
        }
    }

    /// Starts a change once.
    fn serve_change(&self, sequence: u64, start: impl FnOnce() -> Result) -> Result {
        let start = || Ok(start().err().map_or(0, errno_of));
        result_from_errno(self.peer()?.execute_once(sequence, start)?)
    }

    fn serve_change_status(&self, region: u64, token: u64) -> Result {
        self.service.region(region)?.change_result(self.node, token)
    }

    /// Adds a waiter of a peer. Returns the encoded reply.
    fn serve_enqueue(
        &self,
        region: u64,
        enqueue_request: impl FnOnce(&Peer) -> EnqueueRequest,
    ) -> Result<u64> {
        let peer = self.peer()?;
        let enqueue_request = enqueue_request(&peer);
        let reply = enqueue_request.execute(self.service, region, Some(&peer))?;
        Ok(reply.to_word())
    }

    /// Removes the waiter of a peer's ticket, and rejects a delayed request for the same ticket.
    fn serve_remove_waiter(
        &self,
        ticket: u64,
        removal: impl FnOnce(&Peer) -> WaiterRemoval,
    ) -> Result {
        let peer = self.peer()?;
        // If the request was executed before, this has no effect, and the waiter is removed below.
        let _ = peer.execute_once(ticket, || Ok(AcquireReply::Canceled.to_word()));
        removal(&peer).execute(self.service)
    }

    /// Encodes the locations of the chunks of a region, starting at `first_chunk`.
    pub(super) fn write_locations(
        &self,
        region: u64,
        first_chunk: u32,
        out: &mut [u8],
    ) -> Result<usize> {
        let (region, reply_header) = (self.service.region(region)?, self.reply_header());
        let mut list =
            ListWriter::chunk_locations(out, reply_header.request_id, reply_header.epoch);
        region.with_placement(|placement| {
            let mut remaining = placement.locations().iter().skip(first_chunk as usize);
            // The list ends early if the message is full: the requester asks for the next chunks.
            let _ = remaining.all(|&chunk| list.push(chunk));
        });
        Ok(list.finish())
    }

    /// Encodes up to `limit` named regions of this node, starting at number `cursor`.
    pub(super) fn write_region_list(&self, cursor: u64, limit: u32, out: &mut [u8]) -> usize {
        let reply_header = self.reply_header();
        let mut list = ListWriter::regions(out, reply_header.request_id, reply_header.epoch);
        let (mut next, mut remaining) = (cursor, limit);
        while remaining != 0 {
            let Some(region) = self.service.region_at_or_after(next) else {
                break;
            };
            if let Some(entry) = Self::list_entry(&region) {
                if !list.push(entry) {
                    break;
                }
                remaining -= 1;
            }
            next = region.id + 1;
        }
        list.set_cursor(next);
        list.finish()
    }

    fn list_entry(region: &Region) -> Option<RegionInfo> {
        let name = region.published_name()?;
        let spec = &region.spec;
        Some(RegionInfo {
            name,
            region: region.id,
            created_at: spec.created_at,
            len: spec.layout.len(),
            owner_uid: spec.owner,
            other_rights: region.other_rights(),
            mapping_count: region.mapping_count(),
        })
    }
}
