// SPDX-License-Identifier: GPL-2.0

//! Granting and revoking rights to a region (LITE, section 4: a master grants them, mastership too).
//!
//! The home keeps who has which. Handles of those who lost a right that they were mapped with end, as if
//! they had been given back; who revokes waits until nothing is done by them any more.

use super::{
    home::{
        reclaim::{WorkPriority, RETRY_MS},
        Grantee, Region,
    },
    map::Mapping,
    MemoryService,
};
use crate::{errno, fabric::peer::Peer, sys::deadline::Deadline};
use kernel::{
    prelude::*,
    sync::Arc,
    time::{delay::fsleep, Delta},
};
use kite_core::{
    rights::Rights,
    wire::{ControlRequest, InvalidateReason},
};

/// Who is to have which rights.
#[derive(Clone, Copy)]
pub(crate) struct GrantRequest {
    pub(crate) grantee: Grantee,
    pub(crate) rights: Rights,
    pub(crate) deadline: Deadline,
}

impl MemoryService {
    /// Changes the rights to a mapped region.
    ///
    /// # Errors
    ///
    /// As `struct kite_grant` in `include/uapi/kite.h` says.
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
                // If the handle was given back meanwhile, that is the reason.
                mapping.access().err().unwrap_or_else(errno::stale)
            } else {
                error
            }
        })
    }

    /// At the home: does so for one who has it mapped; if for a peer's request of that number, once.
    pub(super) fn set_rights(
        self: &Arc<Self>,
        mapper: (u32, u64),
        region: u64,
        grantee: Grantee,
        rights: Rights,
        requester: Option<(&Peer, u64)>,
    ) -> Result {
        let region = self.regions.get(region)?;
        // Before others of the peer wait for us.
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

    /// Whether all handles have ended whose rights were revoked, and those of dead nodes too.
    ///
    /// # Errors
    ///
    /// `EINPROGRESS` if not; `ENOENT` if there is no such region.
    pub(super) fn serve_revoke_status(&self, region: u64) -> Result {
        let has_revoked = self.regions.get(region)?.has_revoked_mappers();
        // Of a node that is out of the view nobody is revoking, and others may not have heard yet.
        let is_complete = !has_revoked && self.cluster.synced_epoch().is_some();
        is_complete.then_some(()).ok_or_else(errno::inprogress)
    }

    /// Ends the handles of a node whose rights were revoked, in the background. Others in the line do not wait
    /// for those that cannot be ended yet.
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
                    let invalidated = memory_service.request_invalidate(
                        instance,
                        mapping,
                        InvalidateReason::Revoked,
                    );
                    // What a dead node leaves behind ends when all have heard of its death.
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
