// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Dynamic connections. A channel of an initiator (DCI) connects to one target (DCT) at a time, by its first
//! packet; a target keeps a connection for each of them.
//!
//! Connections of a device are numbered, so a packet of one that has ended is known and ignored.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use super::responder::{Peer, Progress, Responder, ResponderContext, ResponderState};
use super::send;
use super::wqe::Address;
use crate::device::Device;
use crate::network::packet::{Answer, DcConnection, Nak, Packet, PacketBody, Psn};
use crate::network::Outbox;
use crate::object::dct::{Dct, DctState};
use crate::object::eq::Event;
use crate::object::qp::Receive;
use crate::object::{receive, LOG_MAX_READS};

/// An initiator that is silent for so long in the middle of a message is gone: the usual timeouts, after
/// which it would repeat, are shorter.
const SILENCE: Duration = Duration::from_secs(10);

/// Maximum number of connections that a target keeps. A new connection replaces an idle one, whose initiator must
/// connect again.
const CONNECTIONS: usize = 1 << 16;

/// Number of connections with a wrong key that a target keeps.
const VIOLATORS: usize = 256;

/// A channel of an initiator: the LID of its port, the initiator's number, and that of the channel.
type Initiator = (u16, u32, u16);

/// The initiators of a target.
#[derive(Clone, Debug, Default)]
pub struct Initiators {
    /// The last connection of each.
    connections: BTreeMap<Initiator, Incoming>,
    /// Those to which answers wait.
    ready: VecDeque<Initiator>,
    /// Refusals because of a wrong key.
    refusals: Vec<Packet>,
    /// The last connections that had a wrong key: the LID of the initiator's port, and the number.
    violators: VecDeque<(u16, u64)>,
}

/// A connection at its target.
#[derive(Clone, Debug)]
struct Incoming {
    number: u64,
    state: ResponderState,
    /// `true` if the connection is in the list of those with responses to send.
    ready: bool,
    /// When the last packet came.
    heard: Duration,
}

impl Initiators {
    /// Returns `true` if a message or a response of any connection is in progress.
    fn is_busy(&self) -> bool {
        let mut all = self.connections.values();
        all.any(|connection| connection.state.is_busy())
    }

    /// The connection that nothing is under way with, for the longest time.
    fn idle(&self) -> Option<Initiator> {
        let all = self.connections.iter();
        let idle = all.filter(|(_, connection)| !connection.ready && !connection.state.is_busy());
        let oldest = idle.min_by_key(|(_, connection)| connection.heard);
        oldest.map(|(initiator, _)| *initiator)
    }

    /// Remembers a connection that had a wrong key. Returns whether it is new.
    fn violates(&mut self, connection: (u16, u64)) -> bool {
        if self.violators.contains(&connection) {
            return false;
        }
        if self.violators.len() == VIOLATORS {
            self.violators.pop_front();
        }
        self.violators.push_back(connection);
        true
    }

    /// When the first of those will be given up with which something is under way, if they stay silent.
    fn deadline(&self) -> Option<Duration> {
        let all = self.connections.values();
        let busy = all.filter(|connection| connection.state.is_busy());
        busy.map(|connection| connection.heard + SILENCE).min()
    }
}

/// Makes a connection of a channel of an initiator, whose packets are counted from `first`.
pub fn connect(
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

/// A request of an initiator arrived.
pub fn request(device: &mut Device, connection: DcConnection, packet: &Packet) {
    let Some(mut dct) = device.objects.dcts.take(packet.destination) else {
        return;
    };
    device.cost.context(dct.number);
    if dct.access_key != connection.key {
        refuse(device, &mut dct, connection, packet);
    } else if dct.state != DctState::Drained {
        accept(device, &mut dct, connection, packet);
    }
    device.objects.dcts.put_back(packet.destination, dct);
}

/// Lets one initiator of a target have its answers.
pub fn answer(device: &mut Device, number: u32, outbox: &mut Outbox) {
    let Some(mut dct) = device.objects.dcts.take(number) else {
        return;
    };
    for refusal in dct.initiators.refusals.drain(..) {
        send(device, outbox, refusal);
    }
    if let Some(initiator) = dct.initiators.ready.pop_front() {
        answer_initiator(device, &mut dct, initiator, outbox);
    }
    if !dct.initiators.ready.is_empty() {
        device.engine.wake(number);
    }
    check_drained(device, &mut dct);
    device.objects.dcts.put_back(number, dct);
}

/// Drains a target: messages in progress complete, and new connections are rejected. An event is raised at the end.
pub fn drain(device: &mut Device, number: u32) {
    if let Some(mut dct) = device.objects.dcts.take(number) {
        dct.state = DctState::Draining;
        check_drained(device, &mut dct);
        watch(device, &dct);
        device.objects.dcts.put_back(number, dct);
    }
}

/// Time has passed: a target that is drained does not wait any longer for initiators that are gone.
pub fn timeout(device: &mut Device, number: u32) {
    let Some(mut dct) = device.objects.dcts.take(number) else {
        return;
    };
    for incoming in dct.initiators.connections.values_mut() {
        if dct.state == DctState::Draining && incoming.heard + SILENCE <= device.now {
            abandon(device, dct.srqn, incoming);
        }
    }
    check_drained(device, &mut dct);
    watch(device, &dct);
    device.objects.dcts.put_back(number, dct);
}

/// Looks again at a target that is not drained, when an initiator has been silent for too long.
fn watch(device: &mut Device, dct: &Dct) {
    let deadline = dct.initiators.deadline();
    if let Some(time) = deadline.filter(|_| dct.state == DctState::Draining) {
        device.engine.timers.insert((time, dct.number));
    }
}

fn check_drained(device: &mut Device, dct: &mut Dct) {
    if dct.state == DctState::Draining && !dct.initiators.is_busy() {
        dct.state = DctState::Drained;
        for incoming in dct.initiators.connections.values_mut() {
            abandon(device, dct.srqn, incoming);
        }
        device.event(Event::DctDrained(dct.number));
    }
}

/// Gives up what is under way with an initiator. A receive that was taken for it is for others again.
fn abandon(device: &mut Device, srqn: u32, incoming: &mut Incoming) {
    if let Some(wqe) = incoming.state.abandon() {
        receive::give_back(device, srqn, wqe);
    }
}

fn answer_initiator(device: &mut Device, dct: &mut Dct, initiator: Initiator, outbox: &mut Outbox) {
    let Some(incoming) = dct.initiators.connections.get_mut(&initiator) else {
        return;
    };
    let progress = incoming.state.answer(device, outbox);
    incoming.ready = progress == Progress::More;
    match progress {
        Progress::Done => {}
        Progress::More => dct.initiators.ready.push_back(initiator),
        // The connection ends: its initiator has to make another.
        Progress::Refused(_) => abandon(device, dct.srqn, incoming),
    }
}

/// Refuses a request whose key is wrong. That counts once for a connection, not for each of its packets.
fn refuse(device: &mut Device, dct: &mut Dct, connection: DcConnection, packet: &Packet) {
    let source = packet.path.source;
    if dct.initiators.violates((source, connection.number)) {
        dct.violations += 1;
        device.event(Event::DctKeyViolation(dct.number));
    }
    let peer = Peer::of(packet, connection.initiator, dct.mtu);
    let body = PacketBody::Acknowledge(Answer::Nak(Nak::ConnectionKey));
    dct.initiators.refusals.push(peer.packet(packet.psn, body));
    device.engine.wake(dct.number);
}

/// Returns the channel of an initiator that made a connection.
fn initiator(connection: DcConnection, packet: &Packet) -> Initiator {
    let source = packet.path.source;
    (source, connection.initiator, connection.channel)
}

fn accept(device: &mut Device, dct: &mut Dct, connection: DcConnection, packet: &Packet) {
    let initiator = initiator(connection, packet);
    let known = dct.initiators.connections.get(&initiator);
    let is_new = known.is_none_or(|known| known.number < connection.number);
    if known.is_some_and(|known| known.number > connection.number)
        || is_new && dct.state != DctState::Active
    {
        return;
    }
    if is_new && !make_room(device, dct, initiator) {
        return;
    }
    if is_new {
        device.count(dct.counters, |count| count.connections_accepted += 1);
        let incoming = Incoming {
            number: connection.number,
            state: ResponderState::default(),
            ready: false,
            heard: device.now,
        };
        let old = dct.initiators.connections.insert(initiator, incoming);
        if let Some(mut old) = old {
            abandon(device, dct.srqn, &mut old);
        }
    }
    let target = target(dct, connection, packet);
    let mut receive = Receive::Shared(dct.srqn);
    let Some(incoming) = dct.initiators.connections.get_mut(&initiator) else {
        return;
    };
    incoming.heard = device.now;
    let _ = Responder {
        device,
        target: &target,
        receive: &mut receive,
        state: &mut incoming.state,
    }
    .request(packet);
    if incoming.state.has_replies() {
        if !std::mem::replace(&mut incoming.ready, true) {
            dct.initiators.ready.push_back(initiator);
        }
        device.engine.wake(dct.number);
    }
}

/// Makes room for a connection of this initiator. Returns whether there is any: if not, the packet is as good
/// as lost.
fn make_room(device: &mut Device, dct: &mut Dct, initiator: Initiator) -> bool {
    let initiators = &mut dct.initiators;
    let connections = &initiators.connections;
    if connections.len() < CONNECTIONS || connections.contains_key(&initiator) {
        return true;
    }
    let idle = initiators.idle();
    let idle = idle.and_then(|idle| initiators.connections.remove(&idle));
    let Some(mut idle) = idle else {
        return false;
    };
    abandon(device, dct.srqn, &mut idle);
    true
}

/// A DC target as the receiver of a packet.
fn target(dct: &Dct, connection: DcConnection, packet: &Packet) -> ResponderContext {
    ResponderContext {
        number: dct.number,
        reliable: true,
        first: connection.first,
        pd: Some(dct.pd),
        cqn: dct.cqn,
        user_index: dct.user_index,
        counters: dct.counters,
        reads: 1 << LOG_MAX_READS,
        rights: dct.rights,
        min_rnr_nak: dct.min_rnr_nak,
        scatter: dct.scatter_to_cqe,
        source: connection.initiator,
        peer: Peer::of(packet, connection.initiator, dct.mtu),
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

    /// A device with a target, and its number.
    fn device() -> (Device, u32) {
        let (lid, guid, up) = (1, 1, true);
        let mut device = Device::new(DeviceId(0), Port { lid, guid, up });
        let mut context = [0; size!(dctc)];
        set!(context, dctc, dc_access_key, KEY);
        set!(context, dctc, rwe, 1u32);
        let dcts = &mut device.objects.dcts;
        let target = dcts.insert_with(|number| Dct::new(number, context));
        (device, target.unwrap())
    }

    /// The first packet of an initiator: a WRITE of nothing.
    fn write(device: &mut Device, target: u32, initiator: u32, key: u64) {
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
        request(device, connection, &packet);
    }

    fn answer_all(device: &mut Device, target: u32) {
        for _ in 0..=CONNECTIONS {
            answer(device, target, &mut Outbox::default());
        }
    }

    fn knows(device: &Device, target: u32, initiator: u32) -> bool {
        let initiators = &device.objects.dcts.get(target).unwrap().initiators;
        assert!(initiators.connections.len() <= CONNECTIONS);
        initiators.connections.contains_key(&(0, initiator, 0))
    }

    #[test]
    fn full_dct_evicts_least_recent_idle_connection() {
        let (mut device, target) = device();
        let most = CONNECTIONS as u32;
        for initiator in 0..most {
            device.now += Duration::from_millis(1);
            write(&mut device, target, initiator, KEY);
        }
        device.now += Duration::from_millis(1);
        write(&mut device, target, 0, KEY);
        write(&mut device, target, most, KEY);
        assert!(!knows(&device, target, most), "all others are busy");
        answer_all(&mut device, target);
        write(&mut device, target, most, KEY);
        let known = [0, 1, 2, most].map(|initiator| knows(&device, target, initiator));
        assert_eq!(known, [true, false, true, true]);
    }

    #[test]
    fn dct_keeps_limited_number_of_violators() {
        let (mut device, target) = device();
        for initiator in 0..2 * VIOLATORS as u32 {
            for _ in 0..2 {
                write(&mut device, target, initiator, KEY + 1);
            }
        }
        let dct = device.objects.dcts.get(target).unwrap();
        assert_eq!(dct.violations, 2 * VIOLATORS as u32);
        assert_eq!(dct.initiators.violators.len(), VIOLATORS);
    }
}
