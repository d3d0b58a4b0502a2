// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The receiving side of a connection: carries out the requests of a peer and answers them.
//!
//! Requests are executed in the order of their sequence numbers, each once. A duplicate request gets another response:
//! a READ is executed again, and the result of an atomic operation is kept for this. Responses wait in a queue, and
//! are sent in order in the turn of the queue pair.

use std::collections::VecDeque;

use super::{local_domain, page_fault, reach, send, BURST};
use crate::cost::Count;
use crate::device::Device;
use crate::network::packet::{
    Answer, Atomic, AtomicOperation, Body, Grh, Nak, Packet, Path, Position, Psn, Reth, Service,
    Tail,
};
use crate::network::Outbox;
use crate::object::cq::{Completion, Kind, Syndrome};
use crate::object::eq::QpEvent;
use crate::object::mkey::{self, Access, Fault, User};
use crate::object::qp::{Qp, Receive, Rights};
use crate::object::receive::{self, Wqe};
use crate::object::scatter::capacity;

/// Maximum number of responses that wait. Further responses, except a final NAK, are dropped, and their requester
/// retries.
const REPLIES: usize = 256;

/// Number of results of atomic operations that are kept: at least as many as a peer may have in flight.
const ATOMICS: usize = 128;

/// Receive state of a connection.
#[derive(Clone, Debug, Default)]
pub struct State {
    /// The sequence number that comes next, once the first packet came.
    expected: Option<Psn>,
    /// `true` if the expected packet was requested again: the packets behind it are ignored until it arrives.
    refused: bool,
    /// `true` if a request was rejected with a final NAK.
    failed: bool,
    /// The message that is under way.
    message: Option<Message>,
    /// A receive that was taken for a message of which a part was lost.
    spare: Option<Wqe>,
    /// Answers that were not sent yet.
    replies: VecDeque<Reply>,
    /// Values that atomic operations have found, by sequence number.
    atomics: VecDeque<(Psn, u64)>,
    /// Where answers go.
    peer: Option<Peer>,
}

/// A message of which more is to come.
#[derive(Clone, Debug)]
enum Message {
    /// A SEND, into this receive, of which so many bytes came.
    Send(Wqe, u64),
    /// A WRITE: what is left of it, and how long all of it is.
    Write(Reth, u32),
}

/// An answer to send.
#[derive(Clone, Debug)]
enum Reply {
    /// All up to here is done.
    Ack(Psn),
    /// This one is not done, but may be tried again.
    TryAgain(Psn, Answer),
    /// This one is refused, and that is the end; perhaps with an event.
    Refuse(Psn, Nak, Option<QpEvent>),
    /// The value that an atomic operation found, sent for the first time or again.
    Atomic(Psn, u64, Turn),
    /// The rest of a READ.
    Read(Reading),
}

/// Distinguishes the first response to a request from a response to a duplicate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    First,
    Again,
}

/// The answer to a READ, from some packet on.
#[derive(Clone, Copy, Debug)]
struct Reading {
    psn: Psn,
    rest: Reth,
    user: User,
    turn: Turn,
    /// RNR timer code for the peer if memory is absent.
    min_rnr_nak: u8,
}

/// Where answers go.
#[derive(Clone, Copy, Debug)]
pub struct Peer {
    path: Path,
    service: Service,
    number: u32,
    mtu: u32,
}

impl Peer {
    /// The sender of `packet`, whose queue pair is `number`.
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

    /// An answer.
    pub fn packet(&self, psn: Psn, body: Body) -> Packet {
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
pub struct Target {
    /// Its number.
    pub number: u32,
    /// `true` if requests are acknowledged.
    pub reliable: bool,
    /// The sequence number of the first packet.
    pub first: Psn,
    /// The protection domain; `None` if the shared receive queue that the packet names does not exist.
    pub pd: Option<u32>,
    /// Where completions go.
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
    /// The most bytes of a message that go into its completion.
    pub scatter: u8,
    /// The queue pair that completions name as the source: for DC only.
    pub source: u32,
    /// The sender.
    pub peer: Peer,
}

impl Target {
    /// A queue pair as the receiver of a packet; for XRC with the queue that the packet names.
    pub fn of_qp(device: &Device, qp: &Qp, packet: &Packet) -> (Self, Option<Receive>) {
        let attributes = &qp.attributes;
        let target = Target {
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
            return (Target { pd: None, ..target }, Some(Receive::None));
        };
        let target = Target {
            pd: Some(srq.pd),
            cqn: srq.cqn,
            user_index: srq.user_index,
            ..target
        };
        (target, Some(Receive::Shared(number)))
    }
}

/// Why a request is not carried out.
enum Refusal {
    /// There is no receive, or memory is absent. Nothing was done.
    NotReady,
    /// It never will be.
    Final(Nak, Option<QpEvent>),
}

impl Refusal {
    const INVALID: Refusal = Refusal::Final(Nak::InvalidRequest, Some(QpEvent::InvalidRequest));
    const ACCESS: Refusal = Refusal::Final(Nak::RemoteAccess, Some(QpEvent::AccessError));
    const OPERATION: Refusal = Refusal::Final(Nak::RemoteOperation, Some(QpEvent::Catastrophic));
}

/// The receiver failed, and sends no NAK.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failed;

/// Progress of sending responses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// There is none left.
    Done,
    /// There are more.
    More,
    /// The last one refused a request for good, which ends the connection.
    Refused(Option<QpEvent>),
}

impl State {
    /// Returns `true` if no packet has arrived so far.
    pub fn is_new(&self) -> bool {
        self.expected.is_none()
    }

    /// Returns `true` if responses wait.
    pub fn has_replies(&self) -> bool {
        !self.replies.is_empty()
    }

    /// Returns the number of READs and atomic operations without a response so far. Duplicates are not counted: their
    /// first response was.
    fn unanswered(&self) -> usize {
        let is_first = |reply: &&Reply| match reply {
            Reply::Atomic(_, _, turn) => *turn == Turn::First,
            Reply::Read(reading) => reading.turn == Turn::First,
            _ => false,
        };
        self.replies.iter().filter(is_first).count()
    }

    /// Returns `true` if a message or a response is in progress.
    pub fn is_busy(&self) -> bool {
        self.message.is_some() || self.has_replies()
    }

    /// The sequence number that is expected next, once anything came.
    pub fn next_psn(&self) -> Option<u32> {
        self.expected.map(Psn::get)
    }

    /// Gives up the message and the answers that are under way. Returns the receive that was taken for the
    /// message.
    pub fn abandon(&mut self) -> Option<Wqe> {
        self.replies.clear();
        match self.message.take() {
            Some(Message::Send(wqe, _)) => Some(wqe),
            _ => self.spare.take(),
        }
    }

    /// Returns the value that the atomic operation with this sequence number found. Sequence numbers wrap, so the last
    /// such operation counts.
    fn found(&self, psn: Psn) -> Option<u64> {
        let mut atomics = self.atomics.iter();
        let last = atomics.rfind(|(number, _)| *number == psn);
        last.map(|(_, found)| *found)
    }

    /// Sends answers, as many as may be sent at once.
    pub fn answer(&mut self, device: &mut Device, outbox: &mut Outbox) -> Progress {
        let Some(peer) = self.peer else {
            return Progress::Done;
        };
        for _ in 0..BURST {
            let Some(reply) = self.replies.pop_front() else {
                return Progress::Done;
            };
            let (psn, body) = match reply {
                Reply::Ack(psn) => (psn, Body::Acknowledge(Answer::Ack)),
                Reply::TryAgain(psn, answer) => (psn, Body::Acknowledge(answer)),
                Reply::Atomic(psn, found, _) => (psn, Body::AtomicResponse(found)),
                Reply::Read(reading) => {
                    self.read(device, outbox, &peer, reading);
                    continue;
                }
                Reply::Refuse(psn, nak, event) => {
                    let body = Body::Acknowledge(Answer::Nak(nak));
                    send(device, outbox, peer.packet(psn, body));
                    return Progress::Refused(event);
                }
            };
            send(device, outbox, peer.packet(psn, body));
        }
        match self.has_replies() {
            true => Progress::More,
            false => Progress::Done,
        }
    }

    /// Sends one packet of the answer to a READ. If memory is absent, the peer is to ask for the rest again.
    fn read(&mut self, device: &mut Device, outbox: &mut Outbox, peer: &Peer, reading: Reading) {
        let Reading {
            psn, rest, user, ..
        } = reading;
        let length = rest.length.min(peer.mtu);
        let mut payload = outbox.buffer(length as usize);
        let read = reach(device).read(rest.key, user, rest.address, &mut payload);
        if let Err(fault) = read {
            let refusal = if page_fault::waits(device, user.qp, fault) {
                Reply::TryAgain(psn, Answer::ReceiverNotReady(reading.min_rnr_nak))
            } else {
                self.failed = true;
                Reply::Refuse(psn, Nak::RemoteAccess, Some(QpEvent::AccessError))
            };
            return self.replies.push_front(refusal);
        }
        let body = Body::ReadResponse;
        let packet = Packet {
            payload,
            ..peer.packet(psn, body)
        };
        send(device, outbox, packet);
        let rest = advance(rest, length);
        if rest.length > 0 {
            self.replies.push_front(Reply::Read(Reading {
                psn: psn.plus(1),
                rest,
                ..reading
            }));
        }
    }

    /// Takes an answer into the queue. One acknowledgement stands for those right before it. A refusal is
    /// the last answer, and is not lost.
    fn reply(&mut self, reply: Reply) {
        if let (Some(Reply::Ack(last)), Reply::Ack(psn)) = (self.replies.back_mut(), &reply) {
            *last = *psn;
        } else if self.replies.len() < REPLIES || matches!(reply, Reply::Refuse(..)) {
            self.replies.push_back(reply);
        }
    }
}

/// A receiver at work.
#[derive(Debug)]
pub struct Responder<'a> {
    /// The device.
    pub device: &'a mut Device,
    /// The receiver.
    pub target: &'a Target,
    /// Where receives come from.
    pub receive: &'a mut Receive,
    /// Receive state of the connection.
    pub state: &'a mut State,
}

impl Responder<'_> {
    /// Takes a request.
    pub fn request(&mut self, packet: &Packet) -> Result<(), Failed> {
        if self.state.failed {
            return Ok(());
        }
        self.state.peer = Some(self.target.peer);
        let expected = *self.state.expected.get_or_insert(self.target.first);
        let distance = packet.psn.since(expected);
        if !self.target.reliable {
            return self.unreliable(packet, distance);
        }
        match distance {
            0 => self.in_sequence(packet),
            1.. => self.missing(expected),
            _ => self.again(packet, expected),
        }
        Ok(())
    }

    /// The packet that was expected.
    fn in_sequence(&mut self, packet: &Packet) {
        let psn = packet.psn;
        match self.execute(packet) {
            Ok(()) => {
                self.state.refused = false;
                self.state.expected = Some(psn.plus(self.packets(&packet.body)));
                if packet.acknowledge && !is_answered(&packet.body) {
                    self.state.reply(Reply::Ack(psn));
                }
            }
            Err(Refusal::NotReady) => {
                self.count(|count| count.receiver_not_ready += 1);
                self.state.refused = true;
                let answer = Answer::ReceiverNotReady(self.target.min_rnr_nak);
                self.state.reply(Reply::TryAgain(psn, answer));
            }
            Err(Refusal::Final(nak, event)) => {
                self.state.failed = true;
                self.state.reply(Reply::Refuse(psn, nak, event));
            }
        }
    }

    /// A packet before this one is missing: asks for it, once.
    fn missing(&mut self, expected: Psn) {
        if !self.state.refused {
            self.count(|count| count.out_of_sequence += 1);
            self.state.refused = true;
            let answer = Answer::Nak(Nak::Sequence);
            self.state.reply(Reply::TryAgain(expected, answer));
        }
    }

    /// A packet that was carried out already came again, since its answer is late or lost.
    fn again(&mut self, packet: &Packet, expected: Psn) {
        self.count(|count| count.duplicates += 1);
        match packet.body {
            Body::ReadRequest(reth) => {
                let end = packet.psn.plus(self.packets(&packet.body));
                if end.since(expected) <= 0 && self.may_read(&reth).is_ok() {
                    self.reply_read(packet.psn, reth, Turn::Again);
                }
            }
            Body::Atomic(_) => {
                if let Some(found) = self.state.found(packet.psn) {
                    let answer = Reply::Atomic(packet.psn, found, Turn::Again);
                    self.state.reply(answer);
                }
            }
            _ if packet.acknowledge => self.state.reply(Reply::Ack(expected.previous())),
            _ => {}
        }
    }

    /// A packet of a connection that has no answers. When some are lost, so is the message.
    fn unreliable(&mut self, packet: &Packet, distance: i32) -> Result<(), Failed> {
        if distance != 0 {
            self.count(|count| count.out_of_sequence += 1);
            self.state.spare = self.state.abandon();
        }
        self.state.expected = Some(packet.psn.plus(1));
        if self.execute(packet).is_err() {
            self.state.spare = self.state.abandon();
        }
        match self.state.failed {
            true => Err(Failed),
            false => Ok(()),
        }
    }

    fn count(&mut self, count: impl Fn(&mut Count)) {
        self.device.count(self.target.counters, count);
    }

    /// Returns the number of sequence numbers that a request takes.
    fn packets(&self, body: &Body) -> u32 {
        match body {
            Body::ReadRequest(reth) => reth.length.div_ceil(self.target.peer.mtu).max(1),
            _ => 1,
        }
    }

    fn execute(&mut self, packet: &Packet) -> Result<(), Refusal> {
        if self.target.pd.is_none() {
            return Err(Refusal::INVALID);
        }
        match packet.body {
            Body::Send(position, tail) => self.send(packet, position, tail),
            Body::Write(position, reth, tail) => self.write(packet, position, reth, tail),
            _ if !self.target.reliable || self.state.unanswered() >= self.target.reads => {
                Err(Refusal::INVALID)
            }
            Body::ReadRequest(reth) => self.read(packet.psn, reth),
            Body::Atomic(atomic) => self.atomic(packet.psn, atomic),
            _ => Err(Refusal::INVALID),
        }
    }

    /// Checks that a packet begins a message if and only if none is under way, and that it is full unless
    /// it ends one.
    fn check_shape(&self, packet: &Packet, position: Position) -> Result<(), Refusal> {
        let mtu = self.target.peer.mtu as usize;
        let fits = match position.ends() {
            true => packet.payload.len() <= mtu,
            false => packet.payload.len() == mtu,
        };
        match fits && position.begins() == self.state.message.is_none() {
            true => Ok(()),
            false => Err(Refusal::INVALID),
        }
    }

    fn send(&mut self, packet: &Packet, position: Position, tail: Tail) -> Result<(), Refusal> {
        self.check_shape(packet, position)?;
        let (wqe, before) = match self.state.message.take() {
            None => (self.take()?, 0),
            Some(Message::Send(wqe, before)) => (wqe, before),
            Some(Message::Write(..)) => return Err(Refusal::INVALID),
        };
        let received = before + packet.payload.len() as u64;
        let inline = self.fits_completion(position, packet);
        if received > capacity(&wqe.segments) {
            self.fail(&wqe, packet, Syndrome::LocalLength);
            return Err(Refusal::Final(Nak::InvalidRequest, None));
        }
        let stored = match inline {
            true => Ok(()),
            false => self.scatter(&wqe, before, &packet.payload),
        };
        if let Err(fault) = stored {
            return Err(self.not_stored(wqe, before, packet, fault));
        }
        if !position.ends() {
            self.state.message = Some(Message::Send(wqe, received));
            return Ok(());
        }
        if let Tail::Invalidate(key) = tail {
            if self.invalidate(key).is_none() {
                self.fail(&wqe, packet, Syndrome::LocalAccess);
                return Err(Refusal::Final(Nak::RemoteAccess, None));
            }
        }
        let (kind, immediate) = match tail {
            Tail::None => (Kind::ReceiveSend, 0),
            Tail::Immediate(data) => (Kind::ReceiveSendImmediate, data),
            Tail::Invalidate(key) => (Kind::ReceiveSendInvalidate, key),
        };
        let completion = Completion {
            kind,
            immediate,
            byte_count: received as u32,
            inline: if inline {
                packet.payload.clone()
            } else {
                Vec::new()
            },
            ..self.completion(&wqe, packet)
        };
        self.device.complete(self.target.cqn, completion);
        Ok(())
    }

    fn write(
        &mut self,
        packet: &Packet,
        position: Position,
        reth: Option<Reth>,
        tail: Tail,
    ) -> Result<(), Refusal> {
        self.check_shape(packet, position)?;
        let (left, total) = match (&self.state.message, reth) {
            (None, Some(reth)) => (self.may_write(position, reth)?, reth.length),
            (&Some(Message::Write(left, total)), None) => (left, total),
            _ => return Err(Refusal::INVALID),
        };
        let length = packet.payload.len() as u32;
        if length > left.length || position.ends() != (length == left.length) {
            return Err(Refusal::INVALID);
        }
        let user = self.user(Access::RemoteWrite);
        reach(self.device)
            .write(left.key, user, left.address, &packet.payload)
            .map_err(|fault| self.denied(fault))?;
        if let (true, Tail::Immediate(data)) = (position.ends(), tail) {
            let wqe = self.take()?;
            let completion = Completion {
                kind: Kind::ReceiveWriteImmediate,
                immediate: data,
                byte_count: total,
                ..self.completion(&wqe, packet)
            };
            self.device.complete(self.target.cqn, completion);
        }
        let rest = Message::Write(advance(left, length), total);
        self.state.message = (!position.ends()).then_some(rest);
        Ok(())
    }

    fn read(&mut self, psn: Psn, reth: Reth) -> Result<(), Refusal> {
        if self.state.message.is_some() {
            return Err(Refusal::INVALID);
        }
        self.may_read(&reth)?;
        self.reply_read(psn, reth, Turn::First);
        Ok(())
    }

    fn atomic(&mut self, psn: Psn, atomic: Atomic) -> Result<(), Refusal> {
        if self.state.message.is_some() || atomic.address % u64::from(atomic.size) != 0 {
            return Err(Refusal::INVALID);
        }
        if !self.target.rights.atomic {
            return Err(Refusal::ACCESS);
        }
        let found = self.operate(&atomic).map_err(|fault| self.denied(fault))?;
        self.count(|count| count.atomics += 1);
        if self.state.atomics.len() == ATOMICS {
            self.state.atomics.pop_front();
        }
        self.state.atomics.push_back((psn, found));
        self.state.reply(Reply::Atomic(psn, found, Turn::First));
        Ok(())
    }

    /// Carries out an atomic operation, in the machine's byte order. Returns what was there.
    fn operate(&mut self, atomic: &Atomic) -> Result<u64, Fault> {
        let user = self.user(Access::RemoteAtomic);
        let size = usize::from(atomic.size);
        let mut bytes = [0; 8];
        let mut memory = reach(self.device);
        memory.read(atomic.key, user, atomic.address, &mut bytes[..size])?;
        let found = u64::from_le_bytes(bytes);
        let new = apply(atomic.operation, found).to_le_bytes();
        memory.write(atomic.key, user, atomic.address, &new[..size])?;
        Ok(found)
    }

    /// Returns the response to a request after a fault in memory that the peer named.
    fn denied(&mut self, fault: Fault) -> Refusal {
        match page_fault::waits(self.device, self.target.number, fault) {
            true => Refusal::NotReady,
            false => Refusal::ACCESS,
        }
    }

    /// Returns the response to a message after a fault in the memory of its receive. `before` bytes of the message
    /// arrived before.
    fn not_stored(&mut self, wqe: Wqe, before: u64, packet: &Packet, fault: Fault) -> Refusal {
        if page_fault::waits(self.device, self.target.number, fault) {
            match before {
                0 => self.state.spare = Some(wqe),
                _ => self.state.message = Some(Message::Send(wqe, before)),
            }
            return Refusal::NotReady;
        }
        self.fail(&wqe, packet, Syndrome::LocalProtection);
        Refusal::Final(Nak::RemoteOperation, None)
    }

    fn may_read(&mut self, reth: &Reth) -> Result<(), Refusal> {
        let user = self.user(Access::RemoteRead);
        let length = u64::from(reth.length);
        let checked = reach(self.device).check(reth.key, user, reth.address, length);
        match self.target.rights.read && checked.is_ok() {
            true => Ok(()),
            false => Err(Refusal::ACCESS),
        }
    }

    /// Checks that a WRITE may be begun; one of a single packet is checked when it is written.
    fn may_write(&mut self, position: Position, reth: Reth) -> Result<Reth, Refusal> {
        let user = self.user(Access::RemoteWrite);
        let length = u64::from(reth.length);
        let allowed = position.ends()
            || reach(self.device)
                .check(reth.key, user, reth.address, length)
                .is_ok();
        match self.target.rights.write && allowed {
            true => Ok(reth),
            false => Err(Refusal::ACCESS),
        }
    }

    fn reply_read(&mut self, psn: Psn, reth: Reth, turn: Turn) {
        let user = self.user(Access::RemoteRead);
        self.state.reply(Reply::Read(Reading {
            psn,
            rest: reth,
            user,
            turn,
            min_rnr_nak: self.target.min_rnr_nak,
        }));
    }

    fn user(&self, access: Access) -> User {
        User {
            pd: self.target.pd.unwrap_or(u32::MAX),
            qp: self.target.number,
            access,
        }
    }

    /// Takes a receive.
    fn take(&mut self) -> Result<Wqe, Refusal> {
        if let Some(wqe) = self.state.spare.take() {
            return Ok(wqe);
        }
        receive::take(self.device, self.receive)
            .map_err(|_| Refusal::OPERATION)?
            .ok_or(Refusal::NotReady)
    }

    /// Returns `true` if a message goes into its completion.
    fn fits_completion(&self, position: Position, packet: &Packet) -> bool {
        let length = packet.payload.len();
        position == Position::Only && length > 0 && length <= usize::from(self.target.scatter)
    }

    fn scatter(&mut self, wqe: &Wqe, skip: u64, bytes: &[u8]) -> Result<(), Fault> {
        let user = self.user(Access::LocalWrite);
        let pd = local_domain(self.device, self.receive, user.pd);
        reach(self.device).scatter(pd, user.qp, &wqe.segments, skip, bytes)
    }

    /// Takes back a memory key, as a peer asked.
    fn invalidate(&mut self, key: u32) -> Option<()> {
        let keys = &mut self.device.objects.mkeys;
        mkey::invalidate(keys, key, self.target.pd?, self.target.number).ok()
    }

    /// A completion for a receive, but for what it received.
    fn completion(&self, wqe: &Wqe, packet: &Packet) -> Completion {
        Completion {
            qpn: self.target.number,
            user_index: self.target.user_index,
            wqe_counter: wqe.index,
            source_qpn: self.target.source,
            source_lid: packet.path.source,
            service_level: packet.path.service_level,
            solicited: packet.solicited,
            ..Completion::default()
        }
    }

    fn fail(&mut self, wqe: &Wqe, packet: &Packet, syndrome: Syndrome) {
        self.state.failed = true;
        let completion = Completion {
            kind: Kind::ReceiveError,
            syndrome,
            ..self.completion(wqe, packet)
        };
        self.device.complete(self.target.cqn, completion);
    }
}

/// Returns `true` if the response to a request has data, which replaces an acknowledgement.
fn is_answered(body: &Body) -> bool {
    matches!(body, Body::ReadRequest(_) | Body::Atomic(_))
}

/// Returns the rest of remote memory after `length` bytes.
fn advance(reth: Reth, length: u32) -> Reth {
    Reth {
        address: reth.address.wrapping_add(u64::from(length)),
        length: reth.length - length,
        ..reth
    }
}

/// Returns the value that an atomic operation stores.
fn apply(operation: AtomicOperation, found: u64) -> u64 {
    match operation {
        AtomicOperation::CompareSwap {
            compare,
            swap,
            compare_mask,
            swap_mask,
        } if (found ^ compare) & compare_mask == 0 => found & !swap_mask | swap & swap_mask,
        AtomicOperation::CompareSwap { .. } => found,
        AtomicOperation::FetchAdd { add, boundary } => {
            // Fields are added at once, without the bit at the end of each: no carry leaves a field.
            let low = (found & !boundary).wrapping_add(add & !boundary);
            low ^ ((found ^ add) & boundary)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_has_its_place_among_any_number_of_answers() {
        let mut state = State::default();
        for number in 0..2 * REPLIES as u32 {
            state.reply(Reply::Atomic(Psn::new(number), 0, Turn::First));
        }
        assert_eq!(state.replies.len(), REPLIES);
        state.reply(Reply::Refuse(Psn::new(0), Nak::InvalidRequest, None));
        assert!(matches!(state.replies.back(), Some(Reply::Refuse(..))));
    }

    #[test]
    fn the_last_atomic_operation_with_a_number_is_the_one_that_comes_again() {
        let psn = Psn::new(7);
        let mut state = State::default();
        state.atomics.extend([(psn, 1), (psn, 2), (psn.plus(1), 3)]);
        assert_eq!(state.found(psn), Some(2));
        assert_eq!(state.found(psn.plus(2)), None);
    }

    #[test]
    fn fields_of_a_masked_addition_do_not_carry_into_each_other() {
        let add = |found, add, boundary| apply(AtomicOperation::FetchAdd { add, boundary }, found);
        assert_eq!(add(u64::MAX, 1, 0), 0);
        assert_eq!(add(0xff, 1, 1 << 7), 0);
        assert_eq!(add(0x7f_ff, 0x01_01, 1 << 7), 0x80_00);
        let bytes = 0x8080_8080_8080_8080;
        assert_eq!(
            add(0xff01_7f80_00fe_ff10, 0x0101_0101_0101_0101, bytes),
            0x0002_8081_01ff_0011
        );
    }

    #[test]
    fn a_masked_swap_compares_and_replaces_the_masked_bits() {
        let swap = |found| {
            let operation = AtomicOperation::CompareSwap {
                compare: 0x12_00,
                swap: 0xab_cd,
                compare_mask: 0xff_00,
                swap_mask: 0x00_ff,
            };
            apply(operation, found)
        };
        assert_eq!(swap(0x99_12_34), 0x99_12_cd);
        assert_eq!(swap(0x99_13_34), 0x99_13_34);
    }
}
