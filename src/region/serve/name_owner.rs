// SPDX-License-Identifier: GPL-2.0

//! Requests served by a node as the owner of names, and the state of view changes at all members.
//!
//! # Operation
//!
//! Requests register, unregister and look up names. After a view change, each member sends this node the
//! names of its regions that this node owns, or announces the view without names.
//!
//! # Recovery
//!
//! Until this node has received the names of all members, it registers no name, and a lookup of an absent
//! name fails with `EAGAIN`. A name that two members register is logged, and the first registration stays.

use super::to_done;
use crate::verbs::log::rnic_warn;
use crate::{
    cluster::NameEntry,
    errno::{TryError, TryResult},
    fabric::peer::Peer,
    region::MemoryService,
};
use kernel::{prelude::*, sync::Arc};
use kite_core::{
    name::Name,
    wire::{ControlReply, ControlRequest, RegionNames},
};

impl MemoryService {
    /// Serves a request to the owner of a name. Returns `None` for any other request.
    pub(super) fn serve_as_name_owner(
        self: &Arc<Self>,
        node: u32,
        request: &ControlRequest<'_>,
    ) -> Option<Result<ControlReply<'static>>> {
        let done = match *request {
            ControlRequest::RegisterName { name, region } => {
                self.serve_register_name(name, NameEntry { home: node, region })
            }
            ControlRequest::UnregisterName { name, region } => {
                let entry = NameEntry { home: node, region };
                self.cluster.names.unregister(&name, entry);
                Ok(())
            }
            ControlRequest::LookupName { name } => return Some(self.serve_lookup(&name)),
            ControlRequest::SyncNames {
                epoch,
                is_last,
                ref names,
            } => self.serve_sync_names(node, epoch, is_last, names),
            _ => return None,
        };
        Some(done.map(to_done))
    }

    fn serve_register_name(&self, name: Name, entry: NameEntry) -> Result {
        self.check_name_owner(&name)?;
        self.cluster.names.register(name, entry)
    }

    fn serve_lookup(&self, name: &Name) -> Result<ControlReply<'static>> {
        if let Some(NameEntry { home, region }) = self.cluster.names.lookup(name) {
            return Ok(ControlReply::NameFound { home, region });
        }
        self.check_name_owner(name)?;
        Err(ENOENT)
    }

    /// Checks that this node owns `name`, and has received all names of the current view.
    ///
    /// # Errors
    ///
    /// - `EAGAIN`: not yet, or another node is the owner.
    fn check_name_owner(&self, name: &Name) -> Result {
        let is_owner = self.cluster.name_owner(name)? == self.cluster.local_node()?;
        if is_owner && self.cluster.synced_epoch().is_some() {
            Ok(())
        } else {
            Err(EAGAIN)
        }
    }

    /// Registers names of regions of home `node`. As of `epoch`, this node owns the names.
    fn serve_sync_names(
        self: &Arc<Self>,
        node: u32,
        epoch: u64,
        is_last: bool,
        names: &RegionNames<'_>,
    ) -> Result {
        if !self.is_current_epoch(epoch)? {
            return Ok(());
        }
        for (name, region) in names.clone() {
            let registered = self
                .cluster
                .names
                .register(name, NameEntry { home: node, region });
            if registered == Err(EEXIST) {
                rnic_warn!(
                    self.fabric().device(),
                    "name {name:?} of node {node} is registered by another node\n"
                );
            } else {
                registered?;
            }
        }
        let instance = self.cluster.instance_of(node)?;
        if is_last && self.cluster.on_member_synced(instance, epoch) {
            self.on_view_synced();
        }
        Ok(())
    }

    /// Returns `true` if `epoch` is the epoch of the current view.
    ///
    /// # Errors
    ///
    /// - [`TryError::WouldBlock`]: `epoch` belongs to a later view.
    fn is_current_epoch(&self, epoch: u64) -> TryResult<bool> {
        if epoch > self.cluster.epoch() {
            // The local daemon has not set that view yet.
            return Err(TryError::WouldBlock);
        }
        // An older epoch means a delayed repetition. The sender sends its names for the current view
        // separately.
        Ok(epoch == self.cluster.epoch())
    }

    /// Processes a peer's announcement of the view of `epoch` without names.
    pub(crate) fn on_view_announced(self: &Arc<Self>, from: &Peer, epoch: u64) {
        // If the local daemon has not set that view yet, the peer repeats the announcement.
        let own_epoch = self.cluster.epoch();
        if self.cluster.on_member_synced(from.instance(), epoch) {
            let memory_service = self.clone();
            self.request_queue
                .spawn(move || memory_service.on_view_synced());
        }
        from.ack_view(epoch, own_epoch);
    }

    /// Frees the quarantined loans and the waiters of dead nodes, if all members have synchronized the
    /// current view.
    pub(in crate::region) fn on_view_synced(self: &Arc<Self>) {
        if let Some(epoch) = self.cluster.synced_epoch() {
            self.loans.free_quarantined(epoch);
            self.remove_dead_waiters();
        }
    }
}
