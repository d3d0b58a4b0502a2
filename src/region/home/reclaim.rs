// SPDX-License-Identifier: GPL-2.0

//! Giving memory back: errands to other nodes.
//!
//! Each insists until the other node has answered or is out of the view. Memory is never reused while
//! anybody may still reach it, so a region ends in steps: first its name and all mappings of it, on
//! whichever nodes they are; then its memory; then the region itself.

use super::Region;
use crate::{
    errno,
    region::{
        alloc::DetachedMapping, lend::loan::NodeScopedId, map::Mapping, workqueues::PeerWorkqueues,
        MemoryService, CONTROL_TIMEOUT_MS,
    },
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

/// Time between attempts to reach a node that does not answer.
pub(in crate::region) const RETRY_MS: i64 = 100;

/// Whether a node that refused a request for this reason may do it later.
fn is_temporary(error: Error) -> bool {
    error == EAGAIN || error == ENOMEM || error == errno::inprogress()
}

/// Time between looks whether something can still come late. Others in the line wait for it.
pub(in crate::region) const DRAIN_POLL_MS: i64 = 10;

/// Tries again and again while there is no memory.
pub(in crate::region) fn retry_alloc<T>(mut f: impl FnMut() -> Result<T>) -> T {
    loop {
        match f() {
            Ok(done) => return done,
            Err(_) => fsleep(Delta::from_millis(RETRY_MS)),
        }
    }
}

/// Whether somebody waits for an errand. What programs leave behind them may be very much, and those who
/// wait do not stand in line behind it.
#[derive(Clone, Copy)]
pub(crate) enum WorkPriority {
    /// By who waits for a lock or at a barrier, which is not to wait for what takes long.
    Lock,
    Foreground,
    Background,
}

/// A step of a region's end.
type TeardownStep = fn(&Arc<MemoryService>, &Arc<Region>, WorkPriority);

/// Holds up the next step of a region's end until an errand of this one is done, or dropped.
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
    fn workqueues_for(&self, priority: WorkPriority) -> &PeerWorkqueues {
        match priority {
            WorkPriority::Lock => &self.lock_queues,
            WorkPriority::Foreground => &self.foreground_queues,
            WorkPriority::Background => &self.background_queues,
        }
    }

    /// Has `f` done in the background, in a line of `node`. If the node is not in the view there is
    /// nothing to do.
    pub(crate) fn defer(
        self: &Arc<Self>,
        node: u32,
        priority: WorkPriority,
        f: impl FnOnce(&Arc<Self>, NodeInstance) + Send + 'static,
    ) {
        if let Ok(instance) = self.cluster.instance_of(node) {
            let memory_service = self.clone();
            let is_member = || self.cluster.is_member(instance);
            self.workqueues_for(priority)
                .queue_work(instance, is_member, move || f(&memory_service, instance));
        }
    }

    /// Begins the line of a node for errands that somebody waits for: who must not wait adds some.
    pub(crate) fn ensure_foreground_queue(&self, instance: NodeInstance) {
        self.foreground_queues
            .ensure_queue(instance, || self.cluster.is_member(instance));
    }

    /// Makes a request until it is done or refused for good, or the node is out of the view.
    pub(crate) fn request_until_removed(
        self: &Arc<Self>,
        peer: NodeInstance,
        request: &ControlRequest<'_>,
    ) {
        self.request_while(peer, request, || true);
    }

    /// As [`Self::insist`], for as long as it is wanted.
    pub(in crate::region) fn request_while(
        self: &Arc<Self>,
        peer: NodeInstance,
        request: &ControlRequest<'_>,
        keep_trying: impl Fn() -> bool,
    ) {
        while self.cluster.is_member(peer) && keep_trying() {
            if let Ok(answer) =
                self.request(peer.node, request, Deadline::after_ms(CONTROL_TIMEOUT_MS))
            {
                match answer.decode() {
                    Err(error) if is_temporary(error) => {}
                    _ => return,
                }
            }
            fsleep(Delta::from_millis(RETRY_MS));
        }
    }

    /// Whether nothing that was sent by a mapping that is in use no more can come late. A node that is out of
    /// the view counts only as of the present epoch, so look at that after this.
    pub(crate) fn is_drained(&self, mapping: &Mapping) -> bool {
        mapping.is_drained(|instance| self.cluster.is_member(instance))
    }

    /// Has `f` done in a line of `node` when a mapping that was given back is quiet. Others in the line do not
    /// wait for that.
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

    /// Takes a region apart that nobody can map any more, in the background.
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

    /// Takes a name back from whoever keeps it, also if that changes meanwhile.
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

    /// Ends the mappings that a node has of a region. Others in the line do not wait for those that cannot
    /// be ended yet.
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

    /// Asks a node once to end a mapping. Returns whether that is done with.
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

    /// Gives the memory of a region back that nobody reaches any more, when all have heard of the death of whoever
    /// died: others may still write to it for them.
    fn return_all_loans(self: &Arc<Self>, region: &Arc<Region>, priority: WorkPriority) {
        let (guard, local_node) = (
            TeardownGuard::new(self, region, priority, Self::remove_region),
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

    /// Gives leased memory back to its lender, in the background; `then` is called, or dropped, after it.
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

    /// Gives some chunks of a lease back to its lender, in the background; `then` is called, or dropped, after it.
    pub(in crate::region) fn shrink_loan_deferred(
        self: &Arc<Self>,
        (node, loan): NodeScopedId,
        chunks: KVVec<u32>,
        on_done: impl FnOnce() + Send + 'static,
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
                on_done();
            },
        );
    }

    fn remove_region(self: &Arc<Self>, region: &Arc<Region>, _: WorkPriority) {
        if self.regions.remove(region.id).is_some() {
            self.stats.regions.sub(1);
        }
    }
}
