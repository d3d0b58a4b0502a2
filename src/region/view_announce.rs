// SPDX-License-Identifier: GPL-2.0

//! Announcements to the members after a view change: names of regions, and the directory entry of this node.
//!
//! # Operation
//!
//! Each announcement runs on the announcement queue of its member. The announcement to this node starts those
//! to the other reachable members. A member that owns no name of this node receives a datagram instead, and
//! so needs no connection to this node.
//!
//! # Recovery
//!
//! An announcement ends when the epoch is not current any longer: the next view change starts new ones. The
//! last list of names is sent to a member only after packets sent in earlier views can no longer reach the
//! member. So a synchronized view implies that the memory lent to removed homes can be freed.
//!
//! An unreachable home cannot send its names. Each node that stores such a name keeps the name, also if the
//! node owns it no longer, and sends it to the owners ([`ViewAnnouncement::orphaned_names`]).

use super::MemoryService;
use crate::{
    bindings,
    cluster::{is_reachable, member_instance},
    control::{
        client::ControlClient,
        retry::{retry_alloc, CONTROL_TIMEOUT_MS, DRAIN_POLL_MS, RETRY_MS},
    },
    fabric::conn::credit::StaleQp,
    sys::deadline::Deadline,
    verbs::log::rnic_warn,
};
use kernel::{
    prelude::*,
    sync::Arc,
    time::{delay::fsleep, Delta},
};
use kite_core::{
    name::Name,
    view::NodeInstance,
    wire::{
        decode_control, ControlBody, ControlRequest, ListWriter, NamedRegion, MAX_CONTROL_BYTES,
    },
};

/// Announcement to one member in the view of one epoch.
#[derive(Clone, Copy)]
pub(super) struct ViewAnnouncement {
    member: NodeInstance,
    epoch: u64,
}

impl ViewAnnouncement {
    /// Prepares an announcement.
    pub(super) fn new(member: NodeInstance, epoch: u64) -> Self {
        Self { member, epoch }
    }

    /// Runs `f` on the announcement queue of the member.
    pub(super) fn defer(self, service: &Arc<MemoryService>, f: fn(Self, &Arc<MemoryService>)) {
        let worker_service = service.clone();
        let is_member = || service.cluster.is_member(self.member);
        service
            .announce_queues()
            .queue_work(self.member, is_member, move || f(self, &worker_service));
    }

    /// Returns `true` if the view has not changed since.
    fn is_current(self, service: &MemoryService) -> bool {
        service.cluster.epoch() == self.epoch
    }

    /// Publishes the directory entry of this node at the member, if the member is a directory replica. The
    /// entry is the DC address, or without DC the location of the MR table.
    pub(super) fn publish_entry(self, service: &Arc<MemoryService>) {
        let cluster = &service.cluster;
        while self.is_current(service) && cluster.has_directory_replica(self.member) {
            let Ok(entry) = cluster.local_directory_entry(self.epoch) else {
                // The DCT could not be created yet. Requeue: names in the same queue must not wait.
                fsleep(Delta::from_millis(RETRY_MS));
                return self.defer(service, Self::publish_entry);
            };
            let request = ControlRequest::PublishAddress { entry };
            let deadline = Deadline::after_ms(CONTROL_TIMEOUT_MS);
            let reply = service.request(self.member.node, &request, deadline);
            match reply.map(|reply| reply.directory_addr()) {
                Ok(Ok((addr, buckets))) => return cluster.add_replica(self.member, addr, buckets),
                // The directory bucket of this node is full at the replica.
                Ok(Err(error)) if error == ENOMEM => return,
                _ => fsleep(Delta::from_millis(RETRY_MS)),
            }
        }
    }

    /// Sends all reachable members the names that each owns from now on. The member of this announcement is
    /// this node.
    pub(super) fn sync_names(self, service: &Arc<MemoryService>) {
        while service.active_pushes().involves_fenced(&service.cluster) {
            if !self.is_current(service) {
                return;
            }
            fsleep(Delta::from_millis(DRAIN_POLL_MS));
        }
        let (current_epoch, _, members) = retry_alloc(|| service.cluster.view());
        if current_epoch != self.epoch {
            return;
        }
        self.keep_own_names(service);
        let owners = retry_alloc(|| members_owning_names(service, &members));
        for (member, owns_name) in members.iter().zip(owners) {
            let instance = member_instance(member);
            if is_reachable(member) && instance != self.member {
                Self::new(instance, self.epoch).start(service, owns_name);
            }
        }
    }

    /// Sends the member its names in the background, or a datagram if the member owns none. The exception is
    /// a member to which packets of a failed QP may still arrive.
    fn start(self, service: &Arc<MemoryService>, owns_names: bool) {
        if owns_names || !self.is_peer_drained(service) {
            service.fabric().peers.announce_view(self.member, 0);
            self.defer(service, Self::send_names);
        } else {
            service
                .fabric()
                .peers
                .announce_view(self.member, self.epoch);
        }
    }

    /// Removes the names that this node does not own any longer, except those of unreachable homes, and
    /// registers those of its own regions.
    fn keep_own_names(self, service: &Arc<MemoryService>) {
        let (cluster, local_node) = (&service.cluster, self.member.node);
        let is_owned = |name: &Name| owns_name(service, local_node, name);
        let is_orphaned = |named: &NamedRegion| cluster.instance_of(named.home).is_err();
        cluster
            .names
            .retain(|named| is_owned(&named.name) || is_orphaned(named));
        for named in local_names(service).filter(|named| is_owned(&named.name)) {
            let NamedRegion {
                name, home, region, ..
            } = named;
            if !retry_alloc(|| cluster.names.add(named)) {
                rnic_warn!(
                    service.fabric().device(),
                    "name {name:?} belongs to an older region of another node\n"
                );
            }
            if !is_published(service, &named) {
                // The region was freed or renamed meanwhile, perhaps before the name was added.
                cluster.names.unregister(&name, home, region);
            }
        }
        if cluster.on_member_synced(self.member, self.epoch) {
            service.on_view_synced();
        }
    }

    /// Sends the member its names.
    fn send_names(self, service: &Arc<MemoryService>) {
        let mut bytes = retry_alloc(|| Ok(KVec::from_elem(0u8, MAX_CONTROL_BYTES, GFP_KERNEL)?));
        let orphaned = retry_alloc(|| self.orphaned_names(service));
        let mut names = Iterator::chain(local_names(service), orphaned).peekable();
        loop {
            let mut list = ListWriter::names(&mut bytes, 0, self.epoch, self.epoch);
            while let Some(named) = names.peek() {
                let is_owned = owns_name(service, self.member.node, &named.name);
                if is_owned && !list.push(*named) {
                    break;
                }
                names.next();
            }
            let last = names.peek().is_none();
            list.set_last(last);
            let len = list.finish();
            if last {
                self.wait_peer_drained(service);
            }
            if !self.is_current(service) {
                return;
            }
            self.send_encoded_names(service, &bytes[..len]);
            if last {
                return;
            }
        }
    }

    /// Returns the names that this node stores and whose homes are unreachable, for the member as their owner.
    fn orphaned_names(self, service: &MemoryService) -> Result<KVVec<NamedRegion>> {
        let mut orphaned = KVVec::new();
        let cluster = &service.cluster;
        cluster.names.for_each(|named| {
            let is_orphaned = cluster.instance_of(named.home).is_err();
            if is_orphaned && owns_name(service, self.member.node, &named.name) {
                orphaned.push(*named, GFP_KERNEL)?;
            }
            Ok(())
        })?;
        Ok(orphaned)
    }

    /// Waits until packets sent before the view can no longer reach the member. When the member has received
    /// the names of all nodes for the view, the member frees memory lent to dead homes.
    fn wait_peer_drained(self, service: &MemoryService) {
        while !self.is_peer_drained(service) {
            if !self.is_current(service) || !service.cluster.is_reachable(self.member) {
                return;
            }
            fsleep(Delta::from_millis(RETRY_MS));
        }
    }

    /// Returns `true` if no packet of a QP that has failed so far can still reach the member.
    fn is_peer_drained(self, service: &MemoryService) -> bool {
        let failures = retry_alloc(|| service.fabric().peers.stale_qps(self.member));
        failures.iter().all(StaleQp::is_fenced)
    }

    /// Sends encoded names, and repeats while the epoch is current. Regions freed or renamed meanwhile may have
    /// unregistered their names before the names arrived. So these names are unregistered again.
    fn send_encoded_names(self, service: &Arc<MemoryService>, bytes: &[u8]) {
        let Ok((_, ControlBody::Request(request))) = decode_control(bytes) else {
            return;
        };
        let is_needed = || self.is_current(service) && service.cluster.is_reachable(self.member);
        service.request_while(self.member, &request, is_needed);
        let ControlRequest::SyncNames { names, .. } = request else {
            return;
        };
        let local_node = service.cluster.local_node();
        let is_unused =
            |named: &NamedRegion| Ok(named.home) == local_node && !is_published(service, named);
        for named in names.filter(is_unused) {
            let NamedRegion {
                name,
                region,
                created_at,
                ..
            } = named;
            let request = ControlRequest::UnregisterName { name, region };
            service.request_while_reachable(self.member, &request);
            if is_published(service, &named) {
                // Renamed back meanwhile: the request may have removed the new registration.
                let request = ControlRequest::RegisterName {
                    name,
                    region,
                    created_at,
                };
                service.request_while_reachable(self.member, &request);
            }
        }
    }
}

/// Returns `true` if a node owns a name.
fn owns_name(service: &MemoryService, node: u32, name: &Name) -> bool {
    let owners = service.cluster.name_owners(name);
    owners.is_ok_and(|owners| owners.contains(node))
}

/// Returns `true` if a region of this home still has its name.
fn is_published(service: &MemoryService, named: &NamedRegion) -> bool {
    let region = service.region(named.region);
    region.is_ok_and(|region| region.published_names().any(|name| name == named.name))
}

/// Returns the named regions of this home. A region that is being renamed has two names.
fn local_names(service: &MemoryService) -> impl Iterator<Item = NamedRegion> + '_ {
    let home = service.cluster.local_node().unwrap_or(0);
    service.regions().flat_map(move |region| {
        let names = region.published_names();
        names.map(move |name| NamedRegion {
            name,
            created_at: region.spec.created_at,
            home,
            region: region.id,
        })
    })
}

/// Returns for each member whether this node must send it a name: of a region of this home, or of an
/// unreachable home.
fn members_owning_names(
    service: &MemoryService,
    members: &[bindings::kite_member],
) -> Result<KVVec<bool>> {
    let mut owns = KVVec::from_elem(false, members.len(), GFP_KERNEL)?;
    let mut add = |name: &Name| {
        let Ok(owners) = service.cluster.name_owners(name) else {
            return;
        };
        for owner in [Some(owners.primary), owners.backup].into_iter().flatten() {
            let index = members.binary_search_by_key(&owner, |member| member.node);
            if let Some(owns_name) = index.ok().and_then(|index| owns.get_mut(index)) {
                *owns_name = true;
            }
        }
    };
    local_names(service).for_each(|named| add(&named.name));
    service.cluster.names.for_each(|named| {
        if service.cluster.instance_of(named.home).is_err() {
            add(&named.name);
        }
        Ok(())
    })?;
    Ok(owns)
}
