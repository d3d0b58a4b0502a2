// SPDX-License-Identifier: GPL-2.0

//! Standing in line for the locks of a region, and at its barriers (LITE, section 7.2).
//!
//! The home gives out tickets ([`super::home::lock_table`]) and says at once what it can; who has to wait is told when
//! the time has come. A request whose fate is not known is taken back, in the background if need be, so
//! nobody holds a lock without knowing it: the tests of `kite_core::sync::lock` try out what can happen. The
//! tickets of a node that died end when no other node can be reached by it any more, since until then it may
//! believe that it has its locks.

use super::{
    home::{
        lock_table::{denied, EnqueueRequest, WaitQueueKey, WaiterId},
        reclaim::{WorkPriority, DRAIN_POLL_MS, RETRY_MS},
        Region,
    },
    map::Mapping,
    MemoryService, CONTROL_TIMEOUT_MS,
};
use crate::{
    errno,
    fabric::peer::{session::SequenceGuard, Peer},
    sys::{
        adaptive_spin::AdaptiveSpin,
        completion::CountingCompletion,
        deadline::{retry_until, Deadline},
    },
    trace,
};
use core::cell::Cell;
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    new_spinlock,
    prelude::*,
    rbtree::{RBTree, RBTreeNode},
    sync::{
        atomic::{Acquire, Atomic, Release},
        Arc, SpinLock,
    },
    time::{delay::fsleep, Delta},
};
use kite_core::{
    sync::{
        lock::ReleaseReason,
        ticket::{AcquireKind, AcquireReply},
    },
    view::NodeInstance,
    wire::{ControlReply, ControlRequest},
};

/// How long who gave up waits for the home to know, so that he does not meet himself in line.
const RELEASE_INLINE_MS: u32 = 500;

/// Time between looks whether the region is still there.
const WAIT_SLICE_MS: u32 = 50;

/// What a user wants of a region besides its memory.
pub(crate) struct SyncRequest {
    /// Number of the lock or barrier.
    pub(crate) sync_id: u64,
    pub(crate) kind: AcquireKind,
    pub(crate) is_blocking: bool,
    pub(crate) deadline: Deadline,
}

/// A ticket of this node.
#[derive(Clone, Copy)]
pub(crate) struct Ticket {
    /// The lives in which it was given out.
    local_instance: NodeInstance,
    home_instance: NodeInstance,
    region: u64,
    number: u64,
    sync_id: u64,
    kind: AcquireKind,
}

/// Who waits for word of a ticket.
#[pin_data]
struct LocalWaiter {
    /// A word of [`Said`], or 0.
    reply_word: Atomic<u64>,
    #[pin]
    completion: CountingCompletion,
}

impl LocalWaiter {
    fn reply(&self) -> Option<AcquireReply> {
        let reply = AcquireReply::from_word(self.reply_word.load(Acquire));
        reply.filter(|reply| *reply != AcquireReply::Cancelled)
    }
}

/// The tickets of this node of which somebody waits to hear, by their homes.
#[pin_data]
pub(super) struct LocalWaiters {
    #[pin]
    table: SpinLock<RBTree<(NodeInstance, u64), Arc<LocalWaiter>>>,
    spin: AdaptiveSpin,
}

/// Somebody waits, until this is dropped.
struct WaiterGuard<'a> {
    waiters: &'a LocalWaiters,
    key: (NodeInstance, u64),
    waiter: Arc<LocalWaiter>,
}

impl LocalWaiters {
    /// None.
    pub(super) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            table <- new_spinlock!(RBTree::new()),
            spin: AdaptiveSpin::new(),
        })
    }

    fn register(&self, ticket: &Ticket) -> Result<WaiterGuard<'_>> {
        let waiter = Arc::pin_init(
            pin_init!(LocalWaiter { reply_word: Atomic::new(0u64), completion <- CountingCompletion::new() }),
            GFP_KERNEL_ACCOUNT,
        )?;
        let key = (ticket.home_instance, ticket.number);
        let node = RBTreeNode::new(key, waiter.clone(), GFP_KERNEL_ACCOUNT)?;
        self.table.lock().insert(node);
        Ok(WaiterGuard {
            waiters: self,
            key,
            waiter,
        })
    }

    fn complete(&self, home: NodeInstance, ticket: u64, reply: AcquireReply) {
        let waiter = self.table.lock().get(&(home, ticket)).cloned();
        if let Some(waiter) = waiter {
            waiter.reply_word.store(reply.to_word(), Release);
            waiter.completion.complete();
        }
    }
}

impl Drop for WaiterGuard<'_> {
    fn drop(&mut self) {
        let removed = self.waiters.table.lock().remove_node(&self.key);
        drop(removed);
    }
}

impl MemoryService {
    /// Takes a lock of a mapped region, or passes a barrier; says which, and by which ticket.
    ///
    /// # Errors
    ///
    /// As `struct kite_lock` and `struct kite_barrier` in `include/uapi/kite.h` say.
    pub(crate) fn acquire_sync(
        self: &Arc<Self>,
        mapping: &Mapping,
        sync_request: &SyncRequest,
    ) -> Result<(Ticket, AcquireReply)> {
        let result = self.do_acquire_sync(mapping, sync_request);
        match (&result, sync_request.kind) {
            (Err(_), _) => self.stats.errors.add(1),
            (Ok(_), AcquireKind::Lock { .. }) => self.stats.locks.add(1),
            (Ok(_), AcquireKind::Barrier { .. }) => self.stats.barriers.add(1),
        }
        let errno = result.as_ref().err().map_or(0, |error| error.to_errno());
        let is_barrier = matches!(sync_request.kind, AcquireKind::Barrier { .. });
        trace::sync(
            is_barrier,
            mapping.home,
            mapping.region,
            sync_request.sync_id,
            errno,
        );
        result
    }

    fn do_acquire_sync(
        self: &Arc<Self>,
        mapping: &Mapping,
        sync_request: &SyncRequest,
    ) -> Result<(Ticket, AcquireReply)> {
        let home = self.cluster.instance_of(mapping.home)?;
        // In which the region is, if it is not lost by now.
        drop(mapping.access()?);
        mapping.note_waiter();
        let seq_guard = self.reserve_seq(home, sync_request.deadline)?;
        let (local_instance, number) = match &seq_guard {
            Some(seq_guard) => (seq_guard.peer.identity.local.instance, seq_guard.sequence),
            None => (home, self.new_id()),
        };
        let ticket = Ticket {
            local_instance,
            home_instance: home,
            region: mapping.region,
            number,
            sync_id: sync_request.sync_id,
            kind: sync_request.kind,
        };
        let waiter_guard = self.waiters.register(&ticket)?;
        let reply = match self.request_ticket(&ticket, mapping.id, sync_request, seq_guard)? {
            AcquireReply::Queued => self.wait_granted(
                mapping,
                &ticket,
                &waiter_guard.waiter,
                sync_request.deadline,
            )?,
            reply => reply,
        };
        match (ticket.kind, reply) {
            (_, AcquireReply::Denied(errno)) => Err(denied_error(errno)),
            (AcquireKind::Lock { .. }, AcquireReply::Granted { .. }) => Ok((ticket, reply)),
            (AcquireKind::Barrier { .. }, AcquireReply::BarrierPassed(_)) => Ok((ticket, reply)),
            _ => {
                self.cancel_ticket(&ticket, None);
                Err(EIO)
            }
        }
    }

    /// A number for a request that another node must not do twice; nothing if it is this one.
    fn reserve_seq(&self, home: NodeInstance, deadline: Deadline) -> Result<Option<SequenceGuard>> {
        if self.cluster.local_node()? == home.node {
            return Ok(None);
        }
        let peer = self.fabric().peer_by_instance(home)?;
        retry_until(deadline, || peer.assign_sequence(0)).map(Some)
    }

    /// Asks the home for a ticket. If it is not known what came of it, it is taken back.
    fn request_ticket(
        self: &Arc<Self>,
        ticket: &Ticket,
        mapping: u64,
        sync_request: &SyncRequest,
        seq_guard: Option<SequenceGuard>,
    ) -> Result<AcquireReply> {
        let Some(seq_guard) = seq_guard else {
            let enqueue_request = EnqueueRequest {
                waiter_id: ticket.waiter_id(),
                mapping,
                sync_id: ticket.sync_id,
                kind: ticket.kind,
                is_blocking: sync_request.is_blocking,
            };
            return self.serve_enqueue_waiter(ticket.region, &enqueue_request, None);
        };
        let request = ControlRequest::EnqueueWaiter {
            ticket: ticket.number,
            region: ticket.region,
            mapping,
            sync_id: ticket.sync_id,
            kind: ticket.kind,
            is_blocking: sync_request.is_blocking,
        };
        let answer = self.request_peer(&seq_guard.peer, &request, sync_request.deadline);
        let reply = answer.and_then(|answer| match answer.decode()? {
            ControlReply::OldValue { word } => AcquireReply::from_word(word).ok_or(EIO),
            _ => Err(EIO),
        });
        // Its number is not used again before that is certain.
        reply.inspect_err(|_| self.cancel_ticket(ticket, Some(seq_guard)))
    }

    /// Waits until the ticket has what it is for. If that does not happen, it is given up.
    fn wait_granted(
        self: &Arc<Self>,
        mapping: &Mapping,
        ticket: &Ticket,
        waiter: &LocalWaiter,
        deadline: Deadline,
    ) -> Result<AcquireReply> {
        self.stats.lock_waits.add(1);
        let _spin_sample = self
            .fabric()
            .busy_poll(&self.waiters.spin, || waiter.reply().is_some());
        loop {
            if let Some(reply) = waiter.reply() {
                return Ok(reply);
            }
            let woken = waiter
                .completion
                .wait_interruptible_timeout_ms(deadline.remaining_ms().min(WAIT_SLICE_MS));
            let signal = woken.map(drop).or_else(|_| deadline.handle_signal());
            let valid = mapping.access().map(drop).and(signal);
            let in_time = valid.and_then(|()| deadline.check());
            // The word may have come meanwhile.
            if let (Err(error), None) = (in_time, waiter.reply()) {
                self.cancel_ticket(ticket, None);
                return Err(error);
            }
        }
    }

    /// Ends a ticket of which it may not be known whether it is there, soon if not at once.
    pub(crate) fn cancel_ticket(
        self: &Arc<Self>,
        ticket: &Ticket,
        seq_guard: Option<SequenceGuard>,
    ) {
        let released = self.release_ticket(
            ticket,
            ReleaseReason::Cancelled,
            Deadline::after_ms(RELEASE_INLINE_MS),
        );
        if released.is_err_and(|error| !is_gone_error(error)) {
            self.release_ticket_deferred(*ticket, ReleaseReason::Cancelled, seq_guard, None);
        }
    }

    /// Gives a lock back that was taken by `mapping`, when nothing that was written by it can come late.
    ///
    /// # Errors
    ///
    /// `ESTALE` if the region was freed, `EACCES` if the rights were revoked, `EHOSTDOWN` if its home died, or
    /// this node did. If it takes longer than until the deadline, it is done in the background.
    pub(crate) fn unlock(
        self: &Arc<Self>,
        ticket: &Ticket,
        reason: ReleaseReason,
        mapping: &Arc<Mapping>,
        deadline: Deadline,
    ) -> Result {
        // If that has ended, so has the lock.
        drop(mapping.access()?);
        let drained = retry_until(deadline, || self.check_drained(mapping));
        match drained.and_then(|()| self.release_ticket(ticket, reason, deadline)) {
            Ok(()) => Ok(()),
            Err(error) if error == ENOENT => Err(errno::stale()),
            Err(error) if is_gone_error(error) => Err(errno::hostdown()),
            Err(_) => {
                self.release_ticket_deferred(*ticket, reason, None, Some(mapping.clone()));
                Ok(())
            }
        }
    }

    fn check_drained(&self, mapping: &Mapping) -> Result {
        let drained = self.is_drained(mapping);
        drained.then_some(()).ok_or(EAGAIN)
    }

    /// Ends a ticket.
    ///
    /// # Errors
    ///
    /// Those for which [`is_over`] holds if there is nothing to end any more; others if it is not known
    /// whether it has ended.
    fn release_ticket(
        self: &Arc<Self>,
        ticket: &Ticket,
        reason: ReleaseReason,
        deadline: Deadline,
    ) -> Result {
        match self.home_peer(ticket)? {
            None => self.remove_waiter_at_home(
                ticket.region,
                ticket.queue_key(),
                ticket.waiter_id(),
                reason,
            ),
            Some(peer) => self
                .request_peer(&peer, &ticket.remove_request(reason), deadline)?
                .expect_done(),
        }
    }

    /// The home of a ticket, if both nodes are in the life in which it was given out: in another its number
    /// is another's. Nothing if it is this node.
    ///
    /// # Errors
    ///
    /// `EHOSTDOWN` if they are not.
    fn home_peer(&self, ticket: &Ticket) -> Result<Option<Arc<Peer>>> {
        if ticket.home_instance == ticket.local_instance {
            let is_member = self.cluster.is_member(ticket.home_instance);
            return is_member.then_some(None).ok_or_else(errno::hostdown);
        }
        let peer = self.fabric().peer_by_instance(ticket.home_instance)?;
        let same = peer.identity.local.instance == ticket.local_instance;
        same.then_some(Some(peer)).ok_or_else(errno::hostdown)
    }

    /// Ends a ticket in the background, when the mapping is quiet. Its number is kept until then.
    fn release_ticket_deferred(
        self: &Arc<Self>,
        ticket: Ticket,
        reason: ReleaseReason,
        seq_guard: Option<SequenceGuard>,
        mapping: Option<Arc<Mapping>>,
    ) {
        let needs_drain = move |memory_service: &Self, mapping: &Option<Arc<Mapping>>| {
            mapping
                .as_ref()
                .is_some_and(|mapping| !memory_service.is_drained(mapping))
        };
        let priority = if needs_drain(self, &mapping) {
            WorkPriority::Background
        } else {
            WorkPriority::Lock
        };
        self.defer(
            ticket.home_instance.node,
            priority,
            move |memory_service, _| {
                if needs_drain(memory_service, &mapping) {
                    fsleep(Delta::from_millis(DRAIN_POLL_MS));
                    return memory_service
                        .release_ticket_deferred(ticket, reason, seq_guard, mapping);
                }
                while let Err(error) = memory_service.release_ticket(
                    &ticket,
                    reason,
                    Deadline::after_ms(CONTROL_TIMEOUT_MS),
                ) {
                    if is_gone_error(error) {
                        break;
                    }
                    fsleep(Delta::from_millis(RETRY_MS));
                }
                drop(seq_guard);
            },
        );
    }
}

/// Whether an error says that there is nothing to end any more: the region was freed, or the life of the node
/// asked is over, or ours.
pub(super) fn is_gone_error(error: Error) -> bool {
    error == ENOENT || error == errno::hostdown() || error == errno::hostunreach()
}

impl Ticket {
    fn queue_key(&self) -> WaitQueueKey {
        WaitQueueKey::new(self.kind, self.sync_id)
    }

    fn waiter_id(&self) -> WaiterId {
        WaiterId {
            instance: self.local_instance,
            ticket: self.number,
        }
    }

    fn remove_request(&self, reason: ReleaseReason) -> ControlRequest<'static> {
        ControlRequest::RemoveWaiter {
            ticket: self.number,
            region: self.region,
            sync_id: self.sync_id,
            kind: self.kind,
            reason,
        }
    }
}

fn denied_error(errno: u16) -> Error {
    let error = Error::from_errno(-c_int::from(errno));
    // The region is being freed.
    if error == ENOENT {
        errno::stale()
    } else {
        error
    }
}

/// At the home.
impl MemoryService {
    /// Gives out a ticket; if to a peer, once.
    pub(super) fn serve_enqueue_waiter(
        self: &Arc<Self>,
        region: u64,
        enqueue_request: &EnqueueRequest,
        peer: Option<&Peer>,
    ) -> Result<AcquireReply> {
        let found = self.regions.get(region);
        // Before others of the peer wait for us: whose memory it is may have to wait for some.
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

    /// Ends a ticket of a peer, and sees to it that it comes into being no more.
    pub(super) fn serve_remove_waiter(
        self: &Arc<Self>,
        node: u32,
        ticket: u64,
        (region, queue_key): (u64, WaitQueueKey),
        reason: ReleaseReason,
    ) -> Result {
        let peer = self.fabric().peer(node)?;
        // It may be too late for that too: then it was answered.
        let _ = peer.execute_once(ticket, || Ok(AcquireReply::Cancelled.to_word()));
        let instance = peer.instance();
        self.remove_waiter_at_home(region, queue_key, WaiterId { instance, ticket }, reason)
    }

    fn remove_waiter_at_home(
        self: &Arc<Self>,
        region: u64,
        queue_key: WaitQueueKey,
        waiter_id: WaiterId,
        reason: ReleaseReason,
    ) -> Result {
        let region = self.regions.get(region)?;
        region.remove_waiter(queue_key, waiter_id, reason);
        self.notify_granted(&region, Some(queue_key));
        Ok(())
    }

    /// Takes word from a home: what a ticket waited for has come.
    pub(super) fn serve_granted(&self, home: u32, ticket: u64, reply: AcquireReply) -> Result {
        let home = self.cluster.instance_of(home)?;
        self.waiters.complete(home, ticket, reply);
        Ok(())
    }

    /// Tells, in the background, those whose tickets have what they waited for: of one line, or of all.
    pub(super) fn notify_granted(
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

    /// Tells a node, which may be this one, until it has heard or its life is over.
    fn notify_reliably(self: &Arc<Self>, instance: NodeInstance, ticket: u64, reply: AcquireReply) {
        if self.cluster.local_node() == Ok(instance.node) {
            return self.waiters.complete(instance, ticket, reply);
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

    /// Ends the tickets of nodes that are out of the view, once all have heard that they are.
    pub(super) fn remove_dead_waiters(self: &Arc<Self>) {
        // Most tickets of a line are often of one node, and who is forgotten stays so.
        let last = Cell::new(None);
        let is_forgotten = |instance| match last.get() {
            Some((cached_instance, forgotten)) if cached_instance == instance => forgotten,
            _ => {
                let forgotten = self.cluster.is_fully_removed(instance);
                last.set(Some((instance, forgotten)));
                forgotten
            }
        };
        for region in self.regions.iter() {
            region.remove_dead_waiters(is_forgotten);
            self.notify_granted(&region, None);
        }
    }
}
