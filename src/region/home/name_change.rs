// SPDX-License-Identifier: GPL-2.0

//! Registration of the name of a region: of a new region, or in place of another name.
//!
//! # Operation
//!
//! The name is registered at its owners, then published: from then on each view change sends the name to its
//! owners, beside the name that it replaces. The commit under `Region::state` makes the name that of the
//! region. Afterwards the replaced name is unregistered.
//!
//! # Recovery
//!
//! - An owner rejects the name, or no owner replies before the deadline: the region keeps its name, and the
//!   new name is unregistered.
//! - The view changes during the registration: the name is registered at its owners of the new view, too.
//! - An owner of the replaced name is not reachable: it drops the name when it is admitted again, since this
//!   home sends its names then.
//! - This home becomes unreachable: it continues with the owners that it reaches, and sends its names when it is
//!   admitted again. If this home is removed, its regions and names end.

use super::Region;
use crate::{
    control::client::ControlClient,
    errno,
    region::MemoryService,
    sys::deadline::{retry_until, Deadline},
};
use kernel::{prelude::*, sync::Arc};
use kite_core::{name::Name, wire::ControlRequest};

/// Change of the name of a region of this home.
pub(in crate::region) struct NameChange<'a> {
    pub(in crate::region) service: &'a Arc<MemoryService>,
    pub(in crate::region) region: &'a Region,
    pub(in crate::region) name: Name,
    pub(in crate::region) deadline: Deadline,
}

impl NameChange<'_> {
    /// Gives a new region its name. After an error the teardown of the region unregisters the name.
    ///
    /// # Errors
    ///
    /// - `EEXIST`: the name belongs to another region.
    /// - `ESTALE`: the region is being freed.
    /// - See also [`retry_until`] and [`ControlClient::request`].
    pub(in crate::region) fn name_new(&self) -> Result {
        self.region.with_names(|names| names.begin(self.name));
        self.register()?;
        self.region.with_names(|names| names.commit());
        Ok(())
    }

    /// Renames a region. After an error the region has its old name.
    ///
    /// # Errors
    ///
    /// - `EINVAL`: the region is anonymous.
    /// - `EBUSY`: the region is being created.
    /// - Other errors: see [`Self::name_new`].
    pub(in crate::region) fn rename(&self) -> Result {
        self.region.start_rename(self.name)?;
        let registered = self.register();
        let unused = self.region.with_names(|names| match registered {
            Ok(()) => names.commit(),
            Err(_) => names.abort(),
        });
        if let Some(unused) = unused {
            self.unregister(unused);
        }
        registered
    }

    /// Registers the name at its owners, and publishes it.
    fn register(&self) -> Result {
        let request = ControlRequest::RegisterName {
            name: self.name,
            region: self.region.id,
            created_at: self.region.spec.created_at,
        };
        let (service, cluster) = (self.service, &self.service.cluster);
        loop {
            let epoch = cluster.epoch();
            retry_until(self.deadline, || {
                if self.region.is_freeing() {
                    return Err(errno::stale().into());
                }
                let owners = cluster.name_owners(&self.name)?;
                // The primary comes first: of two nodes with one name, the primary rejects one.
                for owner in [Some(owners.primary), owners.backup].into_iter().flatten() {
                    let reply = service.request(owner, &request, self.deadline)?;
                    reply.expect_done()?;
                }
                Ok(())
            })?;
            self.region.with_names(|names| names.set_registered());
            // From now on, each view change sends the name to its new owners. Repeat if one was missed.
            if cluster.epoch() == epoch {
                return Ok(());
            }
        }
    }

    /// Unregisters a name that is not published any longer at its owners, at the backup first: a name that is
    /// free at the primary can be registered again. Repeats if the view, and so perhaps an owner, changes
    /// meanwhile.
    fn unregister(&self, name: Name) {
        let (service, cluster) = (self.service, &self.service.cluster);
        let region = self.region.id;
        let request = ControlRequest::UnregisterName { name, region };
        loop {
            let epoch = cluster.epoch();
            let Ok(owners) = cluster.name_owners(&name) else {
                return;
            };
            for owner in [owners.backup, Some(owners.primary)].into_iter().flatten() {
                if let Ok(instance) = cluster.instance_of(owner) {
                    service.request_while_reachable(instance, &request);
                }
            }
            if cluster.epoch() == epoch {
                return;
            }
        }
    }
}
