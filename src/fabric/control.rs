// SPDX-License-Identifier: GPL-2.0

//! Control requests to the kernel of a peer, and their replies.
//!
//! # Operation
//!
//! A [`ControlCall`] gets an ID and is registered before it is sent. The caller sends on a connection to the
//! peer, and polls or sleeps until the reply arrives. The reply uses the QP on which the last copy of the
//! request arrived: the caller has a receive posted there, because it counts its requests per QP
//! ([`super::endpoint::MAX_CONTROL_REQUESTS`]).
//!
//! # Recovery
//!
//! The caller retries a request if its QP fails before the reply arrives, or after [`RESEND_AFTER_MS`]. So
//! the peer may receive copies. Each request is idempotent, or has a sequence number by which the peer
//! executes it at most once (`kite_core::proto::once`). Each carries a low watermark, below which all
//! requests have ended: the peer drops copies of those (`kite_core::proto::inflight_requests`). If the QP for
//! the reply is gone, the reply is dropped and the caller retries. A late reply finds no registered request
//! and is dropped.
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

/// Time in ms after which a request is retried: the peer may have lacked memory for the reply.
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
pub(super) struct ControlRequests {
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
    pub(super) fn new() -> impl PinInit<Self> {
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
    pub(super) fn on_reply(&self, id: u64, node: u32, bytes: &[u8]) {
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

/// Addressee of a control request.
#[derive(Clone, Copy)]
pub(crate) enum Addressee<'a> {
    /// The node with this number, in any incarnation.
    Node(u32),
    /// The node in the incarnation of this peer. The request fails once either incarnation ends. With another
    /// incarnation, the request would have another meaning.
    Peer(&'a Arc<Peer>),
}

impl Addressee<'_> {
    fn node(self) -> u32 {
        match self {
            Self::Node(node) => node,
            Self::Peer(peer) => peer.node(),
        }
    }

    fn find(self, fabric: &Fabric) -> Result<Arc<Peer>> {
        match self {
            Self::Node(node) => fabric.peer(node),
            Self::Peer(peer) => Ok(peer.clone()),
        }
    }
}

/// Control request of this node, registered until dropped.
pub(crate) struct ControlCall<'a> {
    fabric: &'a Fabric,
    addressee: Addressee<'a>,
    request_id: ControlRequestId,
    pending: Arc<PendingControlRequest>,
    deadline: Deadline,
}

impl<'a> ControlCall<'a> {
    /// Registers a request.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory.
    pub(crate) fn new(
        fabric: &'a Fabric,
        addressee: Addressee<'a>,
        deadline: Deadline,
    ) -> Result<Self> {
        let (request_id, pending) = fabric.control_requests.register(addressee.node())?;
        Ok(Self {
            fabric,
            addressee,
            request_id,
            pending,
            deadline,
        })
    }

    /// Sends `request` and returns the complete reply, which is well formed.
    ///
    /// # Errors
    ///
    /// - `EHOSTDOWN`: the addressee is not, or no longer, in the view. For [`Addressee::Peer`] also if this
    ///   node left the cluster.
    /// - `ETIMEDOUT`: the deadline expired.
    /// - `EINTR`: a signal arrived that may end the wait (see [`Deadline::check`]).
    /// - `ENOMEM`: out of memory.
    /// - `EINVAL`: the request cannot be encoded.
    /// - `EOPNOTSUPP`: the addressee lacks an optional feature of the request, which is not sent.
    pub(crate) fn execute(self, request: &ControlRequest<'_>, epoch: u64) -> Result<KVec<u8>> {
        let result = self.send_until_replied(request, epoch);
        trace::ctrl_request(
            self.addressee.node(),
            self.request_id.id,
            result.as_ref().err().map_or(0, |error| error.to_errno()),
        );
        result
    }

    fn send_until_replied(&self, request: &ControlRequest<'_>, epoch: u64) -> Result<KVec<u8>> {
        let mut bytes = KVec::from_elem(0u8, MAX_CONTROL_BYTES, GFP_KERNEL)?;
        let header = ControlHeader {
            kind: ControlKind::Request,
            request_id: self.request_id.id,
            epoch,
            low_watermark: self.request_id.low_watermark,
        };
        let len = wire::encode_request(&header, request, &mut bytes).ok_or(EINVAL)?;
        loop {
            self.fabric.stats.ctrl_requests.add(1);
            let credit = self.send_until_acked(&bytes[..len], request)?;
            if let Some(reply) = self.wait_reply(&credit)? {
                return Ok(reply);
            }
        }
    }

    /// Sends the encoded request, and retries until a QP has delivered it. Returns the credit, in which only
    /// the pending control request remains.
    fn send_until_acked(&self, bytes: &[u8], request: &ControlRequest<'_>) -> Result<ConnCredit> {
        let fabric = self.fabric;
        loop {
            self.deadline.check()?;
            let peer = self.addressee.find(fabric)?;
            // Another incarnation of the node may have other features.
            peer.check_features(request.required_features())?;
            let mut credit = peer
                .select_conn(fabric.qos.conn_subset(false))?
                .acquire_control(request.is_long(), self.deadline)?;
            match credit.send_message(bytes, self.deadline)? {
                WcStatus::Success => {
                    credit.release_wrs();
                    return Ok(credit);
                }
                status => credit.report_failure(status),
            }
            fabric.stats.retries.add(1);
        }
    }

    /// Waits for the reply. Returns `None` if the QP failed first, or if the peer may have lost the request.
    fn wait_reply(&self, credit: &ConnCredit) -> Result<Option<KVec<u8>>> {
        let (pending, deadline) = (&*self.pending, self.deadline);
        let resend = Deadline::after_ms(RESEND_AFTER_MS);
        let spin = &self.fabric.control_requests.adaptive_spin;
        let _spin_sample = self.fabric.busy_poll(spin, || pending.has_reply());
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
}

impl Drop for ControlCall<'_> {
    fn drop(&mut self) {
        self.fabric.control_requests.unregister(self.request_id.id);
    }
}

impl Peer {
    /// Sends a reply to the peer on the endpoint with this ID.
    ///
    /// # Errors
    ///
    /// - `ENOTCONN`, `EIO`: the endpoint is gone or fails. The caller of the peer retries.
    /// - `EHOSTDOWN`: the connection was closed, because the peer left the view.
    /// - `ETIMEDOUT`, `EINTR`: see [`Deadline::check`].
    pub(crate) fn send_reply(&self, endpoint_id: u32, bytes: &[u8]) -> Result {
        let deadline = Deadline::after_ms(REPLY_TIMEOUT_MS);
        let conn = self
            .conn_of_endpoint(endpoint_id)
            .ok_or_else(errno::notconn)?;
        let credit = conn.acquire_on_endpoint(endpoint_id, deadline)?;
        match credit.send_message(bytes, deadline)? {
            WcStatus::Success => Ok(()),
            status => {
                credit.report_failure(status);
                Err(EIO)
            }
        }
    }
}

impl ConnCredit {
    /// Sends a message and waits for its completion. Returns the completion status. A message that cannot be
    /// posted counts as flushed.
    fn send_message(&self, bytes: &[u8], deadline: Deadline) -> Result<WcStatus> {
        let slot = self
            .endpoint
            .send_engine()
            .acquire_slot(SlotClass::Control, Some(deadline))?;
        slot.buffer().write(0, bytes)?;
        slot.buffer().sync_for_device(bytes.len());
        let sge = slot.buffer().sge(self.endpoint.lkey(), 0, bytes.len());
        let sges = [sge.ok_or(EMSGSIZE)?];
        // SAFETY: The request addresses the buffer of `slot` only.
        if unsafe { self.post(&slot, RdmaOpcode::Send, &sges, 0) }.is_err() {
            return Ok(WcStatus::Flushed);
        }
        Ok(slot.wait(|recovery| self.recover(recovery)))
    }
}
