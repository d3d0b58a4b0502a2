// SPDX-License-Identifier: GPL-2.0

//! Numbers of the two endpoints of a VQP, and the packets between the endpoints.
//!
//! [`EndpointIds`] is under `Vqp::state`.

use kite_core::{
    view::NodeInstance,
    wire::packet::{Packet, PacketBody},
};

/// Numbers by which the two endpoints identify each other.
pub(super) struct EndpointIds {
    pub(super) local_node: NodeInstance,
    /// Number of this endpoint, or 0 if it takes no messages.
    pub(super) local_vqpn: u64,
    /// Number of the peer endpoint, or 0 until its first update arrives.
    pub(super) peer_vqpn: u64,
    pub(super) port: u32,
    /// Owner of this endpoint.
    pub(super) uid: u32,
    /// User that the listener must belong to, if any.
    pub(super) required_owner: Option<u32>,
}

impl EndpointIds {
    pub(super) fn make_packet(&self, body: PacketBody) -> Packet {
        Packet {
            sender: self.local_node,
            source_vqp: self.local_vqpn,
            destination_vqp: self.peer_vqpn,
            body,
        }
    }
}
