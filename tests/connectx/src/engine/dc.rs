// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Dynamic connections. An initiator (DCI) connects to one target (DCT) at a time, by its first packet; a
//! target keeps a connection for each initiator.
//!
//! Connections of a device are numbered, so a packet of one that has ended is known and ignored.

use std::collections::{BTreeMap, VecDeque};

use super::responder::{self, Peer, Progress, Responder, Target};
use super::send;
use super::wqe::Address;
use crate::device::Device;
use crate::network::packet::{Answer, Body, Connection, Nak, Packet, Psn};
use crate::network::Outbox;
use crate::object::dct::{Dct, State};
use crate::object::eq::Event;
use crate::object::qp::Receive;

/// An initiator: the LID of its port, and its number.
type Initiator = (u16, u32);

/// The initiators of a target.
#[derive(Clone, Debug, Default)]
pub struct Initiators {
    /// The last connection of each.
    connections: BTreeMap<Initiator, Incoming>,
    /// Those to which answers wait.
    ready: VecDeque<Initiator>,
    /// Refusals because of a wrong key.
    refusals: Vec<Packet>,
}

/// A connection at its target.
#[derive(Clone, Debug)]
struct Incoming {
    number: u64,
    state: responder::State,
}

impl Initiators {
    /// Whether a message or an answer is under way.
    fn is_busy(&self) -> bool {
        let mut all = self.connections.values();
        all.any(|connection| connection.state.is_busy())
    }
}

/// Makes a connection of an initiator, whose packets are counted from `first`.
pub fn connect(device: &mut Device, initiator: u32, address: &Address, first: Psn) -> Connection {
    device.engine.connections += 1;
    device.cost.count.connections += 1;
    Connection {
        initiator,
        number: device.engine.connections,
        first,
        key: address.key,
    }
}

/// A request of an initiator arrived.
pub fn request(device: &mut Device, connection: Connection, packet: &Packet) {
    let Some(mut dct) = device.objects.dcts.take(packet.destination) else {
        return;
    };
    device.cost.context(dct.number);
    if dct.access_key != connection.key {
        refuse(device, &mut dct, connection, packet);
    } else if dct.state != State::Drained {
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

/// Lets a target finish what it began, and no more; an event tells when that is done.
pub fn drain(device: &mut Device, number: u32) {
    if let Some(mut dct) = device.objects.dcts.take(number) {
        dct.state = State::Draining;
        check_drained(device, &mut dct);
        device.objects.dcts.put_back(number, dct);
    }
}

fn check_drained(device: &mut Device, dct: &mut Dct) {
    if dct.state == State::Draining && !dct.initiators.is_busy() {
        dct.state = State::Drained;
        device.event(Event::DctDrained(dct.number));
    }
}

fn answer_initiator(device: &mut Device, dct: &mut Dct, initiator: Initiator, outbox: &mut Outbox) {
    let Some(incoming) = dct.initiators.connections.get_mut(&initiator) else {
        return;
    };
    // A connection that refused a request ends: its initiator has to make another.
    if incoming.state.answer(device, outbox) == Progress::More {
        dct.initiators.ready.push_back(initiator);
    }
}

/// Refuses a request whose key is wrong.
fn refuse(device: &mut Device, dct: &mut Dct, connection: Connection, packet: &Packet) {
    dct.violations += 1;
    device.event(Event::DctKeyViolation(dct.number));
    let peer = Peer::of(packet, connection.initiator, dct.mtu);
    let body = Body::Acknowledge(Answer::Nak(Nak::ConnectionKey));
    dct.initiators.refusals.push(peer.packet(packet.psn, body));
    device.engine.wake(dct.number);
}

fn accept(device: &mut Device, dct: &mut Dct, connection: Connection, packet: &Packet) {
    let initiator = (packet.path.source, connection.initiator);
    let known = dct.initiators.connections.get(&initiator);
    let is_new = known.is_none_or(|known| known.number < connection.number);
    if known.is_some_and(|known| known.number > connection.number)
        || is_new && dct.state != State::Active
    {
        return;
    }
    if is_new {
        let incoming = Incoming {
            number: connection.number,
            state: responder::State::default(),
        };
        dct.initiators.connections.insert(initiator, incoming);
    }
    let target = target(dct, connection, packet);
    let mut receive = Receive::Shared(dct.srqn);
    let Some(incoming) = dct.initiators.connections.get_mut(&initiator) else {
        return;
    };
    let _ = Responder {
        device,
        target: &target,
        receive: &mut receive,
        state: &mut incoming.state,
    }
    .request(packet);
    if incoming.state.has_replies() {
        if !dct.initiators.ready.contains(&initiator) {
            dct.initiators.ready.push_back(initiator);
        }
        device.engine.wake(dct.number);
    }
}

/// A DC target as the receiver of a packet.
fn target(dct: &Dct, connection: Connection, packet: &Packet) -> Target {
    Target {
        number: dct.number,
        reliable: true,
        first: connection.first,
        pd: Some(dct.pd),
        cqn: dct.cqn,
        user_index: dct.user_index,
        rights: dct.rights,
        min_rnr_nak: dct.min_rnr_nak,
        scatter: dct.scatter_to_cqe,
        source: connection.initiator,
        peer: Peer::of(packet, connection.initiator, dct.mtu),
    }
}
