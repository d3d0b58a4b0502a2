// SPDX-License-Identifier: GPL-2.0

//! Locks and barriers of a region at its home: owners and waiters.
//!
//! # Operation
//!
//! A region has one lock and one barrier per number. Each one in use is a [`WaitQueue`] of waiters
//! (`kite_core::sync::lock`, `kite_core::sync::barrier`). A waiter is removed at the latest with the mapping
//! through which it was added. When a queued waiter is granted the lock or passes the barrier, its entry is
//! marked, and a background notification of the node follows ([`NotifyState`]).
//!
//! # Recovery
//!
//! An exclusive owner that dies or is fenced leaves a tombstone ([`WaiterState::OwnerDied`]). Later owners receive
//! `owner_died`.
//!
//! # Locking
//!
//! All methods run with the region's `state` mutex held.

mod wait_queue;

use self::wait_queue::{NotifyState, QueuedWaiter, WaitQueue};
use crate::sys::memcg::Memcg;
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    prelude::*,
    rbtree::{RBTree, RBTreeNodeReservation},
};
use kite_core::{
    sync::{
        barrier::Barrier,
        lock::ReleaseReason,
        ticket::{AcquireKind, AcquireReply},
    },
    view::NodeInstance,
};

/// Maximum number of waiters, owners and barriers of one region.
const MAX_WAITERS: u32 = crate::bindings::KITE_WAITERS_MAX;

/// Kind and number of a lock or barrier.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct WaitQueueKey {
    is_barrier: bool,
    sync_id: u64,
}

impl WaitQueueKey {
    /// Returns the key for this kind of request and the number that the user chose.
    pub(crate) fn new(kind: AcquireKind, number: u64) -> Self {
        Self {
            is_barrier: matches!(kind, AcquireKind::Barrier { .. }),
            sync_id: number,
        }
    }
}

/// Node that waits, and ticket number at that node.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct WaiterId {
    pub(crate) instance: NodeInstance,
    /// Admission of the node when it requested the ticket. A node that is fenced loses its tickets.
    pub(crate) admission: u64,
    pub(crate) ticket: u64,
}

/// Memory for a waiter, and for a wait queue if none exists yet.
pub(crate) struct WaiterReservation {
    queue: RBTreeNodeReservation<WaitQueueKey, WaitQueue>,
    waiter: RBTreeNodeReservation<u64, QueuedWaiter>,
}

impl WaiterReservation {
    /// Allocates the memory, charged to `payer`.
    pub(crate) fn new(payer: &Memcg) -> Result<Self> {
        payer.with_active(|| {
            Ok(Self {
                queue: RBTreeNodeReservation::new(GFP_KERNEL_ACCOUNT)?,
                waiter: RBTreeNodeReservation::new(GFP_KERNEL_ACCOUNT)?,
            })
        })
    }
}

/// Request to add a waiter.
pub(crate) struct EnqueueRequest {
    pub(crate) waiter_id: WaiterId,
    pub(crate) mapping: u64,
    pub(crate) sync_id: u64,
    pub(crate) kind: AcquireKind,
    pub(crate) is_blocking: bool,
}

impl EnqueueRequest {
    /// Returns the key of the wait queue.
    pub(crate) fn queue_key(&self) -> WaitQueueKey {
        WaitQueueKey::new(self.kind, self.sync_id)
    }
}

/// Wait queues of a region.
pub(crate) struct LockTable {
    queues: RBTree<WaitQueueKey, WaitQueue>,
    /// Position of the next waiter.
    next_position: u64,
    waiter_count: u32,
    barrier_count: u32,
}

/// Returns the reply to a request that is rejected with `error`.
pub(crate) fn denied(error: Error) -> AcquireReply {
    AcquireReply::Denied(error.to_errno().unsigned_abs() as u16)
}

impl LockTable {
    /// Creates an empty table.
    pub(crate) fn new() -> Self {
        Self {
            queues: RBTree::new(),
            next_position: 1,
            waiter_count: 0,
            barrier_count: 0,
        }
    }

    /// Adds a waiter. May produce notifications for other waiters.
    pub(crate) fn enqueue(
        &mut self,
        request: &EnqueueRequest,
        reservation: WaiterReservation,
    ) -> AcquireReply {
        let queue_key = request.queue_key();
        let existing = self.queues.get(&queue_key);
        // A new barrier counts, too. The successor of a dead owner uses the count of the tombstone.
        let needed = match existing {
            None => 1 + u32::from(queue_key.is_barrier),
            Some(queue) => u32::from(!queue.has_only_tombstone()),
        };
        let is_new = existing.is_none();
        if self.waiter_count + self.barrier_count + needed > MAX_WAITERS {
            return denied(ENOMEM);
        }
        if is_new {
            let queue = WaitQueue {
                barrier: queue_key.is_barrier.then(Barrier::default),
                waiters: RBTree::new(),
            };
            self.queues
                .insert(reservation.queue.into_node(queue_key, queue));
            self.barrier_count += u32::from(queue_key.is_barrier);
        }
        let position = self.next_position;
        self.next_position += 1;
        let Some(queue) = self.queues.get_mut(&queue_key) else {
            return denied(EIO);
        };
        let reply = match request.kind {
            AcquireKind::Lock { shared } => {
                queue.acquire_lock(request, shared, position, reservation.waiter)
            }
            AcquireKind::Barrier { count } => {
                queue.arrive_at_barrier(request, count, position, reservation.waiter)
            }
        };
        self.waiter_count += u32::from(matches!(
            reply,
            AcquireReply::Queued | AcquireReply::Granted { .. }
        ));
        reply
    }

    /// Removes a waiter, if it exists. May grant the lock to other waiters.
    pub(crate) fn remove_waiter(
        &mut self,
        queue_key: WaitQueueKey,
        waiter_id: WaiterId,
        reason: ReleaseReason,
    ) {
        let Some(queue) = self.queues.get_mut(&queue_key) else {
            return;
        };
        self.waiter_count -= queue.remove_waiter(waiter_id, reason);
        if queue.is_unused() {
            self.queues.remove(&queue_key);
        }
    }

    /// Removes all waiters for which `is_gone` returns `true`. Its arguments are the waiter, the mapping, and
    /// whether the waiter is still queued. May grant locks to other waiters.
    pub(crate) fn remove_gone(&mut self, is_gone: impl Fn(WaiterId, u64, bool) -> bool) {
        if self.waiter_count == 0 {
            return;
        }
        let mut next = self.queues.cursor_front_mut();
        while let Some(mut cursor) = next {
            let (_, queue) = cursor.current_mut();
            self.waiter_count -= queue.remove_gone(&is_gone);
            next = if queue.is_unused() {
                cursor.remove_current().0
            } else {
                cursor.move_next()
            };
        }
    }

    /// Returns a node with pending notifications in a wait queue, and marks them as in progress. The caller
    /// must send them.
    pub(crate) fn claim_notification(&mut self, queue_key: WaitQueueKey) -> Option<u32> {
        self.queues.get_mut(&queue_key)?.claim_notification()
    }

    /// Claims a notification as [`Self::claim_notification`] does, in any wait queue.
    pub(crate) fn claim_any_notification(&mut self) -> Option<(WaitQueueKey, u32)> {
        let mut queues = self.queues.iter_mut();
        queues.find_map(|(queue_key, queue)| Some((*queue_key, queue.claim_notification()?)))
    }

    /// Returns a node's waiter that was not notified yet, and its reply.
    pub(crate) fn notification_for(
        &self,
        queue_key: WaitQueueKey,
        instance: NodeInstance,
    ) -> Option<(WaiterId, AcquireReply)> {
        let queue = self.queues.get(&queue_key)?;
        let mut waiters = queue.waiters.values();
        let waiter = waiters.find(|waiter| {
            waiter.notify_state != NotifyState::Idle && waiter.id.instance == instance
        })?;
        Some((waiter.id, waiter.reply))
    }

    /// Records that a waiter was notified. Removes the waiter if it has passed a barrier.
    pub(crate) fn ack_notification(&mut self, queue_key: WaitQueueKey, waiter_id: WaiterId) {
        let Some(queue) = self.queues.get_mut(&queue_key) else {
            return;
        };
        let Some(position) = queue.find_position(|waiter| waiter.id == waiter_id) else {
            return;
        };
        if queue_key.is_barrier {
            queue.waiters.remove(&position);
            self.waiter_count -= 1;
        } else if let Some(waiter) = queue.waiters.get_mut(&position) {
            waiter.notify_state = NotifyState::Idle;
        }
    }
}
