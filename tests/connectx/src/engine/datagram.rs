// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Datagrams: each message is one packet without an acknowledgement, and is lost if it cannot be received.
//!
//! A receive has 40 bytes for the global route header before the data, whether there is one or not.

use super::requester::{gather, Stop};
use super::wqe::{Operation, SendWqe};
use super::{fail, local_domain, reach, send as transmit, with};
use crate::device::Device;
use crate::network::packet::{Grh, Packet, PacketBody, Position, Psn, Service, Tail};
use crate::network::Outbox;
use crate::object::cq::{Completion, CqeKind, Syndrome};
use crate::object::qp::{Qp, Transport};
use crate::object::receive::{self, ReceiveWqe};
use crate::object::scatter::capacity;

/// The queue pair number that stands for all of a multicast group.
const ALL: u32 = 0xff_ffff;
/// The queue pair number of general services.
const GENERAL: u32 = 1;
/// Bytes of a global route header.
const GRH: usize = 40;
/// The bit of a queue key by which a work request asks for that of its queue pair.
const OWN_QKEY: u32 = 1 << 31;

/// Carries out a work request of a datagram queue pair.
pub fn send(device: &mut Device, qp: &Qp, wqe: &SendWqe, outbox: &mut Outbox) -> Result<(), Stop> {
    let (Operation::Send(tail), Some(address)) = (&wqe.operation, &wqe.address) else {
        return Err(Stop::Failed(Syndrome::LocalQpOperation));
    };
    let length = wqe.data.length();
    if length > u64::from(qp.attributes.mtu) {
        return Err(Stop::Failed(Syndrome::LocalLength));
    }
    let mut payload = outbox.buffer(length as usize);
    let gathered = gather(device, qp, wqe, 0, &mut payload);
    gathered.map_err(|fault| Stop::at(device, qp.number, fault))?;
    let own = address.qkey() & OWN_QKEY != 0;
    let qkey = if own {
        qp.attributes.qkey
    } else {
        address.qkey()
    };
    let source = match (qp.transport, qp.attributes.source_qpn) {
        (Transport::Smi, _) => 0,
        (Transport::Gsi, 0) => GENERAL,
        (_, 0) => qp.number,
        (_, source) => source,
    };
    let packet = Packet {
        path: address.path(device.port.lid, device.port.gid()),
        service: Service::Ud { source, qkey },
        destination: address.number,
        psn: Psn::default(),
        acknowledge: false,
        solicited: wqe.control.solicited,
        body: PacketBody::Send(Position::Only, *tail),
        payload,
    };
    transmit(device, outbox, packet);
    Ok(())
}

/// A datagram arrived.
pub fn arrive(device: &mut Device, packet: &Packet) {
    let members = match packet.destination {
        ALL => members(device, packet),
        GENERAL => special(device, Transport::Gsi),
        0 => special(device, Transport::Smi),
        number => vec![number],
    };
    for number in members {
        with(device, number, |device, qp| deliver(device, qp, packet));
    }
}

/// The queue pairs that get a packet to a multicast group: the sender is not among them.
fn members(device: &Device, packet: &Packet) -> Vec<u32> {
    let (Some(grh), Service::Ud { source, .. }) = (&packet.path.grh, packet.service) else {
        return Vec::new();
    };
    let own = packet.path.source == device.port.lid;
    let members = device.objects.groups.members(&grh.destination);
    members
        .filter(|number| !(own && *number == source))
        .collect()
}

/// The queue pair of the device for a special service.
fn special(device: &Device, transport: Transport) -> Vec<u32> {
    let mut all = device.objects.qps.iter();
    let found = all.find(|(_, qp)| qp.transport == transport);
    found.map(|(number, _)| number).into_iter().collect()
}

/// Writes a valid datagram to the next receive of a queue pair.
fn deliver(device: &mut Device, qp: &mut Qp, packet: &Packet) {
    let (Service::Ud { source, qkey }, PacketBody::Send(_, tail)) = (packet.service, packet.body)
    else {
        return;
    };
    let wanted = match qp.transport {
        Transport::Ud | Transport::Gsi => qkey == qp.attributes.qkey,
        Transport::Smi => true,
        _ => false,
    };
    if !wanted || !qp.state.responds() {
        return;
    }
    device.cost.context(qp.number);
    let Ok(Some(wqe)) = receive::take(device, &mut qp.receive) else {
        device.count(qp.attributes.counters, |count| {
            count.receiver_not_ready += 1
        });
        return;
    };
    let mut completion = Completion {
        qpn: qp.number,
        user_index: qp.attributes.user_index,
        wqe_counter: wqe.index,
        byte_count: (GRH + packet.payload.len()) as u32,
        source_qpn: source,
        source_lid: packet.path.source,
        service_level: packet.path.service_level,
        grh: packet.path.grh.is_some(),
        solicited: packet.solicited,
        ..Completion::default()
    };
    (completion.kind, completion.immediate) = match tail {
        Tail::Immediate(data) => (CqeKind::ReceiveSendImmediate, data),
        _ => (CqeKind::ReceiveSend, 0),
    };
    let stored = store(device, qp, &wqe, packet);
    if let Err(syndrome) = stored {
        completion.kind = CqeKind::ReceiveError;
        completion.syndrome = syndrome;
    }
    device.complete(qp.attributes.receive_cq, completion);
    if stored.is_err() {
        fail(device, qp);
    }
}

fn store(device: &mut Device, qp: &Qp, wqe: &ReceiveWqe, packet: &Packet) -> Result<(), Syndrome> {
    if capacity(&wqe.segments) < (GRH + packet.payload.len()) as u64 {
        return Err(Syndrome::LocalLength);
    }
    let pd = local_domain(device, &qp.receive, qp.attributes.pd);
    let mut memory = reach(device);
    let mut scatter = |skip, bytes: &[u8]| {
        let done = memory.scatter(pd, qp.number, &wqe.segments, skip, bytes);
        done.map_err(|_| Syndrome::LocalProtection)
    };
    if let Some(grh) = &packet.path.grh {
        scatter(0, &encode(grh, packet.payload.len()))?;
    }
    scatter(GRH as u64, &packet.payload)
}

/// The bytes of a global route header.
fn encode(grh: &Grh, payload: usize) -> [u8; GRH] {
    // What follows: BTH and DETH, data, and the invariant CRC.
    const HEADERS: usize = 12 + 8 + 4;
    const IP_VERSION: u32 = 6;
    const NEXT_HEADER: u8 = 0x1b;
    let first = (IP_VERSION << 28) | (u32::from(grh.traffic_class) << 20) | grh.flow_label;
    let length = (HEADERS + payload.next_multiple_of(4)) as u16;
    let mut bytes = [0; GRH];
    bytes[..4].copy_from_slice(&first.to_be_bytes());
    bytes[4..6].copy_from_slice(&length.to_be_bytes());
    bytes[6] = NEXT_HEADER;
    bytes[7] = grh.hop_limit;
    bytes[8..24].copy_from_slice(&grh.source);
    bytes[24..].copy_from_slice(&grh.destination);
    bytes
}
