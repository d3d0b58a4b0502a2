// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Dynamic connections. A channel of an initiator (DCI) is connected to one target (DCT) at a time. Its first packet
//! creates the connection; a target keeps one connection for each channel.
//!
//! Each connection has a number that increases per device. A target ignores packets with the number of an ended
//! connection.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use super::responder::{Peer, Progress, Responder, ResponderContext, ResponderState};
use super::send_packet;
use super::wqe::Address;
use crate::device::Device;
use crate::network::packet::{Answer, DcConnection, Nak, Packet, PacketBody, Psn};
use crate::network::Outbox;
use crate::object::dct::{Dct, DctState};
use crate::object::eq::Event;
use crate::object::qp::Receive;
use crate::object::{receive, LOG_MAX_READS};

/// Time without a packet after which a draining target aborts a message in progress. Usual timeouts of an initiator are
/// shorter, so a live initiator has retransmitted by then.
const INITIATOR_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum number of connections that a target keeps. A new connection evicts an idle connection, and the evicted
/// initiator must reconnect.
const MAX_CONNECTIONS: usize = 1 << 16;

/// Number of connections with a wrong key that a target keeps.
const MAX_VIOLATORS: usize = 256;

/// Address of a channel: LID of the initiator's port, number of the initiator, and number of the channel.
type DciChannel = (u16, u32, u16);

/// Connections of a target.
#[derive(Clone, Debug, Default)]
pub struct Initiators {
    /// Latest connection of each channel.
    connections: BTreeMap<DciChannel, TargetConnection>,
    /// Channels with queued responses.
    ready: VecDeque<DciChannel>,
    /// Queued NAKs for requests with a wrong key.
    naks: Vec<Packet>,
    /// Latest connections with a wrong key: LID of the initiator's port, and number of the connection.
    violators: VecDeque<(u16, u64)>,
}

/// Responder side of a connection.
#[derive(Clone, Debug)]
struct TargetConnection {
    number: u64,
    state: ResponderState,
    /// `true` if the channel is in [`Initiators::ready`].
    ready: bool,
    /// Arrival time of the last packet.
    last_packet: Duration,
}

impl Initiators {
    /// Returns `true` if a message or a response of any connection is in progress.
    fn is_busy(&self) -> bool {
        let mut all = self.connections.values();
        all.any(|connection| connection.state.is_busy())
    }

    /// Returns the channel of the least recently used connection without a message or response in progress.
    fn oldest_idle(&self) -> Option<DciChannel> {
        let all = self.connections.iter();
        let idle = all.filter(|(_, connection)| !connection.ready && !connection.state.is_busy());
        let oldest = idle.min_by_key(|(_, connection)| connection.last_packet);
        oldest.map(|(initiator, _)| *initiator)
    }

    /// Records a connection with a wrong key. Returns `false` if it is already recorded.
    fn record_violator(&mut self, connection: (u16, u64)) -> bool {
        if self.violators.contains(&connection) {
            return false;
        }
        if self.violators.len() == MAX_VIOLATORS {
            self.violators.pop_front();
        }
        self.violators.push_back(connection);
        true
    }

    /// Returns the first time at which a message or response in progress times out.
    fn deadline(&self) -> Option<Duration> {
        let all = self.connections.values();
        let busy = all.filter(|connection| connection.state.is_busy());
        busy.map(|connection| connection.last_packet + INITIATOR_TIMEOUT)
            .min()
    }
}

/// Creates a connection of a channel of an initiator. `first` is the first PSN.
pub fn new_connection(
    device: &mut Device,
    initiator: u32,
    channel: u16,
    address: &Address,
    first: Psn,
) -> DcConnection {
    device.connections += 1;
    device.cost.count.connections += 1;
    DcConnection {
        initiator,
        channel,
        number: device.connections,
        first,
        key: address.key,
    }
}

/// Handles a received request of an initiator.
pub fn handle_request(device: &mut Device, connection: DcConnection, packet: &Packet) {
    let Some(mut dct) = device.objects.dcts.take(packet.destination) else {
        return;
    };
    device.cost.record_context(dct.number);
    if dct.access_key != connection.key {
        reject_key(device, &mut dct, connection, packet);
    } else if dct.state != DctState::Drained {
        accept_request(device, &mut dct, connection, packet);
    }
    device.objects.dcts.put_back(packet.destination, dct);
}

/// Sends the queued NAKs of a target, and the responses of one channel.
pub fn send_responses(device: &mut Device, number: u32, outbox: &mut Outbox) {
    let Some(mut dct) = device.objects.dcts.take(number) else {
        return;
    };
    for nak in dct.initiators.naks.drain(..) {
        send_packet(device, outbox, nak);
    }
    if let Some(initiator) = dct.initiators.ready.pop_front() {
        send_responses_to(device, &mut dct, initiator, outbox);
    }
    if !dct.initiators.ready.is_empty() {
        device.engine.wake(number);
    }
    complete_drain(device, &mut dct);
    device.objects.dcts.put_back(number, dct);
}

/// Drains a target: messages in progress complete, and requests of new connections are dropped. An event is raised at
/// the end.
pub fn drain_dct(device: &mut Device, number: u32) {
    if let Some(mut dct) = device.objects.dcts.take(number) {
        dct.state = DctState::Draining;
        complete_drain(device, &mut dct);
        schedule_timeout(device, &dct);
        device.objects.dcts.put_back(number, dct);
    }
}

/// Handles a timer of a target. If the target is draining, aborts messages of initiators that have timed out.
pub fn handle_timeout(device: &mut Device, number: u32) {
    let Some(mut dct) = device.objects.dcts.take(number) else {
        return;
    };
    for incoming in dct.initiators.connections.values_mut() {
        if dct.state == DctState::Draining && incoming.last_packet + INITIATOR_TIMEOUT <= device.now
        {
            abort_message(device, dct.srqn, incoming);
        }
    }
    complete_drain(device, &mut dct);
    schedule_timeout(device, &dct);
    device.objects.dcts.put_back(number, dct);
}

/// Sets the timer of a draining target to the first timeout of an initiator.
fn schedule_timeout(device: &mut Device, dct: &Dct) {
    let deadline = dct.initiators.deadline();
    if let Some(time) = deadline.filter(|_| dct.state == DctState::Draining) {
        device.engine.timers.insert((time, dct.number));
    }
}

/// Completes the drain of a target if no message or response is in progress, and raises the event.
fn complete_drain(device: &mut Device, dct: &mut Dct) {
    if dct.state == DctState::Draining && !dct.initiators.is_busy() {
        dct.state = DctState::Drained;
        for incoming in dct.initiators.connections.values_mut() {
            abort_message(device, dct.srqn, incoming);
        }
        device.event(Event::DctDrained(dct.number));
    }
}

/// Aborts the message and responses of a connection. A receive of the message returns to the shared receive queue.
fn abort_message(device: &mut Device, srqn: u32, incoming: &mut TargetConnection) {
    if let Some(wqe) = incoming.state.abort_message() {
        receive::return_receive(device, srqn, wqe);
    }
}

fn send_responses_to(
    device: &mut Device,
    dct: &mut Dct,
    initiator: DciChannel,
    outbox: &mut Outbox,
) {
    let Some(incoming) = dct.initiators.connections.get_mut(&initiator) else {
        return;
    };
    let progress = incoming.state.send_responses(device, outbox);
    incoming.ready = progress == Progress::More;
    match progress {
        Progress::Done => {}
        Progress::More => dct.initiators.ready.push_back(initiator),
        // A final NAK ends the connection. The initiator must reconnect.
        Progress::FinalNak(_) => abort_message(device, dct.srqn, incoming),
    }
}

/// Queues a NAK for a request with a wrong key. A connection is counted as one violation, whatever its number of
/// packets.
fn reject_key(device: &mut Device, dct: &mut Dct, connection: DcConnection, packet: &Packet) {
    let source = packet.path.source;
    if dct.initiators.record_violator((source, connection.number)) {
        dct.violations += 1;
        device.event(Event::DctKeyViolation(dct.number));
    }
    let peer = Peer::from_packet(packet, connection.initiator, dct.mtu);
    let body = PacketBody::Acknowledge(Answer::Nak(Nak::ConnectionKey));
    dct.initiators
        .naks
        .push(peer.response_packet(packet.psn, body));
    device.engine.wake(dct.number);
}

/// Returns the channel of a connection.
fn channel_id(connection: DcConnection, packet: &Packet) -> DciChannel {
    let source = packet.path.source;
    (source, connection.initiator, connection.channel)
}

fn accept_request(device: &mut Device, dct: &mut Dct, connection: DcConnection, packet: &Packet) {
    let initiator = channel_id(connection, packet);
    let previous = dct.initiators.connections.get(&initiator);
    let is_new = previous.is_none_or(|previous| previous.number < connection.number);
    if previous.is_some_and(|previous| previous.number > connection.number)
        || is_new && dct.state != DctState::Active
    {
        return;
    }
    if is_new && !reserve_connection(device, dct, initiator) {
        return;
    }
    if is_new {
        device.count(dct.counters, |count| count.connections_accepted += 1);
        let incoming = TargetConnection {
            number: connection.number,
            state: ResponderState::default(),
            ready: false,
            last_packet: device.now,
        };
        let old = dct.initiators.connections.insert(initiator, incoming);
        if let Some(mut old) = old {
            abort_message(device, dct.srqn, &mut old);
        }
    }
    let context = responder_context(dct, connection, packet);
    let mut receive = Receive::Shared(dct.srqn);
    let Some(incoming) = dct.initiators.connections.get_mut(&initiator) else {
        return;
    };
    incoming.last_packet = device.now;
    let _ = Responder {
        device,
        context: &context,
        receive: &mut receive,
        state: &mut incoming.state,
    }
    .handle_request(packet);
    if incoming.state.has_responses() {
        if !std::mem::replace(&mut incoming.ready, true) {
            dct.initiators.ready.push_back(initiator);
        }
        device.engine.wake(dct.number);
    }
}

/// Ensures that a connection of this channel can be added, by eviction of an idle connection. Returns `false` if all
/// connections are busy: the packet is then dropped.
fn reserve_connection(device: &mut Device, dct: &mut Dct, initiator: DciChannel) -> bool {
    let initiators = &mut dct.initiators;
    let connections = &initiators.connections;
    if connections.len() < MAX_CONNECTIONS || connections.contains_key(&initiator) {
        return true;
    }
    let idle = initiators.oldest_idle();
    let idle = idle.and_then(|idle| initiators.connections.remove(&idle));
    let Some(mut idle) = idle else {
        return false;
    };
    abort_message(device, dct.srqn, &mut idle);
    true
}

/// Returns the responder context of a DC target for a packet.
fn responder_context(dct: &Dct, connection: DcConnection, packet: &Packet) -> ResponderContext {
    ResponderContext {
        number: dct.number,
        reliable: true,
        first: connection.first,
        pd: Some(dct.pd),
        cqn: dct.cqn,
        user_index: dct.user_index,
        counters: dct.counters,
        max_reads: 1 << LOG_MAX_READS,
        rights: dct.rights,
        min_rnr_nak: dct.min_rnr_nak,
        scatter: dct.scatter_to_cqe,
        source: connection.initiator,
        peer: Peer::from_packet(packet, connection.initiator, dct.mtu),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::DeviceId;
    use crate::fabric::Port;
    use crate::layout::{set, size};
    use crate::network::packet::{Path, Position, Reth, Service, Tail};

    const KEY: u64 = 7;

    /// Returns a device with a target, and the number of the target.
    fn new_device() -> (Device, u32) {
        let (lid, guid, up) = (1, 1, true);
        let mut device = Device::new(DeviceId(0), Port { lid, guid, up });
        let mut context = [0; size!(dctc)];
        set!(context, dctc, dc_access_key, KEY);
        set!(context, dctc, rwe, 1u32);
        let dcts = &mut device.objects.dcts;
        let target = dcts.insert_with(|number| Dct::new(number, context));
        (device, target.unwrap())
    }

    /// Handles the first packet of an initiator: a WRITE of 0 bytes.
    fn send_empty_write(device: &mut Device, target: u32, initiator: u32, key: u64) {
        let (address, length) = (0, 0);
        let reth = Reth {
            address,
            length,
            key: 0,
        };
        let connection = DcConnection {
            initiator,
            channel: 0,
            number: u64::from(initiator) + 1,
            first: Psn::default(),
            key,
        };
        let packet = Packet {
            path: Path::default(),
            service: Service::Dc(connection),
            destination: target,
            psn: Psn::default(),
            acknowledge: true,
            solicited: false,
            body: PacketBody::Write(Position::Only, Some(reth), Tail::None),
            payload: Vec::new(),
        };
        handle_request(device, connection, &packet);
    }

    fn send_all_responses(device: &mut Device, target: u32) {
        for _ in 0..=MAX_CONNECTIONS {
            send_responses(device, target, &mut Outbox::default());
        }
    }

    fn has_connection(device: &Device, target: u32, initiator: u32) -> bool {
        let initiators = &device.objects.dcts.get(target).unwrap().initiators;
        assert!(initiators.connections.len() <= MAX_CONNECTIONS);
        initiators.connections.contains_key(&(0, initiator, 0))
    }

    #[test]
    fn full_dct_evicts_least_recent_idle_connection() {
        let (mut device, target) = new_device();
        let most = MAX_CONNECTIONS as u32;
        for initiator in 0..most {
            device.now += Duration::from_millis(1);
            send_empty_write(&mut device, target, initiator, KEY);
        }
        device.now += Duration::from_millis(1);
        send_empty_write(&mut device, target, 0, KEY);
        send_empty_write(&mut device, target, most, KEY);
        assert!(
            !has_connection(&device, target, most),
            "all others are busy"
        );
        send_all_responses(&mut device, target);
        send_empty_write(&mut device, target, most, KEY);
        let is_connected =
            [0, 1, 2, most].map(|initiator| has_connection(&device, target, initiator));
        assert_eq!(is_connected, [true, false, true, true]);
    }

    #[test]
    fn dct_keeps_limited_number_of_violators() {
        let (mut device, target) = new_device();
        for initiator in 0..2 * MAX_VIOLATORS as u32 {
            for _ in 0..2 {
                send_empty_write(&mut device, target, initiator, KEY + 1);
            }
        }
        let dct = device.objects.dcts.get(target).unwrap();
        assert_eq!(dct.violations, 2 * MAX_VIOLATORS as u32);
        assert_eq!(dct.initiators.violators.len(), MAX_VIOLATORS);
    }
}
