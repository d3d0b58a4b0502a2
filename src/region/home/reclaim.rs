// SPDX-License-Identifier: GPL-2.0

//! Deferred teardown of regions.
//!
//! # Operation
//!
//! Memory is not reused while any node may still access it. So a region is freed in steps: first its name and
//! all mappings on all nodes, then its loans, then the region itself. [`TeardownGuard`] starts the next step
//! when the last item of the current one is done.
//!
//! # Recovery
//!
//! Each item retries until the other node replies or is fenced. Items that cannot complete yet requeue
//! themselves. A loan of an unreachable lender is returned when the lender is reachable again, and the region
//! is removed after that.

use super::{borrowed_loan::BorrowedLoan, Region};
use crate::{
    control::{
        client::ControlClient,
        priority::WorkPriority,
        reply_code::is_temporary,
        retry::{CONTROL_TIMEOUT_MS, DRAIN_POLL_MS, RETRY_MS},
    },
    region::MemoryService,
    sys::deadline::Deadline,
};
use kernel::{
    sync::Arc,
    time::{delay::fsleep, Delta},
};
use kite_core::{
    name::Name,
    name_hash::NameOwners,
    view::NodeInstance,
    wire::{ControlRequest, InvalidateReason},
};

/// Teardown of a region.
#[derive(Clone)]
pub(in crate::region) struct Teardown {
    service: Arc<MemoryService>,
    region: Arc<Region>,
    priority: WorkPriority,
}

impl Teardown {
    /// Frees a region that cannot be mapped any longer, in the background.
    pub(in crate::region) fn start_deferred(
        service: &Arc<MemoryService>,
        region: &Arc<Region>,
        priority: WorkPriority,
    ) {
        let teardown = Self {
            service: service.clone(),
            region: region.clone(),
            priority,
        };
        let guard = TeardownGuard::new(teardown, Self::return_all_loans);
        for name in region.with_names(|names| names.all()) {
            guard.clone().unregister_name_deferred(name);
        }
        for node in region.mapper_nodes() {
            guard.clone().invalidate_mappings_deferred(node);
        }
    }

    /// Returns the loans of the region after all its mappings have ended. Waits until all members have
    /// synchronized the view: until then, members may still write to the loans on behalf of dead nodes.
    fn return_all_loans(&self) {
        let guard = TeardownGuard::new(self.clone(), Self::remove_region);
        if self.service.cluster.synced_epoch().is_none() {
            return self.return_all_loans_deferred(guard);
        }
        self.region.set_access_ended();
        for loan in self.region.loans() {
            BorrowedLoan::new(&self.service, loan).release_deferred(self.priority, guard.clone());
        }
    }

    /// Repeats [`Self::return_all_loans`] in the background. Drops `guard` afterwards.
    fn return_all_loans_deferred(&self, guard: TeardownGuard) {
        let Ok(local_node) = self.service.cluster.local_node() else {
            return;
        };
        self.service
            .defer(local_node, WorkPriority::Background, move |_, _| {
                fsleep(Delta::from_millis(DRAIN_POLL_MS));
                guard.teardown.return_all_loans();
                drop(guard);
            });
    }

    fn remove_region(&self) {
        self.service.remove_region(self.region.id);
    }
}

/// Item of the current teardown step. The next step starts when the last guard is dropped, also if the item
/// was dropped without running.
struct TeardownGuard {
    teardown: Teardown,
    next_step: fn(&Teardown),
}

impl TeardownGuard {
    fn new(teardown: Teardown, next_step: fn(&Teardown)) -> Self {
        teardown.region.get_teardown();
        Self {
            teardown,
            next_step,
        }
    }

    /// Unregisters a name at its owners, at the backup first: a name that is free at the primary can be
    /// registered again. Repeats if the view, and so perhaps an owner, changes meanwhile.
    fn unregister_name_deferred(self, name: Name) {
        let cluster = &self.teardown.service.cluster;
        let epoch = cluster.epoch();
        let Ok(NameOwners { primary, backup }) = cluster.name_owners(&name) else {
            return;
        };
        let unregister_at_primary = move |guard: Self| {
            guard.unregister_at(primary, name, move |guard| {
                if guard.teardown.service.cluster.epoch() != epoch {
                    guard.unregister_name_deferred(name);
                }
            });
        };
        match backup {
            Some(backup) => self.unregister_at(backup, name, unregister_at_primary),
            None => unregister_at_primary(self),
        }
    }

    /// Unregisters a name at one owner, and then calls `next`. An owner that is not reachable is skipped: it
    /// receives the names again when it is admitted.
    fn unregister_at(self, owner: u32, name: Name, next: impl FnOnce(Self) + Send + 'static) {
        let service = self.teardown.service.clone();
        if service.cluster.instance_of(owner).is_err() {
            return next(self);
        }
        let priority = self.teardown.priority;
        service.defer(owner, priority, move |service, instance| {
            let region = self.teardown.region.id;
            let request = ControlRequest::UnregisterName { name, region };
            service.request_while_reachable(instance, &request);
            next(self);
        });
    }

    /// Invalidates the mappings of the region on a node. Requeues for mappings that cannot end yet, so other
    /// items of the queue do not wait.
    fn invalidate_mappings_deferred(self, node: u32) {
        let service = self.teardown.service.clone();
        service.defer(node, self.teardown.priority, move |service, instance| {
            // The mapper chooses the IDs: an ID may be the largest number.
            let (region, mut first) = (&self.teardown.region, Some(0));
            while let Some(mapping) = first.and_then(|id| region.next_mapping_of(instance.node, id))
            {
                if request_invalidate(service, instance, mapping, InvalidateReason::Freed) {
                    region.unmap(instance.node, mapping);
                }
                first = mapping.checked_add(1);
            }
            if region.next_mapping_of(instance.node, 0).is_some() {
                fsleep(Delta::from_millis(RETRY_MS));
                self.invalidate_mappings_deferred(node);
            }
        });
    }
}

impl Clone for TeardownGuard {
    fn clone(&self) -> Self {
        Self::new(self.teardown.clone(), self.next_step)
    }
}

impl Drop for TeardownGuard {
    fn drop(&mut self) {
        if self.teardown.region.put_teardown() {
            (self.next_step)(&self.teardown);
        }
    }
}

/// Requests once that a node invalidate a mapping. Returns `true` if the mapping has ended, or the node is
/// not reachable: then the view change removes the mapper.
pub(in crate::region) fn request_invalidate(
    service: &Arc<MemoryService>,
    instance: NodeInstance,
    mapping: u64,
    reason: InvalidateReason,
) -> bool {
    let request = ControlRequest::InvalidateMapping { mapping, reason };
    let deadline = Deadline::after_ms(CONTROL_TIMEOUT_MS);
    match service.request(instance.node, &request, deadline) {
        Ok(reply) => !matches!(reply.decode(), Err(error) if is_temporary(error)),
        Err(_) => !service.cluster.is_reachable(instance),
    }
}
