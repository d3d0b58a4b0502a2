// SPDX-License-Identifier: GPL-2.0

//! View changes and leaving the cluster, as they affect regions, loans and names.
//!
//! # Operation
//!
//! A view change first clears the state of removed nodes and then admits new ones. In the background, this
//! node then sends each member the names that the member owns from now on, and publishes its directory entry
//! at the directory replicas ([`super::view_announce`]).
//!
//! # Recovery
//!
//! The loans of a dead home stay in quarantine until all members have synchronized the view.
//!
//! # Locking
//!
//! `view_change_lock` (mutex) is held by [`MemoryService::set_view`] and [`MemoryService::leave`]. The holder
//! sleeps: it flushes workqueues and waits for accesses.

use super::{home::waiters::remove_dead_waiters, view_announce::ViewAnnouncement, MemoryService};
use crate::{
    bindings,
    cluster::{member_instance, DIRECTORY_REPLICAS},
    fabric::peer::Peer,
    trace,
};
use kernel::{prelude::*, sync::Arc};

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

/// Change of the view in progress.
struct ViewChange<'a> {
    service: &'a Arc<MemoryService>,
    epoch: u64,
    members: &'a [bindings::kite_member],
}

impl ViewChange<'_> {
    fn apply(&self) -> Result {
        let cluster = &self.service.cluster;
        let (removed, peers) = cluster.prepare_view(self.epoch, self.members)?;
        trace::view(self.epoch, self.members.len() as u32, removed.len() as u32);
        self.service.request_queue().flush();
        for peer in &removed {
            self.clear_removed(peer.node());
        }
        cluster.commit_view(peers);
        self.announce()
    }

    /// Clears the state that belongs to a removed node: mappings, loans, mappers and names.
    fn clear_removed(&self, node: u32) {
        let service = self.service;
        let mappings = service.mappings();
        for mapping in mappings.filter(|mapping| mapping.home == node) {
            mapping.on_home_died();
        }
        service.loans().quarantine_home(node, self.epoch);
        for region in service.regions() {
            region.remove_node_mappers(node);
        }
        let names = &service.cluster.names;
        names.retain(|_, entry| entry.home != node);
    }

    /// Starts to announce the directory entry and the names of this node in the background.
    fn announce(&self) -> Result {
        let replicas = self.members.iter().take(DIRECTORY_REPLICAS);
        for replica in replicas.map(member_instance) {
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
