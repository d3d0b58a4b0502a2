// SPDX-License-Identifier: GPL-2.0

//! Control requests to a peer's kernel, and its replies.
//!
//! A request is sent again when its queue pair fails before the reply came, so every request is made
//! such that doing it twice is as good as once (`kite_core::wire`), and says which calls have ended, so
//! that copies of theirs are dropped (`kite_core::proto::inflight_requests`). A late reply finds no call any more.
//!
//! A reply goes by the queue pair by which its request came last: there the caller has a receive for it,
//! since it counts its calls for each ([`super::endpoint::CALLS`]). If that is gone, the caller asks again.

use super::{conn::credit::ConnCredit, peer::Peer, send::slots::SlotClass, Fabric};
use crate::{
    errno,
    sys::{adaptive_spin::AdaptiveSpin, completion::CountingCompletion, deadline::Deadline},
    trace,
    verbs::cq::WcStatus,
};
use kernel::{
    new_spinlock,
    prelude::*,
    rbtree::{RBTree, RBTreeNodeReservation},
    sync::{Arc, SpinLock},
};
use kite_core::wire::{self, ControlHeader, ControlKind, ControlRequest, MAX_CONTROL_BYTES};

/// How long a caller sleeps before it looks whether its queue pair is still there.
const WAIT_SLICE_MS: u32 = 50;

/// Time after which a request is sent again: its answer may have met a lack of memory.
const RESEND_AFTER_MS: u32 = 2000;

/// How long an answer may wait for a queue pair.
const REPLY_TIMEOUT_MS: u32 = 2000;

/// A call under way.
#[pin_data]
struct PendingControlRequest {
    node: u32,
    /// Empty until the reply came.
    #[pin]
    reply: SpinLock<KVec<u8>>,
    #[pin]
    replied: CountingCompletion,
}

struct ControlRequestsState {
    inflight: RBTree<u64, Arc<PendingControlRequest>>,
    /// Number of the next call.
    next_id: u64,
}

/// The calls under way.
#[pin_data]
pub(crate) struct ControlRequests {
    #[pin]
    table: SpinLock<ControlRequestsState>,
    adaptive_spin: AdaptiveSpin,
}

/// What tells a call from others: its number, and that below which all calls to the same node have ended.
#[derive(Clone, Copy)]
struct ControlRequestId {
    id: u64,
    low_watermark: u64,
}

impl ControlRequests {
    /// None.
    pub(crate) fn new() -> impl PinInit<Self> {
        let table = ControlRequestsState {
            inflight: RBTree::new(),
            next_id: 1,
        };
        pin_init!(Self {
            table <- new_spinlock!(table),
            adaptive_spin: AdaptiveSpin::new(),
        })
    }

    fn register(&self, node: u32) -> Result<(ControlRequestId, Arc<PendingControlRequest>)> {
        let reply = KVec::with_capacity(MAX_CONTROL_BYTES, GFP_KERNEL)?;
        let pending = Arc::pin_init(
            pin_init!(PendingControlRequest { node, reply <- new_spinlock!(reply), replied <- CountingCompletion::new() }),
            GFP_KERNEL,
        )?;
        let entry = RBTreeNodeReservation::new(GFP_KERNEL)?;
        // Numbered and entered in one: a number that is not here yet would be taken for ended.
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

    /// Takes the reply to call `id` from `node`.
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
    /// Sends `request` to `node` and returns the whole reply, whose form has been checked.
    ///
    /// # Errors
    ///
    /// - `EHOSTDOWN` if the node is not, or no longer, in the view.
    /// - `ETIMEDOUT`; `EINTR` if the deadline is interruptible.
    pub(crate) fn send_control_request(
        &self,
        node: u32,
        request: &ControlRequest<'_>,
        epoch: u64,
        deadline: Deadline,
    ) -> Result<KVec<u8>> {
        self.register_and_send(node, || self.peer(node), request, epoch, deadline)
    }

    /// As [`Self::call`], but ends when the peer's life or ours does: in the next one the request would be
    /// another.
    ///
    /// # Errors
    ///
    /// As there, and `EHOSTUNREACH` if this node left the cluster.
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

    /// Returns nothing if the queue pair failed first, or the peer seems to have lost the request.
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
                .wait_interruptible_timeout_ms(deadline.remaining_ms().min(WAIT_SLICE_MS))
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

    /// Answers a request of `peer` by the channel of number `by`.
    ///
    /// # Errors
    ///
    /// - `ENOTCONN`, `EIO` if the channel is gone or fails; the caller will ask again.
    /// - Those of [`Self::call`].
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

    /// Sends a request, again and again until a queue pair took it to the peer. Returns the use of the
    /// connection, of which only the announced call is left.
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

    /// Returns whether the message arrived, or why not.
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
        // SAFETY: The request names the claim's buffer.
        if unsafe { credit.send(&slot, &sges) }.is_err() {
            return Ok(WcStatus::Flushed);
        }
        Ok(slot.wait(|recovery| credit.recover(recovery)))
    }
}
