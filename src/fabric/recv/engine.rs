// SPDX-License-Identifier: GPL-2.0

//! Receive processing: each completion of the receive CQ and of the packet CQ becomes a call of the
//! [`RecvHandler`].
//!
//! # Operation
//!
//! One thread at a time polls: the poller thread, a waiter that busy-polls, or a thread that drains received
//! messages before a QP is reset. A message is copied out of its receive buffer, and the receive is posted
//! again before the message is processed.
//!
//! # Recovery
//!
//! A failed receive completion is dropped, since the users of the QP detect the failure themselves.
//! Only a failure of the control QP is reported, to the connector thread.
//!
//! # Locking
//!
//! - `RecvEngine::poll_buffer` (mutex) serializes receive processing and protects the copy buffer.
//!   The mutex is held while a [`RecvHandler`] runs.
//! - Order: access to `RecvEngine::handler`, then `poll_buffer`, then the locks of peers and connections.
//! - Order: `DcTransport::dct`, then `poll_buffer`, since a DCT is rotated while received messages are
//!   drained.

use super::{busy_poll::BusyPollers, handler::RecvHandler};
use crate::{
    fabric::{
        endpoint::{Endpoint, RECV_BUFFER_BYTES},
        endpoint_table::CONTROL_ENDPOINT_ID,
        Fabric, RECV_CQ_ENTRIES,
    },
    sys::{bytes, revocable::SleepableRevocable},
    verbs::cq::{WcStatus, WorkCompletion},
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::{Arc, Mutex, SetOnce},
};
use kite_core::{
    view::NodeInstance,
    wire::{
        self,
        packet::is_vqp_packet,
        setup::{SetupDatagram, SetupKind},
        ControlBody, ControlHeader, ControlRequest,
    },
    wrid::WrId,
};

/// Bytes of the global routing header (GRH), which precedes each datagram in its receive buffer.
const GRH_BYTES: usize = 40;

/// State of receive processing. One thread polls at a time.
#[pin_data]
pub(in crate::fabric) struct RecvEngine {
    /// Handler of received messages, set once. Revoked when the RNIC is removed.
    #[pin]
    handler: SleepableRevocable<SetOnce<Arc<dyn RecvHandler>>>,
    /// Copy of the message being processed. The polling thread holds the mutex.
    #[pin]
    poll_buffer: Mutex<[u8; RECV_BUFFER_BYTES]>,
    /// Waiters that poll in place of the poller thread.
    pub(in crate::fabric) busy_pollers: BusyPollers,
}

impl RecvEngine {
    /// Creates the state without a handler.
    pub(in crate::fabric) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            handler <- SleepableRevocable::new(SetOnce::new()),
            poll_buffer <- new_mutex!([0; RECV_BUFFER_BYTES], "RecvEngine::poll_buffer"),
            busy_pollers: BusyPollers::new(),
        })
    }
}

impl Fabric {
    /// Sets the handler of received messages. Has no effect if a handler was set before or after
    /// [`Self::clear_recv_handler`].
    pub(crate) fn set_recv_handler(&self, handler: Arc<dyn RecvHandler>) {
        if let Some(handler_cell) = self.recv_engine.handler.try_access() {
            handler_cell.populate(handler);
        }
    }

    /// Drops the handler, after waiting for running calls. No message is processed afterwards.
    pub(crate) fn clear_recv_handler(&self) {
        drop(self.recv_engine.handler.revoke());
    }

    /// Processes all messages received before the call. May sleep.
    ///
    /// Required before a QP is reset: the sender has received an acknowledgment for these messages, and
    /// drivers discard unpolled completions at the reset.
    pub(in crate::fabric) fn drain_recv_cq(&self) {
        let Some(handler) = self.recv_engine.handler.try_access() else {
            return;
        };
        let Some(handler) = handler.as_ref() else {
            return;
        };
        let mut scratch = self.recv_engine.poll_buffer.lock();
        for _ in 0..RECV_CQ_ENTRIES {
            let recv_cq = &self.resources.recv_cq;
            let messages =
                recv_cq.poll(|completion| self.process_recv(&**handler, completion, &mut scratch));
            if messages + self.poll_packets(&**handler) == 0 {
                return;
            }
        }
    }

    /// Processes received messages unless another thread does. Returns the number of messages.
    ///
    /// The caller must not hold any lock, since the handler takes locks.
    pub(crate) fn try_poll_recv(&self) -> usize {
        let Some(handler) = self.recv_engine.handler.try_access() else {
            return 0;
        };
        let (Some(handler), Some(mut scratch)) =
            (handler.as_ref(), self.recv_engine.poll_buffer.try_lock())
        else {
            return 0;
        };
        let recv_cq = &self.resources.recv_cq;
        let messages =
            recv_cq.poll(|completion| self.process_recv(&**handler, completion, &mut scratch));
        messages + self.poll_packets(&**handler)
    }

    /// Processes VQP packets received by DC. Returns the number of packets.
    fn poll_packets(&self, handler: &dyn RecvHandler) -> usize {
        let dc = self.dc.as_ref();
        dc.map_or(0, |dc| {
            dc.poll_packets(|bytes| handler.on_packet(None, bytes))
        })
    }

    /// Arms the packet CQ. Returns `true` if packets may have arrived before.
    pub(super) fn arm_packet_cq(&self) -> bool {
        self.dc.as_ref().is_some_and(|dc| {
            dc.arm_packet_cq();
            // Another thread may have polled the CQ before it was armed, and may not poll it again.
            let is_polled = self.recv_engine.poll_buffer.try_lock().is_none();
            is_polled || self.try_poll_recv() != 0
        })
    }

    /// Processes one receive completion. `scratch` is the copy buffer of the polling thread.
    fn process_recv(
        &self,
        handler: &dyn RecvHandler,
        completion: WorkCompletion,
        scratch: &mut [u8; RECV_BUFFER_BYTES],
    ) {
        let id = WrId::from_u64(completion.wr_id);
        if completion.status != WcStatus::Success {
            // A failed or destroyed QP flushes its receives. The users of an RC QP detect the failure by
            // their own requests, but the control QP may have no request in flight.
            if id.generation == CONTROL_ENDPOINT_ID {
                self.control_qp.report_failure();
            }
            return;
        }
        let Some(endpoint) = self.endpoints.get(id.generation) else {
            return self.stats.unmatched_completions.add(1);
        };
        if let Some(immediate) = completion.imm_data {
            // Fails only if the QP or the RNIC has failed: the QP then needs no receive buffers.
            let _ = endpoint.post_recv(id.slot);
            return handler.on_immediate(endpoint.peer(), immediate);
        }
        let len = (completion.byte_len as usize).min(RECV_BUFFER_BYTES);
        let copied = endpoint.read_recv(id.slot, &mut scratch[..len]);
        // Repost the receive before the message is processed: a peer that receives the reply may send the
        // next request at once. The error cannot matter, as above.
        let _ = endpoint.post_recv(id.slot);
        if copied.is_ok() {
            self.dispatch_recv(handler, &endpoint, &scratch[..len]);
        }
    }

    /// Passes a message to its handler. Node 0 is the peer of the control QP, which receives datagrams.
    fn dispatch_recv(&self, handler: &dyn RecvHandler, endpoint: &Endpoint, bytes: &[u8]) {
        let is_valid = match endpoint.peer() {
            NodeInstance { node: 0, .. } => bytes
                .get(GRH_BYTES..)
                .is_some_and(|bytes| self.on_datagram(handler, bytes)),
            peer => self.on_message(handler, peer, endpoint.id(), bytes),
        };
        if !is_valid {
            self.stats.malformed_messages.add(1);
        }
    }

    /// Processes a datagram of connection setup or of a view announcement. Returns `false` if the datagram is
    /// malformed or rejected.
    ///
    /// Datagrams without the shared secret, or for another incarnation of either node, are rejected.
    fn on_datagram(&self, handler: &dyn RecvHandler, bytes: &[u8]) -> bool {
        let Ok(setup) = SetupDatagram::decode(bytes) else {
            return false;
        };
        let Ok(peer) = self.peer(setup.from_node) else {
            return false;
        };
        if !peer.identity.accepts(&setup) {
            return false;
        }
        match setup.kind {
            SetupKind::ViewAnnounce => handler.on_view(&peer, setup.epoch),
            SetupKind::ViewAck => peer.on_view_ack(setup.epoch),
            _ => return peer.on_setup(setup),
        }
        true
    }

    /// Processes a message received over a connection. Returns `false` if the message is malformed.
    fn on_message(
        &self,
        handler: &dyn RecvHandler,
        peer: NodeInstance,
        endpoint_id: u32,
        bytes: &[u8],
    ) -> bool {
        if is_vqp_packet(bytes) {
            let mut packet = bytes::alloc_zeroed_nofail(bytes.len());
            packet.copy_from_slice(bytes);
            handler.on_packet(Some(peer), packet);
            return true;
        }
        match wire::decode_control(bytes) {
            Ok((header, ControlBody::Request(request))) => {
                self.on_request(handler, (peer, endpoint_id), header, &request, bytes);
            }
            Ok((header, ControlBody::Reply(_))) => {
                self.control_requests
                    .on_reply(header.request_id, peer.node, bytes)
            }
            Err(_) => return false,
        }
        true
    }

    /// Processes a control request, unless the peer left the view or the request is a duplicate or has ended.
    fn on_request(
        &self,
        handler: &dyn RecvHandler,
        (from, endpoint_id): (NodeInstance, u32),
        header: ControlHeader,
        request: &ControlRequest<'_>,
        bytes: &[u8],
    ) {
        let Ok(peer) = self.peer_by_instance(from) else {
            return;
        };
        if peer.admit_request(&header, request, endpoint_id) {
            handler.on_request(peer, header, bytes);
        } else {
            self.stats.duplicate_messages.add(1);
        }
    }
}
