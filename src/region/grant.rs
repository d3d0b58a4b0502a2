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
//! Mappings of a removed or fenced node count as revoked only after all members have synchronized the view in
//! which the node was fenced.

use super::{
    home::{reclaim::request_invalidate, waiters::WaiterNotifier, Grantee, Region},
    map::Mapping,
    MemoryService,
};
use crate::{
    control::{client::ControlClient, priority::WorkPriority, retry::RETRY_MS},
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
    view::NodeInstance,
    wire::{ControlRequest, InvalidateReason},
};

/// Rights to set for one grantee.
#[derive(Clone, Copy)]
pub(crate) struct GrantRequest {
    pub(crate) grantee: Grantee,
    pub(crate) rights: Rights,
    pub(crate) deadline: Deadline,
}

impl GrantRequest {
    /// Sets the rights of the grantee to a mapped region, and waits until revoked mappings have ended.
    ///
    /// # Errors
    ///
    /// See `struct kite_grant` in `include/uapi/kite.h`.
    pub(crate) fn run(&self, service: &Arc<MemoryService>, mapping: &Arc<Mapping>) -> Result {
        let home = service.cluster.instance_of(mapping.home)?;
        mapping.wait_home(self.deadline)?;
        let result = self.set_at_home(service, mapping, home).and_then(|()| {
            let request = ControlRequest::RevokeStatus {
                region: mapping.region,
            };
            service
                .request_with_retry(home.node, &request, self.deadline)?
                .expect_done()
        });
        result.map_err(|error| mapping.convert_home_error(error))
    }

    fn set_at_home(
        &self,
        service: &Arc<MemoryService>,
        mapping: &Arc<Mapping>,
        home: NodeInstance,
    ) -> Result {
        let (region, rights) = (mapping.region, self.rights);
        if service.cluster.local_node()? == home.node {
            let change = RightsChange {
                mapper: (home.node, mapping.id),
                region,
                grantee: self.grantee,
                rights,
            };
            return change.apply(service, None);
        }
        let request = |sequence| ControlRequest::GrantRights {
            sequence,
            region,
            mapping: mapping.id,
            grantee: self.grantee.to_wire(),
            rights,
        };
        let guard = mapping.start_remote_request()?;
        let reply = service.request_once(guard, (home, 0), self.deadline, request);
        reply.and_then(|reply| reply.expect_done())
    }
}

/// Change of the rights to a region of this home on behalf of a mapper.
pub(super) struct RightsChange {
    /// Node and number of the mapping.
    pub(super) mapper: (u32, u64),
    pub(super) region: u64,
    pub(super) grantee: Grantee,
    pub(super) rights: Rights,
}

impl RightsChange {
    /// Sets the rights, and invalidates the mappings whose users have lost a right. A request of a peer is
    /// executed at most once by its sequence number.
    ///
    /// # Errors
    ///
    /// - `ENOENT`: the region does not exist.
    /// - Other errors: see [`Region::grant`] and [`Peer::execute_once`].
    pub(super) fn apply(
        &self,
        service: &Arc<MemoryService>,
        requester: Option<(&Peer, u64)>,
    ) -> Result {
        let region = service.region(self.region)?;
        // Allocate before `execute_once`: other requests of the peer wait for its lock.
        let reservation = region.reserve_acl_entry()?;
        let sequence = requester.map(|(peer, sequence)| (peer.instance(), sequence));
        let grant = (self.grantee, self.rights);
        let apply = || region.grant(self.mapper, sequence, grant, reservation);
        match requester {
            None => apply()?,
            Some((peer, sequence)) => peer
                .execute_once(sequence, || apply().map(|()| 0))
                .map(drop)?,
        }
        if region.mark_revoked() {
            WaiterNotifier::new(service, &region).notify_all();
            for node in region.mapper_nodes() {
                let region = region.clone();
                RevokedMappings { region, node }.invalidate_deferred(service);
            }
        }
        Ok(())
    }
}

/// Revoked mappings of a region of this home on one node.
struct RevokedMappings {
    region: Arc<Region>,
    node: u32,
}

impl RevokedMappings {
    fn is_empty(&self) -> bool {
        self.region.next_revoked_of(self.node, 0).is_none()
    }

    /// Invalidates the mappings on the workqueue of the node. If some cannot end yet, the work requeues
    /// itself, so other work of the queue is not delayed.
    fn invalidate_deferred(self, service: &Arc<MemoryService>) {
        if self.is_empty() {
            return;
        }
        let node = self.node;
        let invalidate = move |service: &Arc<MemoryService>, instance| {
            self.invalidate(service, instance);
            WaiterNotifier::new(service, &self.region).notify_all();
            if service.cluster.is_reachable(instance) && !self.is_empty() {
                fsleep(Delta::from_millis(RETRY_MS));
                self.invalidate_deferred(service);
            }
        };
        service.defer(node, WorkPriority::Foreground, invalidate);
    }

    /// Requests once that the node invalidate each mapping.
    fn invalidate(&self, service: &Arc<MemoryService>, instance: NodeInstance) {
        // The mapper chooses the IDs: an ID may be the largest number.
        let mut first = Some(0);
        while let Some(mapping) = first.and_then(|id| self.region.next_revoked_of(self.node, id)) {
            let reason = InvalidateReason::Revoked;
            let invalidated = request_invalidate(service, instance, mapping, reason);
            // The view change removes the mappings of a fenced node.
            if invalidated && service.cluster.is_reachable(instance) {
                self.region.unmap(self.node, mapping);
            }
            first = mapping.checked_add(1);
        }
    }
}
