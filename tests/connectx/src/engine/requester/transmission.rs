// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Transmission of the packets of a work request. Each transmission builds the packet from guest memory.

use super::{Requester, Stop};
use crate::device::Device;
use crate::engine::channel::{ActiveWqe, Channel, Sequence};
use crate::engine::wqe::{self, Operation, SendWqe};
use crate::engine::{key_memory, send_packet, BURST};
use crate::network::packet::{Answer, Grh, Packet, PacketBody, Path, Position, Psn, Reth, Service};
use crate::object::mkey::MkeyFault;
use crate::object::qp::{Qp, Transport};

/// Number of packets between two acknowledgement requests in a long message.
const ACK_INTERVAL_PACKETS: u32 = BURST as u32 / 2;

impl Requester<'_> {
    /// Sends the packet at the cursor of a channel. Returns `false` if no packet may be sent, or if its data is not
    /// accessible.
    pub(super) fn send_next_packet(&mut self, c: usize) -> bool {
        let channel = self.qp.requester.channels.get(c);
        let sequence = channel.and_then(Channel::sendable);
        let (Some(channel), Some(sequence), true) = (channel, sequence, self.is_able()) else {
            return false;
        };
        let psn = sequence.cursor;
        let index = channel.find_wqe(psn);
        let Some(work) = channel.work.get(index).filter(|work| work.error.is_none()) else {
            return false;
        };
        let skip = psn.since(work.first) as u32 * self.qp.attributes.mtu;
        let end = work.end();
        let (body, next) = build_body(work, psn, skip);
        let acknowledge = next == end || psn.get() % ACK_INTERVAL_PACKETS == 0;
        let (solicited, srq) = (work.wqe.control.solicited, work.wqe.srq);
        let payload = match self.build_payload(c, index, skip) {
            Ok(payload) => payload,
            Err(fault) => {
                if let Stop::Failed(syndrome) = Stop::from_fault(self.device, self.qp.number, fault)
                {
                    self.qp.requester.channels[c].work[index].error = Some(syndrome);
                    self.complete_or_fail(c);
                }
                return false;
            }
        };
        let channel = &self.qp.requester.channels[c];
        let packet = Packet {
            path: self.path(channel),
            service: self.service(channel, srq),
            destination: self.destination(channel),
            psn,
            acknowledge,
            solicited: solicited && next == end,
            body,
            payload,
        };
        send_packet(self.device, self.outbox, packet);
        let reliable = self.qp.transport != Transport::Uc;
        self.qp.requester.channels[c].sequence = Some(Sequence {
            acknowledged: if reliable {
                sequence.acknowledged
            } else {
                next
            },
            cursor: next,
            sent: if next.since(sequence.sent) > 0 {
                next
            } else {
                sequence.sent
            },
            end: sequence.end,
        });
        if !reliable {
            self.complete_or_fail(c);
        }
        true
    }

    /// Returns the payload of a packet.
    fn build_payload(&mut self, c: usize, index: usize, skip: u32) -> Result<Vec<u8>, MkeyFault> {
        let work = &self.qp.requester.channels[c].work[index];
        if work.is_read() {
            return Ok(Vec::new());
        }
        let length = (work.length() - skip).min(self.qp.attributes.mtu);
        let mut payload = self.outbox.buffer(length as usize);
        gather_payload(self.device, self.qp, &work.wqe, skip, &mut payload)?;
        Ok(payload)
    }

    fn path(&self, channel: &Channel) -> Path {
        let (lid, gid) = (self.device.port.lid, self.device.port.gid());
        if let Some((address, _)) = &channel.connection {
            return address.path(lid, gid);
        }
        let path = &self.qp.attributes.path;
        Path {
            source: lid,
            destination: path.lid,
            service_level: path.service_level,
            grh: path.grh.then_some(Grh {
                traffic_class: path.traffic_class,
                flow_label: path.flow_label,
                hop_limit: path.hop_limit,
                source: gid,
                destination: path.gid,
            }),
        }
    }

    fn service(&self, channel: &Channel, srq: u32) -> Service {
        match (&channel.connection, self.qp.transport) {
            (Some((_, connection)), _) => Service::Dc(*connection),
            (None, Transport::Uc) => Service::Uc,
            (None, Transport::Xrc) => Service::Xrc { srq },
            (None, _) => Service::Rc,
        }
    }

    fn destination(&self, channel: &Channel) -> u32 {
        match &channel.connection {
            Some((address, _)) => address.number,
            None => self.qp.attributes.remote_qpn,
        }
    }
}

/// Fills `payload` with the data of a WQE after the first `skip` bytes.
pub(in crate::engine) fn gather_payload(
    device: &mut Device,
    qp: &Qp,
    wqe: &SendWqe,
    skip: u32,
    payload: &mut [u8],
) -> Result<(), MkeyFault> {
    let data = &wqe.data;
    let inline = data.inline.get(skip as usize..).unwrap_or_default();
    let inline = &inline[..inline.len().min(payload.len())];
    let (head, rest) = payload.split_at_mut(inline.len());
    head.copy_from_slice(inline);
    let skip = u64::from(skip).saturating_sub(data.inline.len() as u64);
    key_memory(device).gather(qp.attributes.pd, qp.number, &data.segments, skip, rest)
}

/// Returns the operation of a packet, and the next PSN to send.
fn build_body(work: &ActiveWqe, psn: Psn, skip: u32) -> (PacketBody, Psn) {
    let reth = |remote: &wqe::Remote| Reth {
        address: remote.address.wrapping_add(u64::from(skip)),
        key: remote.key,
        length: work.length() - skip,
    };
    let next = psn.plus(1);
    let position = Position::new(skip == 0, next == work.end());
    match &work.wqe.operation {
        Operation::Send(tail) => (PacketBody::Send(position, *tail), next),
        Operation::Write(remote, tail) => {
            let reth = position.begins().then(|| reth(remote));
            (PacketBody::Write(position, reth, *tail), next)
        }
        Operation::Read(remote) => (PacketBody::ReadRequest(reth(remote)), work.end()),
        Operation::Atomic(atomic) => (PacketBody::Atomic(*atomic), next),
        // These work requests have no packets.
        Operation::Malformed | Operation::Nop | Operation::Umr(_) => {
            (PacketBody::Acknowledge(Answer::Ack), next)
        }
    }
}
