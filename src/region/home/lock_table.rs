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
//! An exclusive owner that dies leaves a tombstone ([`WaiterState::OwnerDied`]). Later owners receive
//! `owner_died`.
//!
//! # Locking
//!
//! All methods run with the region's `state` mutex held.

use crate::sys::memcg::Memcg;
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    prelude::*,
    rbtree::{RBTree, RBTreeNodeReservation},
};
use kite_core::{
    sync::{
        barrier::{ArriveResult, Barrier},
        lock::{self, LockWaiter, ReleaseReason, Removal, WaiterState},
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

/// Instance of the node that waits, and ticket number at that node.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct WaiterId {
    pub(crate) instance: NodeInstance,
    pub(crate) ticket: u64,
}

/// State of the notification of a waiter.
#[derive(Clone, Copy, PartialEq, Eq)]
enum NotifyState {
    Idle,
    /// The waiter was granted the lock or passed the barrier, and no thread sends the notification yet.
    Pending,
    /// A thread is sending the notification.
    InProgress,
}

/// Entry of a wait queue.
struct QueuedWaiter {
    id: WaiterId,
    mapping: u64,
    /// For a barrier: a shared waiter, which is granted when all participants have arrived.
    lock_waiter: LockWaiter,
    reply: AcquireReply,
    notify_state: NotifyState,
}

impl QueuedWaiter {
    /// Releases the entry. `barrier` is the barrier of the wait queue, if any.
    fn release(&mut self, barrier: &mut Option<Barrier>, reason: ReleaseReason) -> Removal {
        if let (Some(barrier), AcquireReply::Queued) = (barrier, self.reply) {
            barrier.cancel_wait();
        }
        // No notification is needed any longer.
        self.notify_state = NotifyState::Idle;
        self.lock_waiter.release(reason)
    }
}

struct WaitQueue {
    /// `None` if the queue belongs to a lock.
    barrier: Option<Barrier>,
    /// Waiters by position, in order of arrival.
    waiters: RBTree<u64, QueuedWaiter>,
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

    /// Returns the ticket and the reply of a node's waiter that was not notified yet.
    pub(crate) fn notification_for(
        &self,
        queue_key: WaitQueueKey,
        instance: NodeInstance,
    ) -> Option<(u64, AcquireReply)> {
        let queue = self.queues.get(&queue_key)?;
        let mut waiters = queue.waiters.values();
        let waiter = waiters.find(|waiter| {
            waiter.notify_state != NotifyState::Idle && waiter.id.instance == instance
        })?;
        Some((waiter.id.ticket, waiter.reply))
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

impl WaitQueue {
    /// Returns the position of the first waiter, except the tombstone, for which `predicate` returns `true`.
    fn find_position(&self, predicate: impl Fn(&QueuedWaiter) -> bool) -> Option<u64> {
        let mut waiters = self.waiters.iter();
        let found = waiters.find(|(_, waiter)| {
            waiter.lock_waiter.state != WaiterState::OwnerDied && predicate(waiter)
        });
        found.map(|(position, _)| *position)
    }

    /// Returns `true` if the queue contains a tombstone and nothing else.
    fn has_only_tombstone(&self) -> bool {
        self.tombstone_position().is_some() && self.waiters.iter().nth(1).is_none()
    }

    /// Returns the position of the tombstone, if any. It precedes all other entries.
    fn tombstone_position(&self) -> Option<u64> {
        let (position, first) = self.waiters.iter().next()?;
        (first.lock_waiter.state == WaiterState::OwnerDied).then_some(*position)
    }

    fn insert_waiter(
        &mut self,
        request: &EnqueueRequest,
        shared: bool,
        position: u64,
        reservation: RBTreeNodeReservation<u64, QueuedWaiter>,
    ) {
        let waiter = QueuedWaiter {
            id: request.waiter_id,
            mapping: request.mapping,
            lock_waiter: LockWaiter {
                shared,
                state: WaiterState::Waiting,
            },
            reply: AcquireReply::Queued,
            notify_state: NotifyState::Idle,
        };
        self.waiters.insert(reservation.into_node(position, waiter));
    }

    fn acquire_lock(
        &mut self,
        request: &EnqueueRequest,
        shared: bool,
        position: u64,
        reservation: RBTreeNodeReservation<u64, QueuedWaiter>,
    ) -> AcquireReply {
        self.insert_waiter(request, shared, position, reservation);
        self.grant_next();
        let Some(waiter) = self.waiters.get_mut(&position) else {
            return denied(EIO);
        };
        // The reply to the request serves as notification.
        waiter.notify_state = NotifyState::Idle;
        let reply = waiter.reply;
        if reply == AcquireReply::Queued && !request.is_blocking {
            self.waiters.remove(&position);
            return denied(EAGAIN);
        }
        reply
    }

    /// Grants the lock to the next waiters, if possible.
    fn grant_next(&mut self) {
        lock::grant_next(
            self.waiters
                .values_mut()
                .map(|waiter| &mut waiter.lock_waiter),
        );
        for waiter in self.waiters.values_mut() {
            match (waiter.lock_waiter.state, waiter.reply) {
                // No later waiter owns the lock.
                (WaiterState::Waiting, _) => return,
                (WaiterState::Granted { owner_died: warned }, AcquireReply::Queued) => {
                    (waiter.reply, waiter.notify_state) = (
                        AcquireReply::Granted { owner_died: warned },
                        NotifyState::Pending,
                    );
                }
                _ => {}
            }
        }
    }

    fn arrive_at_barrier(
        &mut self,
        request: &EnqueueRequest,
        count: u32,
        position: u64,
        reservation: RBTreeNodeReservation<u64, QueuedWaiter>,
    ) -> AcquireReply {
        let Some(barrier) = &mut self.barrier else {
            return denied(EIO);
        };
        match barrier.arrive(count) {
            ArriveResult::CountMismatch => denied(EINVAL),
            ArriveResult::Wait => {
                self.insert_waiter(request, true, position, reservation);
                AcquireReply::Queued
            }
            ArriveResult::Release(generation) => {
                let reply = AcquireReply::BarrierPassed(generation);
                let waiting = self.waiters.values_mut();
                for waiter in waiting.filter(|waiter| waiter.reply == AcquireReply::Queued) {
                    (waiter.reply, waiter.notify_state) = (reply, NotifyState::Pending);
                }
                reply
            }
        }
    }

    /// Returns `true` if the queue can be removed: it belongs to a lock and has no entries. Barriers keep
    /// their generation.
    fn is_unused(&self) -> bool {
        self.barrier.is_none() && self.waiters.is_empty()
    }

    /// Removes a waiter. Returns the number of removed entries.
    fn remove_waiter(&mut self, waiter_id: WaiterId, reason: ReleaseReason) -> u32 {
        let Some(position) = self.find_position(|waiter| waiter.id == waiter_id) else {
            return 0;
        };
        let tombstone = self.tombstone_position();
        let Some(waiter) = self.waiters.get_mut(&position) else {
            return 0;
        };
        let removal = waiter.release(&mut self.barrier, reason);
        let mut removed = 0;
        if removal != Removal::None {
            self.waiters.remove(&position);
            removed += 1;
        }
        if let (Removal::WaiterAndTombstone, Some(tombstone_position)) = (removal, tombstone) {
            self.waiters.remove(&tombstone_position);
            removed += 1;
        }
        self.grant_after_removal();
        removed
    }

    /// Removes all waiters for which `is_gone` returns `true`. Returns the number of removed entries.
    fn remove_gone(&mut self, is_gone: impl Fn(WaiterId, u64, bool) -> bool) -> u32 {
        let mut removed = 0;
        let mut next = self.waiters.cursor_front_mut();
        while let Some(mut cursor) = next {
            let (_, waiter) = cursor.current_mut();
            let is_waiting = waiter.reply == AcquireReply::Queued;
            let remove = waiter.lock_waiter.state != WaiterState::OwnerDied
                && is_gone(waiter.id, waiter.mapping, is_waiting);
            next = if remove
                && waiter.release(&mut self.barrier, ReleaseReason::OwnerDied) != Removal::None
            {
                removed += 1;
                cursor.remove_current().0
            } else {
                cursor.move_next()
            };
        }
        self.grant_after_removal();
        removed
    }

    /// Grants the lock after entries were removed.
    fn grant_after_removal(&mut self) {
        if self.barrier.is_none() {
            self.grant_next();
        }
    }

    fn claim_notification(&mut self) -> Option<u32> {
        let is_pending = |waiter: &&mut QueuedWaiter| waiter.notify_state == NotifyState::Pending;
        let node = self.waiters.values_mut().find(is_pending)?.id.instance.node;
        let pending = self.waiters.values_mut().filter(is_pending);
        for waiter in pending.filter(|waiter| waiter.id.instance.node == node) {
            waiter.notify_state = NotifyState::InProgress;
        }
        Some(node)
    }
}
