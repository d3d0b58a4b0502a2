// SPDX-License-Identifier: GPL-2.0

//! Granting and revoking rights to a region (LITE, section 4: masters grant rights, including mastership).
//!
//! # Operation
//!
//! The home stores the rights per user. If a user loses a right, the home invalidates the user's mappings
//! that have this right: the handles end with `EACCES`. The revoking caller waits until no access through
//! these mappings can take effect any longer.
//!
//! # Recovery
//!
//! Mappings of a dead node count as revoked only after all members have synchronized the view without that
//! node.

use super::{
    home::{reclaim::request_invalidate, Grantee, Region},
    map::Mapping,
    MemoryService,
};
use crate::{
    control::{client::ControlClient, priority::WorkPriority, retry::RETRY_MS},
    errno,
    fabric::peer::Peer,
    sys::deadline::Deadline,
};
use kernel::{
    prelude::*,
    sync::Arc,
    time::{delay::fsleep, Delta},
};
use kite_core::{
    rights::Rights,
    wire::{ControlRequest, InvalidateReason},
};

/// Rights to set for one grantee.
#[derive(Clone, Copy)]
pub(crate) struct GrantRequest {
    pub(crate) grantee: Grantee,
    pub(crate) rights: Rights,
    pub(crate) deadline: Deadline,
}

impl MemoryService {
    /// Sets the rights of a grantee to a mapped region, and waits until revoked mappings have ended.
    ///
    /// # Errors
    ///
    /// See `struct kite_grant` in `include/uapi/kite.h`.
    pub(crate) fn grant_rights(
        self: &Arc<Self>,
        mapping: &Arc<Mapping>,
        grant: &GrantRequest,
    ) -> Result {
        let home = self.cluster.instance_of(mapping.home)?;
        drop(mapping.access()?);
        let region = mapping.region;
        let done = if self.cluster.local_node()? == home.node {
            self.set_rights(
                (home.node, mapping.id),
                region,
                grant.grantee,
                grant.rights,
                None,
            )
        } else {
            let request = |sequence| ControlRequest::GrantRights {
                sequence,
                region,
                mapping: mapping.id,
                grantee: grant.grantee.to_wire(),
                rights: grant.rights,
            };
            let request_guard = mapping.start_remote_request()?;
            let answer =
                self.request_exactly_once(request_guard, (home, 0), grant.deadline, request);
            answer.and_then(|answer| answer.expect_done())
        };
        let result = done.and_then(|()| {
            let request = ControlRequest::RevokeStatus { region };
            self.request_with_retry(home.node, &request, grant.deadline)?
                .expect_done()
        });
        result.map_err(|error| {
            if error == ENOENT {
                // If the handle was closed meanwhile, report that cause.
                mapping.access().err().unwrap_or_else(errno::stale)
            } else {
                error
            }
        })
    }

    /// Sets rights at the home on behalf of a mapper. A request of a peer is executed exactly once by its
    /// sequence number.
    pub(super) fn set_rights(
        self: &Arc<Self>,
        mapper: (u32, u64),
        region: u64,
        grantee: Grantee,
        rights: Rights,
        requester: Option<(&Peer, u64)>,
    ) -> Result {
        let region = self.region(region)?;
        // Allocate before `execute_once`: other requests of the peer wait for its lock.
        let reservation = region.reserve_acl_entry()?;
        let sequence = requester.map(|(peer, sequence)| (peer.instance(), sequence));
        let apply = || region.grant(mapper, sequence, (grantee, rights), reservation);
        match requester {
            None => apply()?,
            Some((peer, sequence)) => peer
                .execute_once(sequence, || apply().map(|()| 0))
                .map(drop)?,
        }
        if region.mark_revoked() {
            self.notify_granted(&region, None);
            for node in region.mapper_nodes() {
                self.invalidate_revoked_deferred(node, region.clone());
            }
        }
        Ok(())
    }

    /// Checks that all revoked mappings have ended, including those of dead nodes.
    ///
    /// # Errors
    ///
    /// - `EINPROGRESS`: a revoked mapping remains, or not all members have synchronized the current view.
    /// - `ENOENT`: the region does not exist.
    pub(super) fn serve_revoke_status(&self, region: u64) -> Result {
        let has_revoked = self.region(region)?.has_revoked_mappers();
        // Mappings of removed nodes are not counted, but members that have not synchronized the view may
        // still serve such a node.
        let is_complete = !has_revoked && self.cluster.synced_epoch().is_some();
        is_complete.then_some(()).ok_or_else(errno::inprogress)
    }

    /// Invalidates the revoked mappings of a node on its workqueue. If some cannot end yet, the work requeues
    /// itself, so other work of the queue is not delayed.
    fn invalidate_revoked_deferred(self: &Arc<Self>, node: u32, region: Arc<Region>) {
        if region.next_revoked_of(node, 0).is_none() {
            return;
        }
        self.defer(
            node,
            WorkPriority::Foreground,
            move |memory_service, instance| {
                let mut next = 0;
                while let Some(mapping) = region.next_revoked_of(instance.node, next) {
                    let invalidated = request_invalidate(
                        memory_service,
                        instance,
                        mapping,
                        InvalidateReason::Revoked,
                    );
                    // Mappings of a dead node end when all members have synchronized the view.
                    if invalidated && memory_service.cluster.is_member(instance) {
                        region.unmap(instance.node, mapping);
                    }
                    next = mapping + 1;
                }
                memory_service.notify_granted(&region, None);
                if !memory_service.cluster.is_member(instance) {
                    return;
                }
                if region.next_revoked_of(instance.node, 0).is_some() {
                    fsleep(Delta::from_millis(RETRY_MS));
                    memory_service.invalidate_revoked_deferred(instance.node, region);
                }
            },
        );
    }
}
