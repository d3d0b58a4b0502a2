// SPDX-License-Identifier: GPL-2.0

//! Who has, or waits for, the locks and barriers of a region, at its home.
//!
//! A region has as many of either as there are numbers, and each that is in use is a line of tickets
//! (`kite_core::{lock, barrier, ticket}`). A ticket ends with the mapping by which it was asked for. Its
//! bearer is told in the background when what it waited for has come, and until then its place says so.

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

/// Tickets and barriers that one region has room for.
const MAX_WAITERS: u32 = crate::bindings::KITE_WAITERS_MAX;

/// Which lock, or which barrier.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct WaitQueueKey {
    is_barrier: bool,
    sync_id: u64,
}

impl WaitQueueKey {
    /// That of a wish, with the number that the user gave it.
    pub(crate) fn new(kind: AcquireKind, number: u64) -> Self {
        Self {
            is_barrier: matches!(kind, AcquireKind::Barrier { .. }),
            sync_id: number,
        }
    }
}

/// Whose a ticket is, and its number there.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct WaiterId {
    pub(crate) instance: NodeInstance,
    pub(crate) ticket: u64,
}

/// What its bearer is yet to hear of a ticket.
#[derive(Clone, Copy, PartialEq, Eq)]
enum NotifyState {
    Idle,
    /// It waited, and waits no more.
    Pending,
    /// Somebody is about to tell.
    InProgress,
}

/// A place in a line.
struct QueuedWaiter {
    id: WaiterId,
    mapping: u64,
    /// Of a barrier: it shares, and has it when all have come.
    lock_waiter: LockWaiter,
    reply: AcquireReply,
    notify_state: NotifyState,
}

impl QueuedWaiter {
    /// Ends it, in a line with that barrier if any.
    fn release(&mut self, barrier: &mut Option<Barrier>, reason: ReleaseReason) -> Removal {
        if let (Some(barrier), AcquireReply::Queued) = (barrier, self.reply) {
            barrier.cancel_wait();
        }
        // Nobody hears of it any more.
        self.notify_state = NotifyState::Idle;
        self.lock_waiter.release(reason)
    }
}

struct WaitQueue {
    /// Nothing if it is a lock.
    barrier: Option<Barrier>,
    /// In the order in which they came.
    waiters: RBTree<u64, QueuedWaiter>,
}

/// Memory for a ticket, and for the line if there is none yet.
pub(crate) struct WaiterReservation {
    queue: RBTreeNodeReservation<WaitQueueKey, WaitQueue>,
    waiter: RBTreeNodeReservation<u64, QueuedWaiter>,
}

impl WaiterReservation {
    /// Gets the memory.
    pub(crate) fn new(payer: &Memcg) -> Result<Self> {
        payer.with_active(|| {
            Ok(Self {
                queue: RBTreeNodeReservation::new(GFP_KERNEL_ACCOUNT)?,
                waiter: RBTreeNodeReservation::new(GFP_KERNEL_ACCOUNT)?,
            })
        })
    }
}

/// A ticket that is asked for.
pub(crate) struct EnqueueRequest {
    pub(crate) waiter_id: WaiterId,
    pub(crate) mapping: u64,
    pub(crate) sync_id: u64,
    pub(crate) kind: AcquireKind,
    pub(crate) is_blocking: bool,
}

impl EnqueueRequest {
    /// The line that it is for.
    pub(crate) fn queue_key(&self) -> WaitQueueKey {
        WaitQueueKey::new(self.kind, self.sync_id)
    }
}

/// The lines of a region.
pub(crate) struct LockTable {
    queues: RBTree<WaitQueueKey, WaitQueue>,
    /// Where the next ticket stands.
    next_position: u64,
    waiter_count: u32,
    barrier_count: u32,
}

/// What is said of a ticket that there is not.
pub(crate) fn denied(error: Error) -> AcquireReply {
    AcquireReply::Denied(error.to_errno().unsigned_abs() as u16)
}

impl LockTable {
    /// None.
    pub(crate) fn new() -> Self {
        Self {
            queues: RBTree::new(),
            next_position: 1,
            waiter_count: 0,
            barrier_count: 0,
        }
    }

    /// Gives out a ticket. Others may have news then.
    pub(crate) fn enqueue(
        &mut self,
        request: &EnqueueRequest,
        reservation: WaiterReservation,
    ) -> AcquireReply {
        let queue_key = request.queue_key();
        let existing = self.queues.get(&queue_key);
        // A barrier that is new needs room too. Who takes over from a dead one has the room of that.
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

    /// Ends a ticket, if it is there. Others may have news then.
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

    /// Ends all tickets whose bearers or mappings are gone, as `is_gone` says; it is told too whether they
    /// wait still. Others may have news then.
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

    /// A node whose tickets in a line have news, of which nobody is about to tell; who asks is.
    pub(crate) fn claim_notification(&mut self, queue_key: WaitQueueKey) -> Option<u32> {
        self.queues.get_mut(&queue_key)?.claim_notification()
    }

    /// As [`Self::take_news`], in any line.
    pub(crate) fn claim_any_notification(&mut self) -> Option<(WaitQueueKey, u32)> {
        let mut queues = self.queues.iter_mut();
        queues.find_map(|(queue_key, queue)| Some((*queue_key, queue.claim_notification()?)))
    }

    /// A ticket of a node that has news, in a line.
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

    /// The bearer has heard. Who passed a barrier is there no more.
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
    /// Where the first ticket stands that `which` chooses.
    fn find_position(&self, predicate: impl Fn(&QueuedWaiter) -> bool) -> Option<u64> {
        let mut waiters = self.waiters.iter();
        let found = waiters.find(|(_, waiter)| {
            waiter.lock_waiter.state != WaiterState::OwnerDied && predicate(waiter)
        });
        found.map(|(position, _)| *position)
    }

    /// Whether there is one that died with the lock, and nobody else.
    fn has_only_tombstone(&self) -> bool {
        self.tombstone_position().is_some() && self.waiters.iter().nth(1).is_none()
    }

    /// Where the one stands that died with the lock, if one did: before all others.
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
        // It hears by the answer.
        waiter.notify_state = NotifyState::Idle;
        let reply = waiter.reply;
        if reply == AcquireReply::Queued && !request.is_blocking {
            self.waiters.remove(&position);
            return denied(EAGAIN);
        }
        reply
    }

    /// Gives the lock to those whose turn it is.
    fn grant_next(&mut self) {
        lock::grant_next(
            self.waiters
                .values_mut()
                .map(|waiter| &mut waiter.lock_waiter),
        );
        for waiter in self.waiters.values_mut() {
            match (waiter.lock_waiter.state, waiter.reply) {
                // Nobody behind it has the lock.
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

    /// Whether nobody stands in it, or ever will.
    fn is_unused(&self) -> bool {
        self.barrier.is_none() && self.waiters.is_empty()
    }

    /// Ends a ticket; returns how many are in line no more.
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

    /// Ends all tickets that are gone; returns how many are in line no more.
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

    /// After some have ended.
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
