// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The two ends of a connection, as the responder needs them: its own attributes, and the requester.

use crate::device::Device;
use crate::network::packet::{Grh, Packet, PacketBody, Path, Psn, Service};
use crate::object::qp::{Qp, Receive, Rights};

/// Requester, the destination of responses.
#[derive(Clone, Copy, Debug)]
pub struct Peer {
    path: Path,
    service: Service,
    number: u32,
    pub(super) mtu: u32,
}

impl Peer {
    /// Returns the requester that has sent `packet`. `number` is its queue pair.
    pub fn from_packet(packet: &Packet, number: u32, mtu: u32) -> Self {
        let Path {
            source,
            destination,
            service_level,
            grh,
        } = packet.path;
        let back = |grh: Grh| Grh {
            source: grh.destination,
            destination: grh.source,
            ..grh
        };
        Peer {
            path: Path {
                source: destination,
                destination: source,
                service_level,
                grh: grh.map(back),
            },
            service: packet.service,
            number,
            mtu,
        }
    }

    /// Returns a response packet without payload.
    pub fn response_packet(&self, psn: Psn, body: PacketBody) -> Packet {
        Packet {
            path: self.path,
            service: self.service,
            destination: self.number,
            psn,
            acknowledge: false,
            solicited: false,
            body,
            payload: Vec::new(),
        }
    }
}

/// Attributes of a queue pair or DC target for the execution of a request.
#[derive(Clone, Copy, Debug)]
pub struct ResponderContext {
    /// Number of the queue pair or DC target.
    pub number: u32,
    /// `true` if requests are acknowledged.
    pub reliable: bool,
    /// PSN of the first packet.
    pub first: Psn,
    /// Protection domain; `None` if the SRQ of the packet does not exist.
    pub pd: Option<u32>,
    /// Completion queue.
    pub cqn: u32,
    /// User index in completions.
    pub user_index: u32,
    /// Set of Q counters.
    pub counters: u32,
    /// Maximum number of READs and atomic operations of the peer in flight.
    pub max_reads: usize,
    /// Access rights of the peer.
    pub rights: Rights,
    /// RNR timer code in NAKs if no receive is posted.
    pub min_rnr_nak: u8,
    /// Maximum size of a message that is placed in the CQE.
    pub scatter: u8,
    /// Source QPN in completions; for DC only.
    pub source: u32,
    /// Requester.
    pub peer: Peer,
}

impl ResponderContext {
    /// Returns the context of a queue pair for a packet, and for XRC the SRQ of the packet.
    pub fn for_qp(device: &Device, qp: &Qp, packet: &Packet) -> (Self, Option<Receive>) {
        let attributes = &qp.attributes;
        let context = ResponderContext {
            number: qp.number,
            reliable: packet.service != Service::Uc,
            first: Psn::new(attributes.receive_psn),
            pd: Some(attributes.pd),
            cqn: attributes.receive_cq,
            user_index: attributes.user_index,
            counters: attributes.counters,
            max_reads: attributes.max_peer_reads as usize,
            rights: attributes.rights,
            min_rnr_nak: attributes.min_rnr_nak,
            scatter: attributes.responder_scatter,
            source: 0,
            peer: Peer::from_packet(packet, attributes.remote_qpn, attributes.mtu),
        };
        let Service::Xrc { srq: number } = packet.service else {
            return (context, None);
        };
        let srq = device.objects.srqs.get(number);
        let Some(srq) = srq.filter(|srq| srq.xrcd == attributes.xrcd) else {
            return (
                ResponderContext {
                    pd: None,
                    ..context
                },
                Some(Receive::None),
            );
        };
        let context = ResponderContext {
            pd: Some(srq.pd),
            cqn: srq.cqn,
            user_index: srq.user_index,
            ..context
        };
        (context, Some(Receive::Shared(number)))
    }
}
