// SPDX-License-Identifier: GPL-2.0

//! View changes and leaving the cluster, as they affect regions, loans and names.
//!
//! # Operation
//!
//! A view change first clears the state of removed nodes and then admits new ones. In the background, this
//! node then sends each member the names that the member owns from now on. This node also publishes its
//! directory entry at the directory replicas.
//!
//! # Recovery
//!
//! The loans of a dead home stay in quarantine until all members have synchronized the view. Names are sent
//! to a member only after packets sent in earlier views can no longer reach the member. So a synchronized
//! view implies that the memory can be freed.
//!
//! # Locking
//!
//! `view_change_lock` (mutex) is held by [`MemoryService::set_view`] and [`MemoryService::leave`]. The holder
//! sleeps: it flushes workqueues and waits for accesses.

use super::{home::waiters::remove_dead_waiters, MemoryService};
use crate::{
    bindings,
    cluster::{member_instance, NameEntry, DIRECTORY_REPLICAS},
    control::{
        client::ControlClient,
        retry::{retry_alloc, CONTROL_TIMEOUT_MS, DRAIN_POLL_MS, RETRY_MS},
    },
    fabric::{conn::credit::StaleQp, peer::Peer},
    sys::deadline::Deadline,
    trace,
    verbs::log::rnic_warn,
};
use kernel::{
    prelude::*,
    sync::Arc,
    time::{delay::fsleep, Delta},
};
use kite_core::{
    name_hash,
    view::NodeInstance,
    wire::{decode_control, ControlBody, ControlRequest, ListWriter, MAX_CONTROL_BYTES},
};

impl MemoryService {
    /// Changes the view. On return, removed nodes can no longer reach the memory of this node.
    ///
    /// # Errors
    ///
    /// See [`crate::cluster::Cluster::prepare_view`].
    pub(crate) fn set_view(
        self: &Arc<Self>,
        epoch: u64,
        members: &[bindings::kite_member],
    ) -> Result {
        let _changing = self.lock_view_changes();
        if self.cluster.epoch() == 0 {
            // A request served in the previous incarnation may have registered a name late.
            self.cluster.names.retain(|_, _| false);
        }
        let changed = self.change_view(epoch, members);
        self.destroy_removed_queues(|instance| !self.cluster.is_member(instance));
        changed
    }

    fn change_view(self: &Arc<Self>, epoch: u64, members: &[bindings::kite_member]) -> Result {
        let (removed, peers) = self.cluster.prepare_view(epoch, members)?;
        trace::view(epoch, members.len() as u32, removed.len() as u32);
        self.request_queue().flush();
        for peer in &removed {
            self.on_member_removed(peer.node(), epoch);
        }
        self.cluster.commit_view(peers);
        for member in members.iter().take(DIRECTORY_REPLICAS).map(member_instance) {
            self.announce_deferred(member, move |memory_service| {
                memory_service.publish_dc_address(member, epoch)
            });
        }
        let local_instance = self.cluster.instance_of(self.cluster.local_node()?)?;
        self.announce_deferred(local_instance, move |memory_service| {
            memory_service.sync_names(local_instance, epoch)
        });
        Ok(())
    }

    /// Runs `f` on the announcement queue of a node.
    fn announce_deferred(
        self: &Arc<Self>,
        member: NodeInstance,
        f: impl FnOnce(&Arc<Self>) + Send + 'static,
    ) {
        let memory_service = self.clone();
        let is_member = || self.cluster.is_member(member);
        self.announce_queues()
            .queue_work(member, is_member, move || f(&memory_service));
    }

    /// Publishes the directory entry of this node at a member, if the member is a directory replica. The
    /// entry is the DC address, or without DC the location of the MR table.
    fn publish_dc_address(self: &Arc<Self>, member: NodeInstance, epoch: u64) {
        let is_current =
            || self.cluster.epoch() == epoch && self.cluster.has_directory_replica(member);
        while is_current() {
            let Ok(entry) = self.cluster.local_directory_entry(epoch) else {
                // The DCT could not be created yet. Requeue: names in the same queue must not wait.
                fsleep(Delta::from_millis(RETRY_MS));
                return self.announce_deferred(member, move |memory_service| {
                    memory_service.publish_dc_address(member, epoch)
                });
            };
            let (request, deadline) = (
                ControlRequest::PublishAddress { entry },
                Deadline::after_ms(CONTROL_TIMEOUT_MS),
            );
            let answer = self.request(member.node, &request, deadline);
            match answer.map(|answer| answer.directory_addr()) {
                Ok(Ok((addr, buckets))) => return self.cluster.add_replica(member, addr, buckets),
                // The directory bucket of this node is full at the replica.
                Ok(Err(error)) if error == ENOMEM => return,
                _ => fsleep(Delta::from_millis(RETRY_MS)),
            }
        }
    }

    /// Clears the state that belongs to a removed node: mappings, loans, mappers and names.
    fn on_member_removed(&self, node: u32, epoch: u64) {
        for mapping in self.mappings().filter(|mapping| mapping.home == node) {
            mapping.on_home_died();
        }
        self.loans().quarantine_home(node, epoch);
        for region in self.regions() {
            region.remove_node_mappers(node);
        }
        self.cluster.names.retain(|_, entry| entry.home != node);
    }

    /// Sends all members, including this node, the names that each owns from now on. A member that owns no
    /// name receives a datagram instead, and so needs no connection to this node. The exception is a member
    /// to which packets of a failed QP may still arrive.
    fn sync_names(self: &Arc<Self>, local_instance: NodeInstance, epoch: u64) {
        while self
            .active_pushes()
            .involves_removed(|instance| self.cluster.is_member(instance))
        {
            if self.cluster.epoch() != epoch {
                return;
            }
            fsleep(Delta::from_millis(DRAIN_POLL_MS));
        }
        let (current_epoch, _, members) = retry_alloc(|| self.cluster.view());
        if current_epoch != epoch {
            return;
        }
        self.sync_names_to_self(local_instance, epoch);
        let owners = retry_alloc(|| self.members_owning_names(&members));
        let instances = members.iter().map(member_instance);
        for (member, owns_names) in instances
            .zip(owners)
            .filter(|(member, _)| *member != local_instance)
        {
            if owns_names || !self.is_peer_drained(member) {
                self.fabric().peers.announce_view(member, 0);
                self.announce_deferred(member, move |memory_service| {
                    memory_service.sync_names_to_peer(member, epoch)
                });
            } else {
                self.fabric().peers.announce_view(member, epoch);
            }
        }
    }

    /// Returns for each member whether the member owns a name of this node.
    fn members_owning_names(&self, members: &[bindings::kite_member]) -> Result<KVVec<bool>> {
        let mut owns = KVVec::from_elem(false, members.len(), GFP_KERNEL)?;
        let nodes = || members.iter().map(|member| member.node);
        for name in self.regions().filter_map(|region| region.published_name()) {
            let name_owner = name_hash::name_owner(&name, nodes());
            let index = nodes().position(|node| Some(node) == name_owner);
            if let Some(owns_name) = index.and_then(|index| owns.get_mut(index)) {
                *owns_name = true;
            }
        }
        Ok(owns)
    }

    fn sync_names_to_self(self: &Arc<Self>, local_instance: NodeInstance, epoch: u64) {
        let local_node = local_instance.node;
        self.cluster
            .names
            .retain(|name, _| self.cluster.name_owner(name) == Ok(local_node));
        self.register_own_names(local_node);
        if self.cluster.on_member_synced(local_instance, epoch) {
            self.on_view_synced();
        }
    }

    /// Registers the names of this node's regions that this node owns now.
    fn register_own_names(&self, local_node: u32) {
        for region in self.regions() {
            let Some(name) = region.published_name() else {
                continue;
            };
            if self.cluster.name_owner(&name) == Ok(local_node) {
                let entry = NameEntry {
                    home: local_node,
                    region: region.id,
                };
                if self.cluster.names.register(name, entry).is_err() {
                    rnic_warn!(
                        self.fabric().device(),
                        "name {name:?} belongs to another node now\n"
                    );
                }
                if region.published_name().is_none() {
                    // The region was freed meanwhile, perhaps before the name was registered.
                    self.cluster.names.unregister(&name, entry);
                }
            }
        }
    }

    fn sync_names_to_peer(self: &Arc<Self>, member: NodeInstance, epoch: u64) {
        let mut bytes = retry_alloc(|| Ok(KVec::from_elem(0u8, MAX_CONTROL_BYTES, GFP_KERNEL)?));
        let mut regions = self.regions().peekable();
        loop {
            let mut list = ListWriter::names(&mut bytes, 0, epoch, epoch);
            while let Some(region) = regions.peek() {
                let name = region
                    .published_name()
                    .filter(|name| self.cluster.name_owner(name) == Ok(member.node));
                let is_listed = name.is_none_or(|name| list.push((name, region.id)));
                if !is_listed {
                    break;
                }
                regions.next();
            }
            let last = regions.peek().is_none();
            list.set_last(last);
            let len = list.finish();
            if last {
                self.wait_peer_drained(member, epoch);
            }
            if self.cluster.epoch() != epoch {
                return;
            }
            self.send_encoded_names(member, epoch, &bytes[..len]);
            if last {
                return;
            }
        }
    }

    /// Waits until packets sent before the view of `epoch` can no longer reach `member`. When `member` has
    /// received the names of all nodes for that view, `member` frees memory lent to dead homes.
    fn wait_peer_drained(&self, member: NodeInstance, epoch: u64) {
        while !self.is_peer_drained(member) {
            if self.cluster.epoch() != epoch || !self.cluster.is_member(member) {
                return;
            }
            fsleep(Delta::from_millis(RETRY_MS));
        }
    }

    /// Returns `true` if no packet of a QP that has failed so far can still reach `member`.
    fn is_peer_drained(&self, member: NodeInstance) -> bool {
        let failures = retry_alloc(|| self.fabric().peers.stale_qps(member));
        failures.iter().all(StaleQp::is_fenced)
    }

    /// Sends encoded names, and repeats while the epoch is current. Regions freed meanwhile may have
    /// unregistered their names before the names arrived. So these names are unregistered again.
    fn send_encoded_names(self: &Arc<Self>, member: NodeInstance, epoch: u64, bytes: &[u8]) {
        let Ok((_, ControlBody::Request(request))) = decode_control(bytes) else {
            return;
        };
        self.request_while(member, &request, || self.cluster.epoch() == epoch);
        let ControlRequest::SyncNames { names, .. } = request else {
            return;
        };
        for (name, region) in names {
            let known = self.region(region).map(|region| region.published_name());
            if !matches!(known, Ok(Some(_))) {
                self.request_until_removed(
                    member,
                    &ControlRequest::UnregisterName { name, region },
                );
            }
        }
    }

    /// Leaves the cluster. Ends the mappings of this node, and frees its regions, loans and names.
    pub(crate) fn leave(self: &Arc<Self>) {
        let _changing = self.lock_view_changes();
        drop(self.cluster.leave());
        self.request_queue().flush();
        self.fabric().atomic_engine.close_qp();
        self.move_queue().flush();
        self.mappings().for_each(|mapping| mapping.on_home_died());
        self.cluster.names.retain(|_, _| false);
        while let Some(region) = self.region_at_or_after(0) {
            self.remove_region(region.id);
        }
        self.loans().clear();
        self.destroy_removed_queues(|_| true);
    }

    /// Waits until all requests received so far are served. After [`Self::leave`] the remaining ones have no
    /// effect.
    pub(crate) fn flush_requests(&self) {
        self.request_queue().flush();
    }

    /// Processes a peer's announcement of the view of `epoch` without names.
    pub(crate) fn on_view_announced(self: &Arc<Self>, from: &Peer, epoch: u64) {
        // If the local daemon has not set that view yet, the peer repeats the announcement.
        let own_epoch = self.cluster.epoch();
        if self.cluster.on_member_synced(from.instance(), epoch) {
            let memory_service = self.clone();
            self.request_queue()
                .spawn(move || memory_service.on_view_synced());
        }
        from.ack_view(epoch, own_epoch);
    }

    /// Frees the quarantined loans and the waiters of dead nodes, if all members have synchronized the
    /// current view.
    pub(in crate::region) fn on_view_synced(self: &Arc<Self>) {
        if let Some(epoch) = self.cluster.synced_epoch() {
            self.loans().free_quarantined(epoch);
            remove_dead_waiters(self);
        }
    }
}
