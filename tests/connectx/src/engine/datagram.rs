// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Unreliable datagrams: each message is one packet without an acknowledgement. It is dropped if no receive is posted.
//!
//! The first 40 bytes of a receive are reserved for the GRH, also for packets without a GRH.

use super::requester::{gather_payload, Stop};
use super::wqe::{Operation, SendWqe};
use super::{enter_error, key_memory, receive_pd, send_packet, with_qp};
use crate::device::Device;
use crate::network::packet::{Grh, Packet, PacketBody, Position, Psn, Service, Tail};
use crate::network::Outbox;
use crate::object::cq::{Completion, CqeKind, Syndrome};
use crate::object::qp::{Qp, Transport};
use crate::object::receive::{self, ReceiveWqe};
use crate::object::scatter::capacity;

/// Destination QPN of multicast packets.
const MULTICAST_QPN: u32 = 0xff_ffff;
/// QPN of general services (GSI).
const GSI_QPN: u32 = 1;
/// Size of a GRH.
const GRH_BYTES: usize = 40;
/// Bit of the Q_Key in a work request that selects the Q_Key of the queue pair.
const OWN_QKEY: u32 = 1 << 31;

/// Executes a work request of a datagram queue pair.
pub fn send_datagram(
    device: &mut Device,
    qp: &Qp,
    wqe: &SendWqe,
    outbox: &mut Outbox,
) -> Result<(), Stop> {
    let (Operation::Send(tail), Some(address)) = (&wqe.operation, &wqe.address) else {
        return Err(Stop::Failed(Syndrome::LocalQpOperation));
    };
    let length = wqe.data.length();
    if length > u64::from(qp.attributes.mtu) {
        return Err(Stop::Failed(Syndrome::LocalLength));
    }
    let mut payload = outbox.buffer(length as usize);
    let gathered = gather_payload(device, qp, wqe, 0, &mut payload);
    gathered.map_err(|fault| Stop::from_fault(device, qp.number, fault))?;
    let own = address.qkey() & OWN_QKEY != 0;
    let qkey = if own {
        qp.attributes.qkey
    } else {
        address.qkey()
    };
    let source = match (qp.transport, qp.attributes.source_qpn) {
        (Transport::Smi, _) => 0,
        (Transport::Gsi, 0) => GSI_QPN,
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
    send_packet(device, outbox, packet);
    Ok(())
}

/// Handles a received datagram.
pub fn handle_datagram(device: &mut Device, packet: &Packet) {
    let members = match packet.destination {
        MULTICAST_QPN => group_members(device, packet),
        GSI_QPN => service_qp(device, Transport::Gsi),
        0 => service_qp(device, Transport::Smi),
        number => vec![number],
    };
    for number in members {
        with_qp(device, number, |device, qp| {
            deliver_to_qp(device, qp, packet)
        });
    }
}

/// Returns the queue pairs that receive a multicast packet: all members of the group without the sender.
fn group_members(device: &Device, packet: &Packet) -> Vec<u32> {
    let (Some(grh), Service::Ud { source, .. }) = (&packet.path.grh, packet.service) else {
        return Vec::new();
    };
    let own = packet.path.source == device.port.lid;
    let members = device.objects.groups.members(&grh.destination);
    members
        .filter(|number| !(own && *number == source))
        .collect()
}

/// Returns the queue pair with the transport of a special service, if it exists.
fn service_qp(device: &Device, transport: Transport) -> Vec<u32> {
    let mut all = device.objects.qps.iter();
    let found = all.find(|(_, qp)| qp.transport == transport);
    found.map(|(number, _)| number).into_iter().collect()
}

/// Writes a valid datagram to the next receive of a queue pair. Drops a datagram with a wrong Q_Key.
fn deliver_to_qp(device: &mut Device, qp: &mut Qp, packet: &Packet) {
    let (Service::Ud { source, qkey }, PacketBody::Send(_, tail)) = (packet.service, packet.body)
    else {
        return;
    };
    let accepted = match qp.transport {
        Transport::Ud | Transport::Gsi => qkey == qp.attributes.qkey,
        Transport::Smi => true,
        _ => false,
    };
    if !accepted || !qp.state.responds() {
        return;
    }
    device.cost.record_context(qp.number);
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
        byte_count: (GRH_BYTES + packet.payload.len()) as u32,
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
    let stored = store_datagram(device, qp, &wqe, packet);
    if let Err(syndrome) = stored {
        completion.kind = CqeKind::ReceiveError;
        completion.syndrome = syndrome;
    }
    device.complete(qp.attributes.receive_cq, completion);
    if stored.is_err() {
        enter_error(device, qp);
    }
}

/// Writes GRH and data to the memory of a receive.
fn store_datagram(
    device: &mut Device,
    qp: &Qp,
    wqe: &ReceiveWqe,
    packet: &Packet,
) -> Result<(), Syndrome> {
    if capacity(&wqe.segments) < (GRH_BYTES + packet.payload.len()) as u64 {
        return Err(Syndrome::LocalLength);
    }
    let pd = receive_pd(device, &qp.receive, qp.attributes.pd);
    let mut memory = key_memory(device);
    let mut scatter = |skip, bytes: &[u8]| {
        let done = memory.scatter(pd, qp.number, &wqe.segments, skip, bytes);
        done.map_err(|_| Syndrome::LocalProtection)
    };
    if let Some(grh) = &packet.path.grh {
        scatter(0, &encode_grh(grh, packet.payload.len()))?;
    }
    scatter(GRH_BYTES as u64, &packet.payload)
}

/// Encodes a GRH.
fn encode_grh(grh: &Grh, payload: usize) -> [u8; GRH_BYTES] {
    // The payload length of the GRH covers BTH, DETH, data, and the invariant CRC.
    const HEADERS: usize = 12 + 8 + 4;
    const IP_VERSION: u32 = 6;
    const NEXT_HEADER: u8 = 0x1b;
    let first = (IP_VERSION << 28) | (u32::from(grh.traffic_class) << 20) | grh.flow_label;
    let length = (HEADERS + payload.next_multiple_of(4)) as u16;
    let mut bytes = [0; GRH_BYTES];
    bytes[..4].copy_from_slice(&first.to_be_bytes());
    bytes[4..6].copy_from_slice(&length.to_be_bytes());
    bytes[6] = NEXT_HEADER;
    bytes[7] = grh.hop_limit;
    bytes[8..24].copy_from_slice(&grh.source);
    bytes[24..].copy_from_slice(&grh.destination);
    bytes
}
