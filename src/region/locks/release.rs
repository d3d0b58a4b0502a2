// SPDX-License-Identifier: GPL-2.0

//! Release of locks, and cancellation of tickets.
//!
//! # Operation
//!
//! The holder of a ticket requests the removal of the ticket from the home. A lock is released after all
//! earlier writes of the mapping have taken effect.
//!
//! # Recovery
//!
//! If the home does not reply in time, the release continues in the background until the home replies or is
//! fenced.

use super::Ticket;
use crate::{
    control::{
        client::ControlClient,
        priority::WorkPriority,
        reply_code::is_gone_error,
        retry::{CONTROL_TIMEOUT_MS, DRAIN_POLL_MS, RETRY_MS},
    },
    errno::{self, TryError},
    fabric::peer::{session::SequenceGuard, Peer},
    region::{home::waiters::WaiterRemoval, map::Mapping, MemoryService},
    sys::deadline::{retry_until, Deadline},
};
use kernel::{
    prelude::*,
    sync::Arc,
    time::{delay::fsleep, Delta},
};
use kite_core::{sync::lock::ReleaseReason, wire::ControlRequest};

/// Maximum time in ms that a cancelling caller waits for the home. Otherwise the next request of the caller
/// could queue behind the canceled one.
const RELEASE_INLINE_MS: u32 = 500;

impl Ticket {
    /// Cancels the ticket, which may or may not exist at the home. Falls back to the background if the home
    /// does not reply.
    pub(crate) fn cancel(&self, service: &Arc<MemoryService>) {
        TicketRelease::cancellation(*self, None).cancel(service);
    }

    /// Releases the lock, which was acquired through `mapping`, after all earlier writes of the mapping have
    /// taken effect. If the home does not reply before the deadline, the release continues in the background.
    ///
    /// # Errors
    ///
    /// - `ESTALE`: the region was freed.
    /// - `EACCES`: the rights were revoked.
    /// - `EHOSTDOWN`: the home died, or this node left the cluster.
    /// - `EOWNERDEAD`: the home was unreachable since the lock was acquired. Another node may own the lock.
    /// - `EBADF`: the handle was closed.
    pub(crate) fn unlock(
        &self,
        service: &Arc<MemoryService>,
        reason: ReleaseReason,
        mapping: &Arc<Mapping>,
        deadline: Deadline,
    ) -> Result {
        // A mapping that has ended owns no locks any longer.
        drop(mapping.access()?);
        let drained = retry_until(deadline, || {
            let is_drained = service.is_drained(mapping);
            is_drained.then_some(()).ok_or(TryError::WouldBlock)
        });
        let mut release = TicketRelease::new(*self, reason, None);
        match drained.and_then(|()| release.try_send(service, deadline)) {
            Ok(()) => Ok(()),
            Err(error) if error == ENOENT => Err(errno::stale()),
            Err(error) if is_gone_error(error) => Err(self.lost_error(service)),
            Err(_) => {
                release.mapping = Some(mapping.clone());
                release.send_deferred(service);
                Ok(())
            }
        }
    }
}

/// Release of a ticket.
pub(super) struct TicketRelease {
    ticket: Ticket,
    reason: ReleaseReason,
    /// Sequence number of the request for the ticket. The number stays reserved until the release ends.
    _seq_guard: Option<SequenceGuard>,
    /// Mapping that must be drained before the release.
    mapping: Option<Arc<Mapping>>,
}

impl TicketRelease {
    fn new(ticket: Ticket, reason: ReleaseReason, seq_guard: Option<SequenceGuard>) -> Self {
        Self {
            ticket,
            reason,
            _seq_guard: seq_guard,
            mapping: None,
        }
    }

    /// Creates the cancellation of a ticket.
    pub(super) fn cancellation(ticket: Ticket, seq_guard: Option<SequenceGuard>) -> Self {
        Self::new(ticket, ReleaseReason::Canceled, seq_guard)
    }

    /// Cancels the ticket. See [`Ticket::cancel`].
    pub(super) fn cancel(self, service: &Arc<MemoryService>) {
        let released = self.try_send(service, Deadline::after_ms(RELEASE_INLINE_MS));
        if released.is_err_and(|error| !is_gone_error(error)) {
            self.send_deferred(service);
        }
    }

    /// Removes the ticket at the home.
    ///
    /// # Errors
    ///
    /// Errors for which [`is_gone_error`] returns `true` mean that the ticket does not exist any longer.
    /// After any other error the outcome is unknown.
    fn try_send(&self, service: &Arc<MemoryService>, deadline: Deadline) -> Result {
        let (ticket, reason) = (&self.ticket, self.reason);
        match ticket.home_peer(service)? {
            None => ticket.removal(reason).execute(service),
            Some(peer) => service
                .request_peer(&peer, &ticket.remove_request(reason), deadline)?
                .expect_done(),
        }
    }

    /// Removes the ticket in the background, once the mapping is drained.
    fn send_deferred(self, service: &Arc<MemoryService>) {
        let priority = if self.needs_drain(service) {
            WorkPriority::Background
        } else {
            WorkPriority::Lock
        };
        let home = self.ticket.home_instance.node;
        service.defer(home, priority, move |service, _| {
            if self.needs_drain(service) {
                fsleep(Delta::from_millis(DRAIN_POLL_MS));
                return self.send_deferred(service);
            }
            while let Err(error) = self.try_send(service, Deadline::after_ms(CONTROL_TIMEOUT_MS)) {
                if is_gone_error(error) {
                    break;
                }
                fsleep(Delta::from_millis(RETRY_MS));
            }
        });
    }

    fn needs_drain(&self, service: &MemoryService) -> bool {
        let mapping = self.mapping.as_ref();
        mapping.is_some_and(|mapping| !service.is_drained(mapping))
    }
}

impl Ticket {
    /// Returns the peer that is the home of the ticket, or `None` if this node is the home.
    ///
    /// # Errors
    ///
    /// - `EHOSTDOWN`: either node is not in the incarnation of the ticket any longer, or was fenced since.
    ///   Another incarnation could use the same number for another ticket.
    pub(super) fn home_peer(&self, service: &MemoryService) -> Result<Option<Arc<Peer>>> {
        if self.home_instance == self.local_instance {
            let is_member = service.cluster.is_member(self.home_instance);
            return is_member.then_some(None).ok_or_else(errno::hostdown);
        }
        let peer = service.fabric().peer_by_instance(self.home_instance)?;
        let same = peer.identity.local.instance == self.local_instance
            && peer.identity.admission == self.admission;
        same.then_some(Some(peer)).ok_or_else(errno::hostdown)
    }

    /// Returns the error of an unlock of which the home has no ticket any longer.
    fn lost_error(&self, service: &MemoryService) -> Error {
        if service.cluster.is_member(self.home_instance) {
            errno::ownerdead()
        } else {
            errno::hostdown()
        }
    }

    /// Returns the removal of the ticket, for a region of this home.
    fn removal(&self, reason: ReleaseReason) -> WaiterRemoval {
        WaiterRemoval {
            region: self.region,
            queue_key: self.queue_key(),
            waiter_id: self.waiter_id(),
            reason,
        }
    }

    /// Returns the request that removes the ticket at another home.
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
