// SPDX-License-Identifier: GPL-2.0

//! Control requests to the kernel of a peer, and their replies.
//!
//! # Operation
//!
//! A request gets an ID and is registered before it is sent. The caller sends on a connection to the peer,
//! and polls or sleeps until the reply arrives. The reply uses the QP on which the last copy of the request
//! arrived: the caller has a receive posted there, because it counts its requests per QP
//! ([`super::endpoint::MAX_CONTROL_REQUESTS`]).
//!
//! # Recovery
//!
//! A request is retransmitted if its QP fails before the reply arrives, or after [`RESEND_AFTER_MS`]. All
//! requests are therefore idempotent (`kite_core::wire`). Each carries a low watermark, below which all
//! requests have ended: the peer drops copies of those (`kite_core::proto::inflight_requests`). If the QP for
//! the reply is gone, the reply is dropped and the caller retransmits. A late reply finds no registered
//! request and is dropped.
//!
//! # Locking
//!
//! - `ControlRequests::table`: spin lock for the IDs and the registered requests.
//! - `PendingControlRequest::reply`: spin lock for the reply.
//!
//! The two locks do not nest, and no holder sleeps.

use super::{conn::credit::ConnCredit, peer::Peer, send::slots::SlotClass, Fabric};
use crate::{
    errno,
    sys::{adaptive_spin::AdaptiveSpin, completion::CountingCompletion, deadline::Deadline},
    trace,
    verbs::{cq::WcStatus, work::RdmaOpcode},
};
use kernel::{
    new_spinlock,
    prelude::*,
    rbtree::{RBTree, RBTreeNodeReservation},
    sync::{Arc, SpinLock},
};
use kite_core::wire::{self, ControlHeader, ControlKind, ControlRequest, MAX_CONTROL_BYTES};

/// Time in ms after which a request is retransmitted: the peer may have lacked memory for the reply.
const RESEND_AFTER_MS: u32 = 2000;

/// Maximum time in ms that sending a reply waits for a QP and a slot.
const REPLY_TIMEOUT_MS: u32 = 2000;

/// A control request that waits for its reply.
#[pin_data]
struct PendingControlRequest {
    node: u32,
    /// Empty until the reply arrives. Has capacity for the longest reply, so the poller does not allocate.
    #[pin]
    reply: SpinLock<KVec<u8>>,
    #[pin]
    replied: CountingCompletion,
}

struct ControlRequestsState {
    inflight: RBTree<u64, Arc<PendingControlRequest>>,
    /// ID of the next request. IDs begin at 1.
    next_id: u64,
}

/// The control requests of this node that wait for replies.
#[pin_data]
pub(crate) struct ControlRequests {
    #[pin]
    table: SpinLock<ControlRequestsState>,
    adaptive_spin: AdaptiveSpin,
}

/// ID of a request, and the low watermark: all requests to the same node with lower IDs have ended.
#[derive(Clone, Copy)]
struct ControlRequestId {
    id: u64,
    low_watermark: u64,
}

impl ControlRequests {
    /// Creates an empty table.
    pub(crate) fn new() -> impl PinInit<Self> {
        let table = ControlRequestsState {
            inflight: RBTree::new(),
            next_id: 1,
        };
        pin_init!(Self {
            table <- new_spinlock!(table, "ControlRequests::table"),
            adaptive_spin: AdaptiveSpin::new(),
        })
    }

    fn register(&self, node: u32) -> Result<(ControlRequestId, Arc<PendingControlRequest>)> {
        let reply = KVec::with_capacity(MAX_CONTROL_BYTES, GFP_KERNEL)?;
        let pending = Arc::pin_init(
            pin_init!(PendingControlRequest { node, reply <- new_spinlock!(reply, "PendingControlRequest::reply"), replied <- CountingCompletion::new() }),
            GFP_KERNEL,
        )?;
        let entry = RBTreeNodeReservation::new(GFP_KERNEL)?;
        // Assign and register the ID in one critical section. Otherwise a concurrent request could compute a
        // watermark above the unregistered ID, which the peer would then drop as ended.
        let mut table = self.table.lock();
        let id = table.next_id;
        table.next_id += 1;
        table.inflight.insert(entry.into_node(id, pending.clone()));
        let mut inflight = table
            .inflight
            .iter()
            .filter(|(_, pending)| pending.node == node);
        let low_watermark = inflight.next().map_or(id, |(first, _)| *first);
        let request_id = ControlRequestId { id, low_watermark };
        Ok((request_id, pending))
    }

    fn unregister(&self, id: u64) {
        let removed = self.table.lock().inflight.remove_node(&id);
        drop(removed);
    }

    /// Stores the reply to request `id` and wakes the caller. Replies of nodes other than the addressee are
    /// ignored.
    pub(crate) fn on_reply(&self, id: u64, node: u32, bytes: &[u8]) {
        let pending = self.table.lock().inflight.get(&id).cloned();
        if let Some(pending) = pending.filter(|pending| pending.node == node) {
            let mut reply = pending.reply.lock();
            if reply.is_empty() && reply.extend_from_slice(bytes, GFP_ATOMIC).is_ok() {
                pending.replied.complete();
            }
        }
    }
}

impl PendingControlRequest {
    fn has_reply(&self) -> bool {
        !self.reply.lock().is_empty()
    }
}

impl Fabric {
    /// Sends `request` to `node` and returns the complete reply, which is well formed.
    ///
    /// # Errors
    ///
    /// - `EHOSTDOWN`: the node is not, or no longer, in the view.
    /// - `ETIMEDOUT`: the deadline expired.
    /// - `EINTR`: a signal arrived that may end the wait (see [`Deadline::check`]).
    /// - `ENOMEM`: out of memory.
    /// - `EINVAL`: the request cannot be encoded.
    pub(crate) fn send_control_request(
        &self,
        node: u32,
        request: &ControlRequest<'_>,
        epoch: u64,
        deadline: Deadline,
    ) -> Result<KVec<u8>> {
        self.register_and_send(node, || self.peer(node), request, epoch, deadline)
    }

    /// Like [`Self::send_control_request`], but fails once either incarnation ends. With another incarnation,
    /// the request would have another meaning.
    ///
    /// # Errors
    ///
    /// See [`Self::send_control_request`]. `EHOSTDOWN` also if this node left the cluster.
    pub(crate) fn send_control_request_to(
        &self,
        peer: &Arc<Peer>,
        request: &ControlRequest<'_>,
        epoch: u64,
        deadline: Deadline,
    ) -> Result<KVec<u8>> {
        self.register_and_send(peer.node(), || Ok(peer.clone()), request, epoch, deadline)
    }

    fn register_and_send(
        &self,
        node: u32,
        find_peer: impl Fn() -> Result<Arc<Peer>>,
        request: &ControlRequest<'_>,
        epoch: u64,
        deadline: Deadline,
    ) -> Result<KVec<u8>> {
        let (request_id, pending) = self.control_requests.register(node)?;
        let result =
            self.send_until_replied(&pending, find_peer, request_id, request, epoch, deadline);
        self.control_requests.unregister(request_id.id);
        trace::ctrl_request(
            node,
            request_id.id,
            result.as_ref().err().map_or(0, |error| error.to_errno()),
        );
        result
    }

    fn send_until_replied(
        &self,
        pending: &PendingControlRequest,
        find_peer: impl Fn() -> Result<Arc<Peer>>,
        ControlRequestId { id, low_watermark }: ControlRequestId,
        request: &ControlRequest<'_>,
        epoch: u64,
        deadline: Deadline,
    ) -> Result<KVec<u8>> {
        let mut bytes = KVec::from_elem(0u8, MAX_CONTROL_BYTES, GFP_KERNEL)?;
        let header = ControlHeader {
            kind: ControlKind::Request,
            request_id: id,
            epoch,
            low_watermark,
        };
        let len = wire::encode_request(&header, request, &mut bytes).ok_or(EINVAL)?;
        loop {
            self.stats.ctrl_requests.add(1);
            let credit = self.send_until_acked(&find_peer, &bytes[..len], deadline)?;
            if let Some(reply) = self.wait_reply(pending, &credit, deadline)? {
                return Ok(reply);
            }
        }
    }

    /// Waits for the reply. Returns `None` if the QP failed first, or if the peer may have lost the request.
    fn wait_reply(
        &self,
        pending: &PendingControlRequest,
        credit: &ConnCredit,
        deadline: Deadline,
    ) -> Result<Option<KVec<u8>>> {
        let resend = Deadline::after_ms(RESEND_AFTER_MS);
        let _spin_sample =
            self.busy_poll(&self.control_requests.adaptive_spin, || pending.has_reply());
        loop {
            match pending
                .replied
                .wait_interruptible_timeout_ms(deadline.slice_ms())
            {
                Ok(true) => return Ok(Some(core::mem::take(&mut pending.reply.lock()))),
                Ok(false) => {}
                Err(_) => deadline.handle_signal()?,
            }
            if deadline.has_expired() {
                return Err(ETIMEDOUT);
            }
            if !credit.is_current() || resend.has_expired() {
                return Ok(None);
            }
        }
    }

    /// Sends a reply to `peer` on the endpoint with this ID.
    ///
    /// # Errors
    ///
    /// - `ENOTCONN`, `EIO`: the endpoint is gone or fails. The caller of the peer retransmits.
    /// - `EHOSTDOWN`: the connection was closed, because the peer left the view.
    /// - `ETIMEDOUT`, `EINTR`: see [`Deadline::check`].
    pub(crate) fn send_reply(&self, peer: &Peer, endpoint_id: u32, bytes: &[u8]) -> Result {
        let deadline = Deadline::after_ms(REPLY_TIMEOUT_MS);
        let conn = peer
            .conn_of_endpoint(endpoint_id)
            .ok_or_else(errno::notconn)?;
        let credit = conn.acquire_on_endpoint(endpoint_id, deadline)?;
        match self.send_message(&credit, bytes, deadline)? {
            WcStatus::Success => Ok(()),
            status => {
                credit.report_failure(status);
                Err(EIO)
            }
        }
    }

    /// Sends a request, and repeats the send until a QP has delivered it. Returns the credit, in which only
    /// the pending control request remains.
    fn send_until_acked(
        &self,
        find_peer: impl Fn() -> Result<Arc<Peer>>,
        bytes: &[u8],
        deadline: Deadline,
    ) -> Result<ConnCredit> {
        loop {
            deadline.check()?;
            let mut credit = find_peer()?
                .select_conn(self.qos.conn_subset(false))?
                .acquire(1, 1, Some(deadline))?;
            match self.send_message(&credit, bytes, deadline)? {
                WcStatus::Success => {
                    credit.release_wrs();
                    return Ok(credit);
                }
                status => credit.report_failure(status),
            }
            self.stats.retries.add(1);
        }
    }

    /// Sends a message and waits for its completion. Returns the completion status. A message that cannot be
    /// posted counts as flushed.
    fn send_message(
        &self,
        credit: &ConnCredit,
        bytes: &[u8],
        deadline: Deadline,
    ) -> Result<WcStatus> {
        let slot = self
            .send_engine()
            .acquire_slot(SlotClass::Control, Some(deadline))?;
        slot.buffer().write(0, bytes)?;
        slot.buffer().sync_for_device(bytes.len());
        let sges = [slot
            .buffer()
            .sge(self.local_key(), 0, bytes.len())
            .ok_or(EMSGSIZE)?];
        // SAFETY: The request addresses the buffer of `slot` only.
        if unsafe { credit.post(&slot, RdmaOpcode::Send, &sges, 0) }.is_err() {
            return Ok(WcStatus::Flushed);
        }
        Ok(slot.wait(|recovery| credit.recover(recovery)))
    }
}
