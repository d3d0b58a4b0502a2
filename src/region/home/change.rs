// SPDX-License-Identifier: GPL-2.0

//! Changes of a region that its home makes in the background on request of a master: migrations and renames.
//!
//! # Operation
//!
//! A [`ChangeRequest`] starts the change at the home, by a request that is executed once. The home runs the
//! change on `move_queue`, one at a time for each region. The requester chooses a token, by which it then
//! requests the result until the change has ended.
//!
//! # Recovery
//!
//! The home ends a change at its deadline. If the requester does not receive the result, the change continues.
//! A region that is freed meanwhile is torn down after the end of the change.

use super::{migrate::Migration, name_change::NameChange, reclaim::Teardown, Region};
use crate::{
    control::{client::ControlClient, priority::WorkPriority, retry::CONTROL_TIMEOUT_MS},
    region::{map::Mapping, MemoryService},
    sys::deadline::Deadline,
};
use kernel::{prelude::*, sync::Arc};
use kite_core::{
    name::Name,
    view::NodeInstance,
    wire::{ControlRequest, U32List, WireList, MAX_CONTROL_BYTES},
};

/// Change of a region.
#[derive(Clone, Copy)]
pub(crate) enum Change<'a> {
    /// Move the chunks to these nodes, round robin; 0 is the requesting node.
    Migrate(&'a [u32]),
    /// Replace the name.
    Rename(Name),
}

/// Request of this node to change a mapped region.
pub(crate) struct ChangeRequest<'a> {
    pub(crate) mapping: &'a Mapping,
    pub(crate) change: Change<'a>,
    pub(crate) deadline: Deadline,
}

impl ChangeRequest<'_> {
    /// Changes the region, and waits for the end of the change.
    ///
    /// # Errors
    ///
    /// See `struct kite_migrate` and `struct kite_rename` in `include/uapi/kite.h`.
    pub(crate) fn run(&self, service: &Arc<MemoryService>) -> Result {
        let (region, token) = (self.mapping.region, service.new_id());
        // The home ends the change at `deadline`. Allow extra time to receive the result.
        let remaining_ms = self.deadline.remaining_ms();
        let reply_deadline = Deadline::after_ms(remaining_ms.saturating_add(CONTROL_TIMEOUT_MS));
        let started = self.start(service, token, reply_deadline);
        let result = started.and_then(|()| {
            let request = ControlRequest::ChangeStatus { region, token };
            service
                .request_with_retry(self.mapping.home, &request, reply_deadline)?
                .expect_done()
        });
        result.map_err(|error| self.mapping.convert_home_error(error))
    }

    /// Starts the change at the home.
    fn start(&self, service: &Arc<MemoryService>, token: u64, reply_deadline: Deadline) -> Result {
        let (mapping, cluster) = (self.mapping, &service.cluster);
        let (local_node, home) = (cluster.local_node()?, cluster.instance_of(mapping.home)?);
        mapping.wait_home(reply_deadline)?;
        if home.node != local_node {
            return self.request_start(service, home, token, reply_deadline);
        }
        let requested = RequestedChange {
            mapper: (local_node, mapping.id),
            region: mapping.region,
            token,
            deadline: self.deadline,
        };
        match self.change {
            Change::Migrate(nodes) => requested.migrate(service, absolute(nodes, local_node)),
            Change::Rename(name) => requested.rename(service, name),
        }
    }

    /// Requests the start of the change from another node, its home.
    fn request_start(
        &self,
        service: &Arc<MemoryService>,
        home: NodeInstance,
        token: u64,
        reply_deadline: Deadline,
    ) -> Result {
        let (region, mapping) = (self.mapping.region, self.mapping.id);
        let (timeout_ms, local_node) =
            (self.deadline.remaining_ms(), service.cluster.local_node()?);
        let mut list_buffer = [0; MAX_CONTROL_BYTES / 2];
        let nodes: U32List<'_> = match self.change {
            Change::Migrate(nodes) => {
                WireList::from_items(absolute(nodes, local_node), &mut list_buffer)
            }
            Change::Rename(_) => WireList::empty(),
        };
        let request = |sequence| match self.change {
            Change::Migrate(_) => ControlRequest::MigrateRegion {
                sequence,
                region,
                mapping,
                token,
                timeout_ms,
                nodes,
            },
            Change::Rename(name) => ControlRequest::RenameRegion {
                sequence,
                region,
                mapping,
                token,
                timeout_ms,
                name,
            },
        };
        let reply = service.request_once((), (home, 0), reply_deadline, request);
        reply.and_then(|reply| reply.expect_done())
    }
}

/// Returns node numbers in which 0 is replaced by the number of this node.
fn absolute(nodes: &[u32], local_node: u32) -> impl Iterator<Item = u32> + '_ {
    let nodes = nodes.iter();
    nodes.map(move |&node| if node == 0 { local_node } else { node })
}

/// Change of a region of this home, as requested by a mapper.
pub(in crate::region) struct RequestedChange {
    /// Node and number of the mapping.
    pub(in crate::region) mapper: (u32, u64),
    pub(in crate::region) region: u64,
    /// Number of the change, chosen by the requesting node.
    pub(in crate::region) token: u64,
    pub(in crate::region) deadline: Deadline,
}

impl RequestedChange {
    /// Starts a move to `nodes`, round robin.
    ///
    /// # Errors
    ///
    /// - `EHOSTDOWN`: one of the nodes is not reachable.
    /// - `ENOMEM`: out of memory.
    /// - Other errors: see [`Region::start_change`].
    pub(in crate::region) fn migrate(
        &self,
        service: &Arc<MemoryService>,
        nodes: impl Iterator<Item = u32>,
    ) -> Result {
        let mut target_nodes = KVec::new();
        for target_node in nodes {
            service.cluster.instance_of(target_node)?;
            target_nodes.push(target_node, GFP_KERNEL)?;
        }
        let deadline = self.deadline;
        self.start(service, move |service, region| {
            Migration::new(service, region, deadline)?.run(&target_nodes)
        })
    }

    /// Starts a rename.
    ///
    /// # Errors
    ///
    /// See [`Region::start_change`].
    pub(in crate::region) fn rename(&self, service: &Arc<MemoryService>, name: Name) -> Result {
        let deadline = self.deadline;
        self.start(service, move |service, region| {
            let change = NameChange {
                service,
                region,
                name,
                deadline,
            };
            change.rename()
        })
    }

    /// Runs `change` on `move_queue`.
    fn start(
        &self,
        service: &Arc<MemoryService>,
        change: impl FnOnce(&Arc<MemoryService>, &Region) -> Result + Send + 'static,
    ) -> Result {
        let region = service.region(self.region)?;
        let (node, mapping) = self.mapper;
        region.start_change(node, mapping, self.token)?;
        let worker_service = service.clone();
        service.move_queue().spawn(move || {
            let result = change(&worker_service, &region);
            if region.finish_change(result) {
                Teardown::start_deferred(&worker_service, &region, WorkPriority::Foreground);
            }
        });
        Ok(())
    }
}
