// SPDX-License-Identifier: GPL-2.0

//! Deferred teardown of regions, mappings and loans.
//!
//! # Operation
//!
//! Memory is not reused while any node may still access it. So a region is freed in steps: first its name and
//! all mappings on all nodes, then its loans, then the region itself. [`TeardownGuard`] starts the next step
//! when the last item of the current one is done.
//!
//! # Recovery
//!
//! Each item retries until the other node replies or leaves the view. Items that cannot complete yet requeue
//! themselves.

use super::Region;
use crate::{
    control::{
        client::ControlClient,
        priority::WorkPriority,
        reply_code::is_temporary,
        retry::{CONTROL_TIMEOUT_MS, DRAIN_POLL_MS, RETRY_MS},
    },
    region::{lend::loan::NodeScopedId, map::detached::DetachedMapping, MemoryService},
    sys::deadline::Deadline,
};
use kernel::{
    prelude::*,
    sync::Arc,
    time::{delay::fsleep, Delta},
};
use kite_core::{
    name::Name,
    view::NodeInstance,
    wire::{ControlRequest, InvalidateReason, WireList, MAX_CONTROL_BYTES},
};

/// Step of the teardown of a region.
type TeardownStep = fn(&Arc<MemoryService>, &Arc<Region>, WorkPriority);

/// Item of the current teardown step. The next step starts when the last guard is dropped, also if the item
/// was dropped without running.
struct TeardownGuard {
    memory_service: Arc<MemoryService>,
    region: Arc<Region>,
    priority: WorkPriority,
    next_step: TeardownStep,
}

impl TeardownGuard {
    fn new(
        memory_service: &Arc<MemoryService>,
        region: &Arc<Region>,
        priority: WorkPriority,
        next_step: TeardownStep,
    ) -> Self {
        region.get_teardown();
        Self {
            memory_service: memory_service.clone(),
            region: region.clone(),
            priority,
            next_step,
        }
    }
}

impl Clone for TeardownGuard {
    fn clone(&self) -> Self {
        Self::new(
            &self.memory_service,
            &self.region,
            self.priority,
            self.next_step,
        )
    }
}

impl Drop for TeardownGuard {
    fn drop(&mut self) {
        if self.region.put_teardown() {
            (self.next_step)(&self.memory_service, &self.region, self.priority);
        }
    }
}

impl MemoryService {
    /// Runs `f` on a workqueue of `node` once a closed mapping is drained. Requeues until then, so other
    /// items of the queue do not wait.
    pub(in crate::region) fn defer_until_drained(
        self: &Arc<Self>,
        node: u32,
        priority: WorkPriority,
        detached: DetachedMapping,
        f: impl FnOnce(&Arc<Self>, NodeInstance, DetachedMapping) + Send + 'static,
    ) {
        let current_priority = if self.is_drained(&detached) {
            priority
        } else {
            WorkPriority::Background
        };
        self.defer(node, current_priority, move |memory_service, instance| {
            if memory_service.is_drained(&detached) {
                return f(memory_service, instance, detached);
            }
            fsleep(Delta::from_millis(DRAIN_POLL_MS));
            memory_service.defer_until_drained(node, priority, detached, f);
        });
    }

    /// Frees a region that cannot be mapped any longer, in the background.
    pub(in crate::region) fn reclaim_deferred(
        self: &Arc<Self>,
        region: &Arc<Region>,
        priority: WorkPriority,
    ) {
        let guard = TeardownGuard::new(self, region, priority, Self::return_all_loans);
        if let Some(name) = region.spec.name {
            self.unregister_name_deferred(name, guard.clone());
        }
        for node in region.mapper_nodes() {
            self.invalidate_mappings_deferred(node, guard.clone());
        }
    }

    /// Unregisters a name at its owner. Repeats if the view, and so perhaps the owner, changes meanwhile.
    fn unregister_name_deferred(self: &Arc<Self>, name: Name, guard: TeardownGuard) {
        let epoch = self.cluster.epoch();
        let Ok(name_owner) = self.cluster.name_owner(&name) else {
            return;
        };
        self.defer(
            name_owner,
            guard.priority,
            move |memory_service, instance| {
                let region = guard.region.id;
                memory_service.request_until_removed(
                    instance,
                    &ControlRequest::UnregisterName { name, region },
                );
                if memory_service.cluster.epoch() != epoch {
                    memory_service.unregister_name_deferred(name, guard);
                }
            },
        );
    }

    /// Invalidates the mappings of a region on a node. Requeues for mappings that cannot end yet, so other
    /// items of the queue do not wait.
    fn invalidate_mappings_deferred(self: &Arc<Self>, node: u32, guard: TeardownGuard) {
        self.defer(node, guard.priority, move |memory_service, instance| {
            let mut next = 0;
            while let Some(mapping) = guard.region.next_mapping_of(instance.node, next) {
                if memory_service.request_invalidate(instance, mapping, InvalidateReason::Freed) {
                    guard.region.unmap(instance.node, mapping);
                }
                next = mapping + 1;
            }
            if guard.region.next_mapping_of(instance.node, 0).is_some() {
                fsleep(Delta::from_millis(RETRY_MS));
                memory_service.invalidate_mappings_deferred(node, guard);
            }
        });
    }

    /// Requests once that a node invalidate a mapping. Returns `true` if the mapping has ended, or the node
    /// has left the view.
    pub(in crate::region) fn request_invalidate(
        self: &Arc<Self>,
        instance: NodeInstance,
        mapping: u64,
        reason: InvalidateReason,
    ) -> bool {
        let request = ControlRequest::InvalidateMapping { mapping, reason };
        match self.request(
            instance.node,
            &request,
            Deadline::after_ms(CONTROL_TIMEOUT_MS),
        ) {
            Ok(answer) => !matches!(answer.decode(), Err(error) if is_temporary(error)),
            Err(_) => !self.cluster.is_member(instance),
        }
    }

    /// Returns the loans of a region after all its mappings have ended. Waits until all members have
    /// synchronized the view: until then, members may still write to the loans on behalf of dead nodes.
    fn return_all_loans(self: &Arc<Self>, region: &Arc<Region>, priority: WorkPriority) {
        let (guard, local_node) = (
            TeardownGuard::new(self, region, priority, Self::finish_teardown),
            self.cluster.local_node(),
        );
        if self.cluster.synced_epoch().is_none() {
            let Ok(local_node) = local_node else { return };
            let region = region.clone();
            return self.defer(
                local_node,
                WorkPriority::Background,
                move |memory_service, _| {
                    fsleep(Delta::from_millis(DRAIN_POLL_MS));
                    memory_service.return_all_loans(&region, priority);
                    drop(guard);
                },
            );
        }
        for loan in region.loans() {
            let guard = guard.clone();
            self.return_loan_deferred(loan, priority, move || drop(guard));
        }
    }

    /// Returns a loan to its lender in the background. `on_done` is called afterwards, or dropped if the
    /// lender is gone.
    pub(in crate::region) fn return_loan_deferred(
        self: &Arc<Self>,
        (node, loan): NodeScopedId,
        priority: WorkPriority,
        on_done: impl FnOnce() + Send + 'static,
    ) {
        self.defer(node, priority, move |memory_service, instance| {
            memory_service.request_until_removed(instance, &ControlRequest::ReleaseLoan { loan });
            on_done();
        });
    }

    /// Returns some chunks of a loan to its lender in the background. `guard` is dropped afterwards, or if
    /// the lender is gone.
    pub(in crate::region) fn shrink_loan_deferred(
        self: &Arc<Self>,
        (node, loan): NodeScopedId,
        chunks: KVVec<u32>,
        guard: impl Send + 'static,
    ) {
        self.defer(
            node,
            WorkPriority::Foreground,
            move |memory_service, instance| {
                let mut list_buffer = [0; MAX_CONTROL_BYTES / 2];
                for batch in chunks.chunks(list_buffer.len() / size_of::<u32>()) {
                    let chunks = WireList::from_items(batch.iter().copied(), &mut list_buffer);
                    memory_service.request_until_removed(
                        instance,
                        &ControlRequest::ShrinkLoan { loan, chunks },
                    );
                }
                drop(guard);
            },
        );
    }

    fn finish_teardown(self: &Arc<Self>, region: &Arc<Region>, _: WorkPriority) {
        self.remove_region(region.id);
    }
}
