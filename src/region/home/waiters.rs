// SPDX-License-Identifier: GPL-2.0

//! Waiters for the locks and barriers of a region at its home: adding, removing and notifying.
//!
//! # Operation
//!
//! The lock table ([`super::lock_table`]) grants locks and releases barriers. A method that may grant locks
//! leaves pending notifications, which [`MemoryService::notify_granted`] sends in the background.
//!
//! # Recovery
//!
//! - A notification is repeated until the node acknowledges or leaves the view.
//! - Waiters of a dead node are removed once all members have synchronized the view without that node. Until
//!   then the dead node may still act as owner.
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

    /// Removes the waiters of nodes for which `is_gone` returns `true`. `is_gone` must return `true` only
    /// when the node can no longer access memory as owner. May grant locks to other waiters.
    pub(crate) fn remove_dead_waiters(&self, is_gone: impl Fn(NodeInstance) -> bool) {
        let mut state = self.state.lock();
        state
            .lock_table
            .remove_gone(|waiter_id, _, _| is_gone(waiter_id.instance));
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
    ) -> Option<(u64, AcquireReply)> {
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

impl MemoryService {
    /// Adds a waiter and returns its reply. A request of a peer is executed exactly once.
    pub(in crate::region) fn serve_enqueue_waiter(
        self: &Arc<Self>,
        region: u64,
        enqueue_request: &EnqueueRequest,
        peer: Option<&Peer>,
    ) -> Result<AcquireReply> {
        let found = self.region(region);
        // Allocate before `execute_once`: other requests of the peer wait for its lock, and the allocation
        // may sleep at the limit of the owner's cgroup.
        let reservation = match &found {
            Ok(region) => region
                .reserve_waiter()
                .map(|reservation| (region, reservation)),
            Err(error) => Err(*error),
        };
        let enqueue = || match reservation {
            Ok((region, reservation)) => region.enqueue_waiter(enqueue_request, reservation),
            Err(error) => denied(error),
        };
        let reply = match peer {
            None => enqueue(),
            Some(peer) => {
                let word = peer
                    .execute_once(enqueue_request.waiter_id.ticket, || Ok(enqueue().to_word()))?;
                AcquireReply::from_word(word).ok_or(EIO)?
            }
        };
        if let Ok(region) = found {
            self.notify_granted(&region, Some(enqueue_request.queue_key()));
        }
        Ok(reply)
    }

    /// Removes the waiter of a peer's ticket, and rejects a delayed request for the same ticket.
    pub(in crate::region) fn serve_remove_waiter(
        self: &Arc<Self>,
        node: u32,
        ticket: u64,
        (region, queue_key): (u64, WaitQueueKey),
        reason: ReleaseReason,
    ) -> Result {
        let peer = self.fabric().peer(node)?;
        // If the request was executed before, this has no effect, and the waiter is removed below.
        let _ = peer.execute_once(ticket, || Ok(AcquireReply::Cancelled.to_word()));
        let instance = peer.instance();
        self.remove_waiter_at_home(region, queue_key, WaiterId { instance, ticket }, reason)
    }

    pub(in crate::region) fn remove_waiter_at_home(
        self: &Arc<Self>,
        region: u64,
        queue_key: WaitQueueKey,
        waiter_id: WaiterId,
        reason: ReleaseReason,
    ) -> Result {
        let region = self.region(region)?;
        region.remove_waiter(queue_key, waiter_id, reason);
        self.notify_granted(&region, Some(queue_key));
        Ok(())
    }

    /// Notifies in the background all nodes with newly granted tickets, of one wait queue or of all.
    pub(in crate::region) fn notify_granted(
        self: &Arc<Self>,
        region: &Arc<Region>,
        queue_key: Option<WaitQueueKey>,
    ) {
        while let Some((queue_key, node)) = region.claim_notification(queue_key) {
            let region = region.clone();
            self.defer(node, WorkPriority::Lock, move |memory_service, instance| {
                while let Some((ticket, reply)) = region.notification_for(queue_key, instance) {
                    memory_service.notify_reliably(instance, ticket, reply);
                    region.ack_notification(queue_key, WaiterId { instance, ticket });
                }
            });
        }
    }

    /// Sends a notification to a node, which may be this node, until the node acknowledges or leaves the
    /// view.
    fn notify_reliably(self: &Arc<Self>, instance: NodeInstance, ticket: u64, reply: AcquireReply) {
        if self.cluster.local_node() == Ok(instance.node) {
            return self.waiters().complete(instance, ticket, reply);
        }
        let request = ControlRequest::NotifyGranted { ticket, reply };
        while let Ok(peer) = self.fabric().peer_by_instance(instance) {
            let deadline = Deadline::after_ms(CONTROL_TIMEOUT_MS);
            let ack = self.request_peer(&peer, &request, deadline);
            if ack.is_ok_and(|answer| answer.expect_done().is_ok()) {
                return;
            }
            fsleep(Delta::from_millis(RETRY_MS));
        }
    }

    /// Removes the waiters of nodes that left the view, once all members have synchronized that view.
    pub(in crate::region) fn remove_dead_waiters(self: &Arc<Self>) {
        // Cache the last result: successive waiters often belong to one node, and a fully removed instance
        // stays removed.
        let last = Cell::new(None);
        let is_forgotten = |instance| match last.get() {
            Some((cached_instance, forgotten)) if cached_instance == instance => forgotten,
            _ => {
                let forgotten = self.cluster.is_fully_removed(instance);
                last.set(Some((instance, forgotten)));
                forgotten
            }
        };
        for region in self.regions() {
            region.remove_dead_waiters(is_forgotten);
            self.notify_granted(&region, None);
        }
    }
}
