// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Receiver of a request, and its sender, to which the responses go.

use crate::device::Device;
use crate::network::packet::{Grh, Packet, PacketBody, Path, Psn, Service};
use crate::object::qp::{Qp, Receive, Rights};

/// Sender of requests, which receives the responses.
#[derive(Clone, Copy, Debug)]
pub struct Peer {
    path: Path,
    service: Service,
    number: u32,
    pub(super) mtu: u32,
}

impl Peer {
    /// Returns the sender of `packet`, whose queue pair is `number`.
    pub fn of(packet: &Packet, number: u32, mtu: u32) -> Self {
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

    /// Returns a response to this sender.
    pub fn packet(&self, psn: Psn, body: PacketBody) -> Packet {
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

/// Receiver: a queue pair or a DC target.
#[derive(Clone, Copy, Debug)]
pub struct ResponderContext {
    /// Number of the queue pair or DC target.
    pub number: u32,
    /// `true` if requests are acknowledged.
    pub reliable: bool,
    /// The sequence number of the first packet.
    pub first: Psn,
    /// Protection domain; `None` if the SRQ of the packet does not exist.
    pub pd: Option<u32>,
    /// Completion queue.
    pub cqn: u32,
    /// User index of the receiver in completions.
    pub user_index: u32,
    /// The set of Q counters that count for the receiver.
    pub counters: u32,
    /// Maximum number of READs and atomic operations of the sender that wait for their responses.
    pub reads: usize,
    /// Access rights of the sender.
    pub rights: Rights,
    /// RNR timer code for the sender if no receive is posted.
    pub min_rnr_nak: u8,
    /// Maximum number of bytes of a message whose data its completion holds.
    pub scatter: u8,
    /// Source queue pair in completions; for DC only.
    pub source: u32,
    /// The sender.
    pub peer: Peer,
}

impl ResponderContext {
    /// Returns a queue pair as the receiver of a packet, for XRC with the SRQ of the packet.
    pub fn of_qp(device: &Device, qp: &Qp, packet: &Packet) -> (Self, Option<Receive>) {
        let attributes = &qp.attributes;
        let target = ResponderContext {
            number: qp.number,
            reliable: packet.service != Service::Uc,
            first: Psn::new(attributes.receive_psn),
            pd: Some(attributes.pd),
            cqn: attributes.receive_cq,
            user_index: attributes.user_index,
            counters: attributes.counters,
            reads: attributes.max_peer_reads as usize,
            rights: attributes.rights,
            min_rnr_nak: attributes.min_rnr_nak,
            scatter: attributes.responder_scatter,
            source: 0,
            peer: Peer::of(packet, attributes.remote_qpn, attributes.mtu),
        };
        let Service::Xrc { srq: number } = packet.service else {
            return (target, None);
        };
        let srq = device.objects.srqs.get(number);
        let Some(srq) = srq.filter(|srq| srq.xrcd == attributes.xrcd) else {
            return (ResponderContext { pd: None, ..target }, Some(Receive::None));
        };
        let target = ResponderContext {
            pd: Some(srq.pd),
            cqn: srq.cqn,
            user_index: srq.user_index,
            ..target
        };
        (target, Some(Receive::Shared(number)))
    }
}
