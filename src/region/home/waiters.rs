// SPDX-License-Identifier: GPL-2.0

//! Waiters for the locks and barriers of a region at its home: adding, removing and notifying.
//!
//! # Operation
//!
//! The lock table ([`super::lock_table`]) grants locks and releases barriers. A method that may grant locks
//! leaves pending notifications, which [`WaiterNotifier`] sends in the background.
//!
//! # Recovery
//!
//! - A notification is repeated until the node acknowledges or is fenced.
//! - Waiters of a removed or fenced node are removed once all members have synchronized the view in which the
//!   node was fenced. Until then the node may still act as owner.
//!
//! # Locking
//!
//! The methods of [`Region`] take the region's `state` mutex. No method sends a request under the mutex.

use super::{
    lock_table::{denied, EnqueueRequest, WaitQueueKey, WaiterId, WaiterReservation},
    Region,
};
use crate::{
    control::{
        client::ControlClient,
        priority::WorkPriority,
        retry::{CONTROL_TIMEOUT_MS, RETRY_MS},
    },
    fabric::peer::Peer,
    region::MemoryService,
    sys::deadline::Deadline,
};
use core::cell::Cell;
use kernel::{
    prelude::*,
    sync::Arc,
    time::{delay::fsleep, Delta},
};
use kite_core::{
    rights::Rights,
    sync::{
        lock::ReleaseReason,
        ticket::{AcquireKind, AcquireReply},
    },
    view::NodeInstance,
    wire::ControlRequest,
};

impl Region {
    /// Allocates a waiter, charged to the region's owner.
    pub(crate) fn reserve_waiter(&self) -> Result<WaiterReservation> {
        WaiterReservation::new(&self.owner_memcg)
    }

    /// Adds a waiter of a mapper. May produce notifications for other waiters.
    pub(crate) fn enqueue_waiter(
        &self,
        request: &EnqueueRequest,
        reservation: WaiterReservation,
    ) -> AcquireReply {
        let needed = match request.kind {
            AcquireKind::Lock { shared: true } => Rights::READ,
            _ => Rights::WRITE,
        };
        let mut state = self.state.lock();
        let allowed = if state.freeing {
            Err(ENOENT)
        } else {
            state.check_rights(request.waiter_id.instance.node, request.mapping, needed)
        };
        match allowed {
            Ok(()) => state.lock_table.enqueue(request, reservation),
            Err(error) => denied(error),
        }
    }

    /// Removes a waiter. May grant the lock to other waiters.
    pub(crate) fn remove_waiter(
        &self,
        queue_key: WaitQueueKey,
        waiter_id: WaiterId,
        reason: ReleaseReason,
    ) {
        self.state
            .lock()
            .lock_table
            .remove_waiter(queue_key, waiter_id, reason);
    }

    /// Removes the waiters for which `is_gone` returns `true`. `is_gone` must return `true` only when the
    /// node of the waiter can no longer access memory as owner. May grant locks to other waiters.
    pub(crate) fn remove_fenced_waiters(&self, is_gone: impl Fn(WaiterId) -> bool) {
        let mut state = self.state.lock();
        state
            .lock_table
            .remove_gone(|waiter_id, _, _| is_gone(waiter_id));
    }

    /// Claims a notification in one wait queue ([`LockTable::claim_notification`]), or in any if `queue_key`
    /// is `None` ([`LockTable::claim_any_notification`]).
    pub(crate) fn claim_notification(
        &self,
        queue_key: Option<WaitQueueKey>,
    ) -> Option<(WaitQueueKey, u32)> {
        let mut state = self.state.lock();
        match queue_key {
            Some(queue_key) => Some((queue_key, state.lock_table.claim_notification(queue_key)?)),
            None => state.lock_table.claim_any_notification(),
        }
    }

    /// See [`LockTable::notification_for`].
    pub(crate) fn notification_for(
        &self,
        queue_key: WaitQueueKey,
        instance: NodeInstance,
    ) -> Option<(WaiterId, AcquireReply)> {
        self.state
            .lock()
            .lock_table
            .notification_for(queue_key, instance)
    }

    /// See [`LockTable::ack_notification`].
    pub(crate) fn ack_notification(&self, queue_key: WaitQueueKey, waiter_id: WaiterId) {
        self.state
            .lock()
            .lock_table
            .ack_notification(queue_key, waiter_id);
    }
}

impl EnqueueRequest {
    /// Adds a waiter to a region of this home and returns its reply. A request of a peer is executed at most
    /// once.
    pub(in crate::region) fn execute(
        &self,
        service: &Arc<MemoryService>,
        region: u64,
        peer: Option<&Peer>,
    ) -> Result<AcquireReply> {
        let found = service.region(region);
        // Allocate before `execute_once`: other requests of the peer wait for its lock, and the allocation
        // may sleep at the limit of the owner's cgroup.
        let reservation = match &found {
            Ok(region) => region
                .reserve_waiter()
                .map(|reservation| (region, reservation)),
            Err(error) => Err(*error),
        };
        let enqueue = || match reservation {
            Ok((region, reservation)) => region.enqueue_waiter(self, reservation),
            Err(error) => denied(error),
        };
        let reply = match peer {
            None => enqueue(),
            Some(peer) => {
                let word = peer.execute_once(self.waiter_id.ticket, || Ok(enqueue().to_word()))?;
                AcquireReply::from_word(word).ok_or(EIO)?
            }
        };
        if let Ok(region) = found {
            WaiterNotifier::new(service, &region).notify_queue(self.queue_key());
        }
        Ok(reply)
    }
}

/// Removal of a waiter of a region of this home.
pub(in crate::region) struct WaiterRemoval {
    pub(in crate::region) region: u64,
    pub(in crate::region) queue_key: WaitQueueKey,
    pub(in crate::region) waiter_id: WaiterId,
    pub(in crate::region) reason: ReleaseReason,
}

impl WaiterRemoval {
    /// Removes the waiter, and notifies the next ones of its queue.
    ///
    /// # Errors
    ///
    /// - `ENOENT`: the region does not exist.
    pub(in crate::region) fn execute(&self, service: &Arc<MemoryService>) -> Result {
        let region = service.region(self.region)?;
        region.remove_waiter(self.queue_key, self.waiter_id, self.reason);
        WaiterNotifier::new(service, &region).notify_queue(self.queue_key);
        Ok(())
    }
}

/// Sender of the notifications for newly granted tickets of a region of this home.
pub(in crate::region) struct WaiterNotifier<'a> {
    service: &'a Arc<MemoryService>,
    region: &'a Arc<Region>,
}

impl<'a> WaiterNotifier<'a> {
    /// Creates the sender.
    pub(in crate::region) fn new(service: &'a Arc<MemoryService>, region: &'a Arc<Region>) -> Self {
        Self { service, region }
    }

    /// Notifies in the background all nodes with newly granted tickets.
    pub(in crate::region) fn notify_all(&self) {
        while let Some(claimed) = self.region.claim_notification(None) {
            self.send_deferred(claimed);
        }
    }

    /// Notifies in the background all nodes with newly granted tickets of one wait queue.
    fn notify_queue(&self, queue_key: WaitQueueKey) {
        while let Some(claimed) = self.region.claim_notification(Some(queue_key)) {
            self.send_deferred(claimed);
        }
    }

    /// Sends the notifications of one wait queue to one node.
    fn send_deferred(&self, (queue_key, node): (WaitQueueKey, u32)) {
        let region = self.region.clone();
        let send = move |service: &Arc<MemoryService>, instance| {
            while let Some((waiter_id, reply)) = region.notification_for(queue_key, instance) {
                notify_waiter(service, waiter_id, reply);
                region.ack_notification(queue_key, waiter_id);
            }
        };
        self.service.defer(node, WorkPriority::Lock, send);
    }
}

/// Sends a notification to a node, which may be this node, until the node acknowledges or is fenced.
fn notify_waiter(service: &Arc<MemoryService>, waiter_id: WaiterId, reply: AcquireReply) {
    let WaiterId {
        instance,
        admission,
        ticket,
    } = waiter_id;
    if service.cluster.local_node() == Ok(instance.node) {
        return service.waiters().complete(instance, ticket, reply);
    }
    let request = ControlRequest::NotifyGranted { ticket, reply };
    let is_same = |peer: &Arc<Peer>| peer.identity.admission == admission;
    let peer = || service.fabric().peer_by_instance(instance).ok();
    while let Some(peer) = peer().filter(is_same) {
        let deadline = Deadline::after_ms(CONTROL_TIMEOUT_MS);
        let ack = service.request_peer(&peer, &request, deadline);
        if ack.is_ok_and(|reply| reply.expect_done().is_ok()) {
            return;
        }
        fsleep(Delta::from_millis(RETRY_MS));
    }
}

/// Removes the waiters of nodes that were removed or fenced since, once all members have synchronized the view.
pub(in crate::region) fn remove_fenced_waiters(service: &Arc<MemoryService>) {
    // Cache the last result: successive waiters often belong to one node, and a fenced admission stays fenced.
    let last = Cell::new(None);
    let is_gone = |waiter_id: WaiterId| {
        let holder = (waiter_id.instance, waiter_id.admission);
        match last.get() {
            Some((cached, is_gone)) if cached == holder => is_gone,
            _ => {
                let is_gone = service.cluster.is_fenced_everywhere(holder.0, holder.1);
                last.set(Some((holder, is_gone)));
                is_gone
            }
        }
    };
    for region in service.regions() {
        region.remove_fenced_waiters(is_gone);
        WaiterNotifier::new(service, &region).notify_all();
    }
}
