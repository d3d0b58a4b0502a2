// SPDX-License-Identifier: GPL-2.0

//! Routing of receive completions: each completion becomes a call of the [`RecvHandler`], or of the peer that
//! sent the message.
//!
//! # Operation
//!
//! The receive is posted again before the message is processed. Datagrams on the setup QP set up connections
//! or announce views. Messages on a connection are control requests, their replies, or VQP packets.
//!
//! # Recovery
//!
//! A failed receive completion is dropped, since the users of the QP detect the failure themselves.
//! Only a failure of the setup QP is reported, to the connector thread. Malformed and duplicate messages are
//! counted and dropped.

use super::handler::RecvHandler;
use crate::{
    fabric::{
        endpoint::{Endpoint, RECV_BUFFER_BYTES},
        endpoint_table::SETUP_ENDPOINT_ID,
        Fabric,
    },
    sys::bytes,
    verbs::cq::{WcStatus, WorkCompletion},
};
use kernel::prelude::*;
use kite_core::{
    view::NodeInstance,
    wire::{
        self,
        packet::is_vqp_packet,
        setup::{SetupKind, UnverifiedSetup},
        ControlBody, ControlHeader, ControlRequest,
    },
    wrid::WrId,
};

/// Bytes of the global routing header (GRH), which precedes each datagram in its receive buffer.
const GRH_BYTES: usize = 40;

/// Routes the completions of one poll.
pub(super) struct CompletionRouter<'a> {
    pub(super) fabric: &'a Fabric,
    pub(super) handler: &'a dyn RecvHandler,
}

impl CompletionRouter<'_> {
    /// Processes a VQP packet received by DC.
    pub(super) fn on_dc_packet(&self, bytes: KVec<u8>) {
        self.handler.on_packet(None, bytes);
    }

    /// Processes one receive completion. `scratch` is the copy buffer of the polling thread.
    pub(super) fn on_completion(
        &self,
        completion: WorkCompletion,
        scratch: &mut [u8; RECV_BUFFER_BYTES],
    ) {
        let id = WrId::from_u64(completion.wr_id);
        if completion.status != WcStatus::Success {
            // A failed or destroyed QP flushes its receives. The users of an RC QP detect the failure by
            // their own requests, but the setup QP may have no request in flight.
            if id.generation == SETUP_ENDPOINT_ID {
                self.fabric.setup_qp.report_failure();
            }
            return;
        }
        let Some(endpoint) = self.fabric.endpoints.get(id.generation) else {
            return self.fabric.stats.unmatched_completions.add(1);
        };
        if let Some(immediate) = completion.imm_data {
            // Fails only if the QP or the RNIC has failed: the QP then needs no receive buffers.
            let _ = endpoint.post_recv(id.slot);
            return self.handler.on_immediate(endpoint.peer(), immediate);
        }
        let len = (completion.byte_len as usize).min(RECV_BUFFER_BYTES);
        let copied = endpoint.read_recv(id.slot, &mut scratch[..len]);
        // Repost the receive before the message is processed: a peer that receives the reply may send the
        // next request at once. The error cannot matter, as above.
        let _ = endpoint.post_recv(id.slot);
        if copied.is_ok() {
            self.dispatch_recv(&endpoint, &scratch[..len]);
        }
    }

    /// Passes a message to its handler. Node 0 is the peer of the setup QP, which receives datagrams.
    fn dispatch_recv(&self, endpoint: &Endpoint, bytes: &[u8]) {
        let is_valid = match endpoint.peer() {
            NodeInstance { node: 0, .. } => bytes
                .get(GRH_BYTES..)
                .is_some_and(|bytes| self.on_datagram(bytes)),
            peer => self.on_message(peer, endpoint.id(), bytes),
        };
        if !is_valid {
            self.fabric.stats.malformed_messages.add(1);
        }
    }

    /// Processes a datagram of connection setup or of a view announcement. Returns `false` if the datagram is
    /// malformed or rejected.
    ///
    /// Datagrams with a wrong authentication code, or for another incarnation of either node, are rejected.
    fn on_datagram(&self, bytes: &[u8]) -> bool {
        let Ok(received) = UnverifiedSetup::new(bytes) else {
            return false;
        };
        let Ok(peer) = self.fabric.peer(received.claimed_sender()) else {
            return false;
        };
        let Some(setup) = peer.identity.open(&received) else {
            return false;
        };
        match setup.kind {
            SetupKind::ViewAnnounce => self.handler.on_view(&peer, setup.epoch),
            SetupKind::ViewAck => peer.on_view_ack(setup.epoch),
            _ => return peer.on_setup(setup),
        }
        true
    }

    /// Processes a message received over a connection. Returns `false` if the message is malformed.
    fn on_message(&self, peer: NodeInstance, endpoint_id: u32, bytes: &[u8]) -> bool {
        if is_vqp_packet(bytes) {
            let mut packet = bytes::alloc_zeroed_nofail(bytes.len());
            packet.copy_from_slice(bytes);
            self.handler.on_packet(Some(peer), packet);
            return true;
        }
        match wire::decode_control(bytes) {
            Ok((header, ControlBody::Request(request))) => {
                self.on_request((peer, endpoint_id), header, &request, bytes);
            }
            Ok((header, ControlBody::Reply(_))) => {
                self.fabric
                    .control_requests
                    .on_reply(header.request_id, peer.node, bytes)
            }
            Err(_) => return false,
        }
        true
    }

    /// Processes a control request, unless the peer left the view or the request is a duplicate or has ended.
    fn on_request(
        &self,
        (from, endpoint_id): (NodeInstance, u32),
        header: ControlHeader,
        request: &ControlRequest<'_>,
        bytes: &[u8],
    ) {
        let Ok(peer) = self.fabric.peer_by_instance(from) else {
            return;
        };
        if peer.admit_request(&header, request, endpoint_id) {
            self.handler.on_request(peer, header, bytes);
        } else {
            self.fabric.stats.duplicate_messages.add(1);
        }
    }
}
