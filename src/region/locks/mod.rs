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
//! - A lock request with unknown outcome is canceled, in the background if need be ([`release`]). So no node
//!   owns a lock without having received the grant. The tests of `kite_core::sync::lock` cover the
//!   interleavings.
//! - Waiters of a removed or fenced node are removed only after all members have synchronized the view in
//!   which it was fenced. Until then, the node may still act as owner.
//! - If this node and the home were disconnected since a lock was acquired, the lock is lost: the unlock fails
//!   with `EOWNERDEAD`, and the next owner is notified that its owner died. Waiting threads receive
//!   `EHOSTDOWN`.

pub(super) mod local_waiters;
mod release;

use self::{local_waiters::LocalWaiter, release::TicketRelease};
use super::{
    home::lock_table::{EnqueueRequest, WaitQueueKey, WaiterId},
    map::Mapping,
    MemoryService,
};
use crate::{
    control::client::ControlClient,
    errno,
    fabric::peer::session::SequenceGuard,
    sys::deadline::{retry_until, Deadline},
    trace,
};
use kernel::{prelude::*, sync::Arc};
use kite_core::{
    sync::ticket::{AcquireKind, AcquireReply},
    view::NodeInstance,
    wire::{ControlReply, ControlRequest},
};

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
    /// Incarnations of both nodes, and the admission of their connection, when the ticket was created.
    local_instance: NodeInstance,
    home_instance: NodeInstance,
    admission: u64,
    region: u64,
    number: u64,
    sync_id: u64,
    kind: AcquireKind,
}

impl SyncRequest {
    /// Acquires a lock of a mapped region, or passes a barrier. Returns the ticket and the reply.
    ///
    /// # Errors
    ///
    /// See `struct kite_lock` and `struct kite_barrier` in `include/uapi/kite.h`.
    pub(crate) fn run(
        &self,
        service: &Arc<MemoryService>,
        mapping: &Mapping,
    ) -> Result<(Ticket, AcquireReply)> {
        let acquisition = Acquisition {
            service,
            mapping,
            request: self,
        };
        let result = acquisition.run();
        let stats = &service.stats;
        match (&result, self.kind) {
            (Err(_), _) => stats.errors.add(1),
            (Ok(_), AcquireKind::Lock { .. }) => stats.locks.add(1),
            (Ok(_), AcquireKind::Barrier { .. }) => stats.barriers.add(1),
        }
        let errno = result.as_ref().err().map_or(0, |error| error.to_errno());
        let is_barrier = matches!(self.kind, AcquireKind::Barrier { .. });
        trace::sync(
            is_barrier,
            mapping.home,
            mapping.region,
            self.sync_id,
            errno,
        );
        result
    }
}

/// Acquisition in progress.
struct Acquisition<'a> {
    service: &'a Arc<MemoryService>,
    mapping: &'a Mapping,
    request: &'a SyncRequest,
}

impl Acquisition<'_> {
    fn run(&self) -> Result<(Ticket, AcquireReply)> {
        let (ticket, seq_guard) = self.new_ticket()?;
        let waiter_guard = self.service.waiters().register(&ticket)?;
        let reply = match self.request_ticket(&ticket, seq_guard)? {
            AcquireReply::Queued => self.wait_granted(&ticket, &waiter_guard.waiter)?,
            reply => reply,
        };
        match (ticket.kind, reply) {
            (_, AcquireReply::Denied(errno)) => Err(denied_error(errno)),
            (AcquireKind::Lock { .. }, AcquireReply::Granted { .. }) => Ok((ticket, reply)),
            (AcquireKind::Barrier { .. }, AcquireReply::BarrierPassed(_)) => Ok((ticket, reply)),
            _ => {
                ticket.cancel(self.service);
                Err(EIO)
            }
        }
    }

    /// Creates a ticket. The sequence number of its request is reserved, unless this node is the home.
    fn new_ticket(&self) -> Result<(Ticket, Option<SequenceGuard>)> {
        let home = self.service.cluster.instance_of(self.mapping.home)?;
        // Check after reading the incarnation: if the mapping is valid, the region is at this incarnation of
        // the home.
        self.mapping.wait_home(self.request.deadline)?;
        self.mapping.note_waiter();
        let seq_guard = self.reserve_seq(home)?;
        let (local_instance, admission, number) = match &seq_guard {
            Some(SequenceGuard { peer, sequence }) => {
                let identity = &peer.identity;
                (identity.local.instance, identity.admission, *sequence)
            }
            None => (home, 0, self.service.new_id()),
        };
        let ticket = Ticket {
            local_instance,
            home_instance: home,
            admission,
            region: self.mapping.region,
            number,
            sync_id: self.request.sync_id,
            kind: self.request.kind,
        };
        Ok((ticket, seq_guard))
    }

    /// Reserves a sequence number for an at-most-once request. Returns `None` if this node is the home.
    fn reserve_seq(&self, home: NodeInstance) -> Result<Option<SequenceGuard>> {
        if self.service.cluster.local_node()? == home.node {
            return Ok(None);
        }
        let peer = self.service.fabric().peer_by_instance(home)?;
        retry_until(self.request.deadline, || peer.assign_sequence(0)).map(Some)
    }

    /// Requests a ticket from the home. Cancels the ticket if the outcome is unknown.
    fn request_ticket(
        &self,
        ticket: &Ticket,
        seq_guard: Option<SequenceGuard>,
    ) -> Result<AcquireReply> {
        let (mapping, is_blocking) = (self.mapping.id, self.request.is_blocking);
        let Some(seq_guard) = seq_guard else {
            let enqueue_request = EnqueueRequest {
                waiter_id: ticket.waiter_id(),
                mapping,
                sync_id: ticket.sync_id,
                kind: ticket.kind,
                is_blocking,
            };
            return enqueue_request.execute(self.service, ticket.region, None);
        };
        let request = ControlRequest::EnqueueWaiter {
            ticket: ticket.number,
            region: ticket.region,
            mapping,
            sync_id: ticket.sync_id,
            kind: ticket.kind,
            is_blocking,
        };
        let (peer, deadline) = (&seq_guard.peer, self.request.deadline);
        let answer = self.service.request_peer(peer, &request, deadline);
        let reply = answer.and_then(|answer| match answer.decode()? {
            ControlReply::OldValue { word } => AcquireReply::from_word(word).ok_or(EIO),
            _ => Err(EIO),
        });
        // Keep the sequence number reserved until the ticket is certainly canceled.
        reply.inspect_err(|_| {
            TicketRelease::cancellation(*ticket, Some(seq_guard)).cancel(self.service)
        })
    }

    /// Waits until the ticket is granted. Cancels the ticket on error.
    fn wait_granted(&self, ticket: &Ticket, waiter: &LocalWaiter) -> Result<AcquireReply> {
        let (service, deadline) = (self.service, self.request.deadline);
        service.stats.lock_waits.add(1);
        let _spin_sample = service
            .fabric()
            .busy_poll(&service.waiters().spin, || waiter.reply().is_some());
        loop {
            if let Some(reply) = waiter.reply() {
                return Ok(reply);
            }
            let woken = waiter
                .completion
                .wait_interruptible_timeout_ms(deadline.slice_ms());
            let signal = woken.map(drop).or_else(|_| deadline.handle_signal());
            let is_connected = ticket.home_peer(service).map(drop);
            let valid = self
                .mapping
                .access()
                .map(drop)
                .and(is_connected)
                .and(signal);
            let in_time = valid.and_then(|()| deadline.check());
            // The reply may have arrived meanwhile, in which case the ticket is granted.
            if let (Err(error), None) = (in_time, waiter.reply()) {
                ticket.cancel(service);
                return Err(error);
            }
        }
    }
}

impl Ticket {
    fn queue_key(&self) -> WaitQueueKey {
        WaitQueueKey::new(self.kind, self.sync_id)
    }

    fn waiter_id(&self) -> WaiterId {
        WaiterId {
            instance: self.local_instance,
            admission: self.admission,
            ticket: self.number,
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
