// SPDX-License-Identifier: GPL-2.0

//! View changes and leaving the cluster, as they affect regions, loans and names.
//!
//! # Operation
//!
//! A view change first clears the state of removed and fenced nodes and then admits new ones. In the
//! background, this node then sends each member the names that the member owns from now on, and publishes its
//! directory entry at the directory replicas ([`super::view_announce`]). Mappings of regions of homes that
//! were fenced and admitted again are opened again ([`super::map::reopen`]).
//!
//! # Recovery
//!
//! The loans of a removed home stay in quarantine until all members have synchronized the view. The loans and
//! names of a fenced home remain, since the home still has its regions. Once the home is admitted again, it
//! sends its names.
//!
//! # Locking
//!
//! `view_change_lock` (mutex) is held by [`MemoryService::set_view`] and [`MemoryService::leave`]. The holder
//! sleeps: it flushes workqueues and waits for accesses.

use super::{
    home::waiters::remove_fenced_waiters, map::reopen::reopen_mappings,
    view_announce::ViewAnnouncement, MemoryService,
};
use crate::{
    bindings,
    cluster::{is_reachable, member_instance, DIRECTORY_REPLICAS},
    fabric::peer::Peer,
    trace,
};
use kernel::{prelude::*, sync::Arc};
use kite_core::view::NodeInstance;

impl MemoryService {
    /// Changes the view. On return, removed and unreachable nodes can no longer reach the memory of this node.
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
            self.cluster.names.retain(|_| false);
        }
        let view_change = ViewChange {
            service: self,
            epoch,
            members,
        };
        let changed = view_change.apply();
        self.destroy_removed_queues(|instance| !self.cluster.is_member(instance));
        changed
    }

    /// Leaves the cluster. Ends the mappings of this node, and frees its regions, loans and names.
    pub(crate) fn leave(self: &Arc<Self>) {
        let _changing = self.lock_view_changes();
        drop(self.cluster.leave());
        self.flush_requests();
        self.fabric().atomic_engine.close_qp();
        self.move_queue().flush();
        self.mappings().for_each(|mapping| mapping.on_home_died());
        self.cluster.names.retain(|_| false);
        while let Some(region) = self.region_at_or_after(0) {
            self.remove_region(region.id);
        }
        self.loans().clear();
        self.destroy_removed_queues(|_| true);
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

    /// Frees the quarantined loans and the waiters of removed and fenced nodes, if all members have
    /// synchronized the current view.
    pub(in crate::region) fn on_view_synced(self: &Arc<Self>) {
        if let Some(epoch) = self.cluster.synced_epoch() {
            self.loans().free_quarantined(epoch);
            remove_fenced_waiters(self);
        }
    }
}

/// Change of the view in progress.
struct ViewChange<'a> {
    service: &'a Arc<MemoryService>,
    epoch: u64,
    members: &'a [bindings::kite_member],
}

impl ViewChange<'_> {
    fn apply(&self) -> Result {
        let cluster = &self.service.cluster;
        let view = cluster.prepare_view(self.epoch, self.members)?;
        let member_count = self.members.len() as u32;
        let unreachable_count = member_count - self.reachable_instances().count() as u32;
        let removed_count = view.removed().len() as u32;
        trace::view(self.epoch, member_count, unreachable_count, removed_count);
        self.service.flush_requests();
        for removed in view.removed() {
            self.clear_removed(removed.node);
        }
        for &fenced in view.fenced() {
            self.clear_fenced(fenced);
        }
        for &admitted in view.admitted() {
            self.clear_names(admitted.node);
        }
        cluster.commit_view(view);
        for home in self.reachable_instances() {
            reopen_mappings(self.service, home);
        }
        self.announce()
    }

    /// Returns the reachable members.
    fn reachable_instances(&self) -> impl Iterator<Item = NodeInstance> + '_ {
        let reachable = self.members.iter().filter(|member| is_reachable(member));
        reachable.map(member_instance)
    }

    /// Clears the state that belongs to a removed node: mappings, loans, mappers and names.
    fn clear_removed(&self, node: u32) {
        let service = self.service;
        let mappings = service.mappings();
        for mapping in mappings.filter(|mapping| mapping.home == node) {
            mapping.on_home_died();
        }
        service.loans().quarantine_home(node, self.epoch);
        self.remove_mappers(node);
        self.clear_names(node);
    }

    /// Removes the names of regions of a home. A home that is admitted sends its names for this view, and may
    /// have freed or renamed some since the other nodes have stored them.
    fn clear_names(&self, home: u32) {
        let names = &self.service.cluster.names;
        names.retain(|named| named.home != home);
    }

    /// Clears the state that a fenced node establishes again once it is admitted: mappings and mappers.
    fn clear_fenced(&self, fenced: NodeInstance) {
        let service = self.service;
        let is_reachable = service.cluster.is_reachable(fenced);
        let mappings = service.mappings();
        for mapping in mappings.filter(|mapping| mapping.home_instance == fenced) {
            mapping.on_home_fenced(is_reachable);
        }
        self.remove_mappers(fenced.node);
    }

    fn remove_mappers(&self, node: u32) {
        for region in self.service.regions() {
            region.remove_node_mappers(node);
        }
    }

    /// Starts to announce the directory entry and the names of this node in the background.
    fn announce(&self) -> Result {
        for replica in self.reachable_instances().take(DIRECTORY_REPLICAS) {
            ViewAnnouncement::new(replica, self.epoch)
                .defer(self.service, ViewAnnouncement::publish_entry);
        }
        let cluster = &self.service.cluster;
        let local_instance = cluster.instance_of(cluster.local_node()?)?;
        ViewAnnouncement::new(local_instance, self.epoch)
            .defer(self.service, ViewAnnouncement::sync_names);
        Ok(())
    }
}
