// SPDX-License-Identifier: GPL-2.0

//! Locks and barriers of regions, as used by this node (LITE, section 7.2).
//!
//! # Operation
//!
//! The home keeps the wait queues ([`super::home::waiters`]) and replies at once: granted, queued or
//! denied. A queued waiter polls adaptively and then sleeps until the home sends `NotifyGranted`. Each
//! request of a node has a ticket. Its number is the sequence number of the request.
//!
//! # Recovery
//!
//! - A lock request with unknown outcome is cancelled, in the background if need be. So no node owns a lock
//!   without having received the grant. The tests of `kite_core::sync::lock` cover the interleavings.
//! - Waiters of a dead node are removed only after all members have synchronized the view without that node.
//!   Until then, the dead node may still act as owner.

pub(super) mod local_waiters;

use self::local_waiters::LocalWaiter;
use super::{
    home::lock_table::{EnqueueRequest, WaitQueueKey, WaiterId},
    map::Mapping,
    MemoryService,
};
use crate::{
    control::{
        client::ControlClient,
        priority::WorkPriority,
        reply_code::is_gone_error,
        retry::{CONTROL_TIMEOUT_MS, DRAIN_POLL_MS, RETRY_MS},
    },
    errno::{self, TryError, TryResult},
    fabric::peer::{session::SequenceGuard, Peer},
    sys::deadline::{retry_until, Deadline},
    trace,
};
use kernel::{
    prelude::*,
    sync::Arc,
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

/// Maximum time in ms that a cancelling caller waits for the home. Otherwise the next request of the caller
/// could queue behind the cancelled one.
const RELEASE_INLINE_MS: u32 = 500;

/// Acquisition of a lock or arrival at a barrier of a region.
pub(crate) struct SyncRequest {
    /// Number of the lock or barrier.
    pub(crate) sync_id: u64,
    pub(crate) kind: AcquireKind,
    pub(crate) is_blocking: bool,
    pub(crate) deadline: Deadline,
}

/// Ticket of this node: identifies one waiter or owner at the home.
#[derive(Clone, Copy)]
pub(crate) struct Ticket {
    /// Incarnations of both nodes when the ticket was created.
    local_instance: NodeInstance,
    home_instance: NodeInstance,
    region: u64,
    number: u64,
    sync_id: u64,
    kind: AcquireKind,
}

impl MemoryService {
    /// Acquires a lock of a mapped region, or passes a barrier. Returns the ticket and the reply.
    ///
    /// # Errors
    ///
    /// See `struct kite_lock` and `struct kite_barrier` in `include/uapi/kite.h`.
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
        // Check after reading the incarnation: if the mapping is valid, the region is at this incarnation of
        // the home.
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
        let waiter_guard = self.waiters().register(&ticket)?;
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

    /// Reserves a sequence number for an exactly-once request. Returns `None` if this node is the home.
    fn reserve_seq(&self, home: NodeInstance, deadline: Deadline) -> Result<Option<SequenceGuard>> {
        if self.cluster.local_node()? == home.node {
            return Ok(None);
        }
        let peer = self.fabric().peer_by_instance(home)?;
        retry_until(deadline, || peer.assign_sequence(0)).map(Some)
    }

    /// Requests a ticket from the home. Cancels the ticket if the outcome is unknown.
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
        // Keep the sequence number reserved until the ticket is certainly cancelled.
        reply.inspect_err(|_| self.cancel_ticket(ticket, Some(seq_guard)))
    }

    /// Waits until the ticket is granted. Cancels the ticket on error.
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
            .busy_poll(&self.waiters().spin, || waiter.reply().is_some());
        loop {
            if let Some(reply) = waiter.reply() {
                return Ok(reply);
            }
            let woken = waiter
                .completion
                .wait_interruptible_timeout_ms(deadline.slice_ms());
            let signal = woken.map(drop).or_else(|_| deadline.handle_signal());
            let valid = mapping.access().map(drop).and(signal);
            let in_time = valid.and_then(|()| deadline.check());
            // The reply may have arrived meanwhile, in which case the ticket is granted.
            if let (Err(error), None) = (in_time, waiter.reply()) {
                self.cancel_ticket(ticket, None);
                return Err(error);
            }
        }
    }

    /// Cancels a ticket that may or may not exist at the home. Falls back to the background if the home does
    /// not reply.
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

    /// Releases a lock that was acquired through `mapping`, after all earlier writes of the mapping have
    /// taken effect. If the home does not reply before the deadline, the release continues in the background.
    ///
    /// # Errors
    ///
    /// - `ESTALE`: the region was freed.
    /// - `EACCES`: the rights were revoked.
    /// - `EHOSTDOWN`: the home died, or this node left the cluster.
    /// - `EBADF`: the handle was closed.
    pub(crate) fn unlock(
        self: &Arc<Self>,
        ticket: &Ticket,
        reason: ReleaseReason,
        mapping: &Arc<Mapping>,
        deadline: Deadline,
    ) -> Result {
        // A mapping that has ended owns no locks any longer.
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

    fn check_drained(&self, mapping: &Mapping) -> TryResult {
        let drained = self.is_drained(mapping);
        drained.then_some(()).ok_or(TryError::WouldBlock)
    }

    /// Removes a ticket at the home.
    ///
    /// # Errors
    ///
    /// Errors for which [`is_gone_error`] returns `true` mean that the ticket does not exist any longer.
    /// After any other error the outcome is unknown.
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

    /// Returns the peer that is the home of the ticket, or `None` if this node is the home.
    ///
    /// # Errors
    ///
    /// - `EHOSTDOWN`: either node is not in the incarnation of the ticket any longer. Another incarnation
    ///   could use the same number for another ticket.
    fn home_peer(&self, ticket: &Ticket) -> Result<Option<Arc<Peer>>> {
        if ticket.home_instance == ticket.local_instance {
            let is_member = self.cluster.is_member(ticket.home_instance);
            return is_member.then_some(None).ok_or_else(errno::hostdown);
        }
        let peer = self.fabric().peer_by_instance(ticket.home_instance)?;
        let same = peer.identity.local.instance == ticket.local_instance;
        same.then_some(Some(peer)).ok_or_else(errno::hostdown)
    }

    /// Removes a ticket in the background, once the mapping is drained. The sequence number stays reserved
    /// until then.
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
    // The home returns `ENOENT` while the region is being freed.
    if error == ENOENT {
        errno::stale()
    } else {
        error
    }
}
