// SPDX-License-Identifier: GPL-2.0

//! Requests served by a node as the owner of names, and the state of view changes at all members.
//!
//! # Operation
//!
//! Requests register, unregister and look up names. After a view change, each reachable member sends this
//! node the names that this node owns, or announces the view without names. A member sends the names of its
//! own regions, and those of unreachable homes that it stores.
//!
//! # Recovery
//!
//! Until this node has received the names of all members, it registers no name, and a lookup of an absent
//! name fails with `EAGAIN`. A name that several members send is logged, and belongs to the oldest region.

use super::{to_done, ControlServer};
use crate::{
    errno::{TryError, TryResult},
    verbs::log::rnic_warn,
};
use kernel::prelude::*;
use kite_core::{
    name::Name,
    wire::{ControlReply, ControlRequest, NamedRegion, RegionNames},
};

impl ControlServer<'_> {
    /// Serves a request to the owner of a name. Returns `None` for any other request.
    pub(super) fn serve_as_name_owner(
        &self,
        request: &ControlRequest<'_>,
    ) -> Option<Result<ControlReply<'static>>> {
        let done = match *request {
            ControlRequest::RegisterName {
                name,
                region,
                created_at,
            } => self.serve_register_name(NamedRegion {
                name,
                created_at,
                home: self.node,
                region,
            }),
            ControlRequest::UnregisterName { name, region } => {
                let names = &self.service.cluster.names;
                names.unregister(&name, self.node, region);
                Ok(())
            }
            ControlRequest::LookupName { name } => return Some(self.serve_lookup(&name)),
            ControlRequest::SyncNames {
                epoch,
                is_last,
                ref names,
            } => self.serve_sync_names(epoch, is_last, names),
            _ => return None,
        };
        Some(done.map(to_done))
    }

    fn serve_register_name(&self, named: NamedRegion) -> Result {
        self.check_name_owner(&named.name)?;
        self.service.cluster.names.register(named)
    }

    fn serve_lookup(&self, name: &Name) -> Result<ControlReply<'static>> {
        if let Some(NamedRegion { home, region, .. }) = self.service.cluster.names.lookup(name) {
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
        let cluster = &self.service.cluster;
        let is_owner = cluster.name_owners(name)?.contains(cluster.local_node()?);
        if is_owner && cluster.synced_epoch().is_some() {
            Ok(())
        } else {
            Err(EAGAIN)
        }
    }

    /// Registers names of regions of the requesting home, and of homes that are unreachable. As of `epoch`,
    /// this node owns the names.
    fn serve_sync_names(&self, epoch: u64, is_last: bool, names: &RegionNames<'_>) -> Result {
        if !self.is_current_epoch(epoch)? {
            return Ok(());
        }
        let cluster = &self.service.cluster;
        for named in names.clone() {
            if named.home == self.node || self.is_unreachable(named.home) {
                self.register_synced_name(named)?;
            }
        }
        let instance = cluster.instance_of(self.node)?;
        if is_last && cluster.on_member_synced(instance, epoch) {
            self.service.on_view_synced();
        }
        Ok(())
    }

    /// Returns `true` if a node is an unreachable member.
    fn is_unreachable(&self, node: u32) -> bool {
        let cluster = &self.service.cluster;
        cluster.member_instance_of(node).is_ok() && cluster.instance_of(node).is_err()
    }

    /// Adds a region to those with its name.
    fn register_synced_name(&self, named: NamedRegion) -> Result {
        if !self.service.cluster.names.add(named)? {
            rnic_warn!(
                self.service.fabric().device(),
                "name {:?} of node {} belongs to an older region\n",
                named.name,
                named.home
            );
        }
        Ok(())
    }

    /// Returns `true` if `epoch` is the epoch of the current view.
    ///
    /// # Errors
    ///
    /// - [`TryError::WouldBlock`]: `epoch` belongs to a later view.
    fn is_current_epoch(&self, epoch: u64) -> TryResult<bool> {
        let own_epoch = self.service.cluster.epoch();
        if epoch > own_epoch {
            // The local daemon has not set that view yet.
            return Err(TryError::WouldBlock);
        }
        // An older epoch means a delayed repetition. The sender sends its names for the current view
        // separately.
        Ok(epoch == own_epoch)
    }
}
