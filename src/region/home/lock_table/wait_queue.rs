// SPDX-License-Identifier: GPL-2.0

//! Wait queue of one lock or one barrier.
//!
//! The queue stores the waiters in order of arrival and their notifications. `kite_core::sync` decides which
//! waiters are granted the lock or pass the barrier.
//!
//! # Locking
//!
//! All methods run with the region's `state` mutex held.

use super::{denied, EnqueueRequest, WaiterId};
use kernel::{
    prelude::*,
    rbtree::{RBTree, RBTreeNodeReservation},
};
use kite_core::sync::{
    barrier::{ArriveResult, Barrier},
    lock::{self, LockWaiter, ReleaseReason, Removal, WaiterState},
    ticket::AcquireReply,
};

/// State of the notification of a waiter.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum NotifyState {
    Idle,
    /// The waiter was granted the lock or passed the barrier, and no thread sends the notification yet.
    Pending,
    /// A thread is sending the notification.
    InProgress,
}

/// Entry of a wait queue.
pub(super) struct QueuedWaiter {
    pub(super) id: WaiterId,
    mapping: u64,
    /// For a barrier: a shared waiter, which is granted when all participants have arrived.
    lock_waiter: LockWaiter,
    pub(super) reply: AcquireReply,
    pub(super) notify_state: NotifyState,
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

/// Waiters of one lock or barrier.
pub(super) struct WaitQueue {
    /// `None` if the queue belongs to a lock.
    pub(super) barrier: Option<Barrier>,
    /// Waiters by position, in order of arrival.
    pub(super) waiters: RBTree<u64, QueuedWaiter>,
}

impl WaitQueue {
    /// Returns the position of the first waiter, except the tombstone, for which `predicate` returns `true`.
    pub(super) fn find_position(&self, predicate: impl Fn(&QueuedWaiter) -> bool) -> Option<u64> {
        let mut waiters = self.waiters.iter();
        let found = waiters.find(|(_, waiter)| {
            waiter.lock_waiter.state != WaiterState::OwnerDied && predicate(waiter)
        });
        found.map(|(position, _)| *position)
    }

    /// Returns `true` if the queue contains a tombstone and nothing else.
    pub(super) fn has_only_tombstone(&self) -> bool {
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

    pub(super) fn acquire_lock(
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

    pub(super) fn arrive_at_barrier(
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
    pub(super) fn is_unused(&self) -> bool {
        self.barrier.is_none() && self.waiters.is_empty()
    }

    /// Removes a waiter. Returns the number of removed entries.
    pub(super) fn remove_waiter(&mut self, waiter_id: WaiterId, reason: ReleaseReason) -> u32 {
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
    pub(super) fn remove_gone(&mut self, is_gone: impl Fn(WaiterId, u64, bool) -> bool) -> u32 {
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

    pub(super) fn claim_notification(&mut self) -> Option<u32> {
        let is_pending = |waiter: &&mut QueuedWaiter| waiter.notify_state == NotifyState::Pending;
        let node = self.waiters.values_mut().find(is_pending)?.id.instance.node;
        let pending = self.waiters.values_mut().filter(is_pending);
        for waiter in pending.filter(|waiter| waiter.id.instance.node == node) {
            waiter.notify_state = NotifyState::InProgress;
        }
        Some(node)
    }
}
