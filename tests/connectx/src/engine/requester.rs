// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The sending side of a queue pair: takes work requests from the send queue and completes them in order.
//!
//! A connection numbers its packets; the answers to a READ have numbers of their own. What a peer has
//! acknowledged, what is sent and what is to be sent are three numbers, in this order. When something is
//! lost, sending begins again at what is not acknowledged: each packet is made anew from guest memory, and
//! a READ asks for the rest only.

use std::collections::VecDeque;
use std::time::Duration;

use super::wqe::{self, Address, Control, Fence, Operation, Wqe, BLOCK};
use super::{datagram, dc, fail, page_fault, reach, send, umr, BURST};
use crate::device::Device;
use crate::network::packet::{
    Answer, Body, Connection, Grh, Nak, Packet, Path, Position, Psn, Reth, Service, Tail,
};
use crate::network::Outbox;
use crate::object::cq::{Completion, Kind, Syndrome};
use crate::object::eq::{Event, QpEvent};
use crate::object::mkey::Fault;
use crate::object::qp::{self, Qp, Transport};

/// How many packets may be under way without being acknowledged.
const WINDOW: i32 = 2 * BURST as i32;

/// Every so many packets of a long message an acknowledgement is asked for.
const ASK: u32 = BURST as u32 / 2;

/// The RNR retry count that stands for no limit.
const FOR_EVER: u8 = 7;

/// What a send queue is doing.
#[derive(Debug, Default)]
pub struct State {
    /// The block after the last work request that was taken.
    next: u16,
    /// The last work request that is posted.
    posted: Option<u16>,
    /// A work request that was taken, and waits until it may begin.
    stalled: Option<Wqe>,
    /// Work requests that have begun and not ended, in order.
    work: VecDeque<Work>,
    /// How many of them are answered with data.
    reads: u32,
    /// Sequence numbers, once the first work request began.
    sequence: Option<Sequence>,
    /// The dynamic connection in use.
    connection: Option<(Address, Connection)>,
    /// Whether packets were sent again since anything was last acknowledged.
    repeated: bool,
    /// How often they may still be sent again for want of an answer.
    retries: u8,
    /// How often they may still be sent again because the peer was not ready.
    not_ready: u8,
    /// Until when the peer must not be asked, since it was not ready.
    resume: Option<Duration>,
    /// When it is too late for an answer; in the error state when to look for work requests.
    deadline: Option<Duration>,
    /// When the engine will call.
    alarm: Option<Duration>,
    /// After which time work requests are looked for again, in the error state.
    interval: Duration,
}

/// The sequence numbers of a connection. Each is at or after the one before it.
#[derive(Clone, Copy, Debug)]
struct Sequence {
    /// The first that is not acknowledged.
    acknowledged: Psn,
    /// The next to send: at most `sent`, if some are sent again.
    cursor: Psn,
    /// The first that was never sent.
    sent: Psn,
    /// The first that belongs to no work request.
    end: Psn,
}

/// A work request that has begun.
#[derive(Debug)]
struct Work {
    wqe: Wqe,
    /// Its first sequence number.
    first: Psn,
    /// How many it has. Work that is done without packets has none.
    packets: u32,
    /// Why it cannot go on. It ends so as soon as those before it have ended.
    error: Option<Syndrome>,
    /// An answer that goes into the completion.
    inline: Vec<u8>,
}

/// Why a work request does not go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// It has failed.
    Failed(Syndrome),
    /// Memory is absent, and asked for: nothing was done.
    Waiting,
}

impl Stop {
    /// What a fault in local memory means for a work request of the queue pair `number`.
    pub fn at(device: &mut Device, number: u32, fault: Fault) -> Stop {
        match page_fault::waits(device, number, fault) {
            true => Stop::Waiting,
            false => Stop::Failed(Syndrome::LocalProtection),
        }
    }
}

impl Work {
    fn end(&self) -> Psn {
        self.first.plus(self.packets)
    }

    fn length(&self) -> u32 {
        self.wqe.data.length() as u32
    }

    /// Whether the answer has data, so that an acknowledgement does not do.
    fn is_read(&self) -> bool {
        matches!(
            self.wqe.operation,
            Operation::Read(_) | Operation::Atomic(_)
        )
    }
}

impl State {
    /// Learns of work requests up to the one at the index `counter`, in a ring of so many blocks.
    pub fn post(&mut self, counter: u16, blocks: u32) {
        if !self.knows(counter, blocks) {
            self.posted = Some(counter);
        }
    }

    /// Whether it has learnt of work requests up to the one at the index `counter`, in a ring of so many
    /// blocks.
    pub fn knows(&self, counter: u16, blocks: u32) -> bool {
        let known = self.posted.unwrap_or(self.next.wrapping_sub(1));
        let ahead = counter.wrapping_sub(known);
        !(1..=blocks).contains(&u32::from(ahead))
    }

    /// The engine calls at `time`. Returns whether it is expected.
    pub fn alarm(&mut self, time: Duration) -> bool {
        let expected = self.alarm == Some(time);
        if expected {
            self.alarm = None;
        }
        expected
    }

    /// When the engine will call.
    pub fn alarm_time(&self) -> Option<Duration> {
        self.alarm
    }

    /// When the engine is to call, if it does not know yet, or thinks that it is later.
    pub fn set_alarm(&mut self) -> Option<Duration> {
        let due = [self.resume, self.deadline].into_iter().flatten().min()?;
        if self.alarm.is_some_and(|alarm| alarm <= due) {
            return None;
        }
        self.alarm = Some(due);
        self.alarm
    }

    /// In the error state: looks for work requests again, in intervals from the first to the second.
    pub fn watch(&mut self, now: Duration, (first, last): (Duration, Duration)) {
        self.interval = (self.interval * 2).clamp(first, last);
        self.resume = None;
        self.deadline = Some(now + self.interval);
    }

    /// The sequence number of the first packet of the next work request, once there was one.
    pub fn next_psn(&self) -> Option<u32> {
        self.sequence.map(|sequence| sequence.end.get())
    }

    /// Whether there are posted work requests that were not taken.
    fn has_posted(&self) -> bool {
        let posted = self.posted.map(|posted| posted.wrapping_sub(self.next));
        posted.is_some_and(|ahead| ahead as i16 >= 0)
    }
}

/// A send queue at work.
#[derive(Debug)]
pub struct Requester<'a> {
    device: &'a mut Device,
    qp: &'a mut Qp,
    outbox: &'a mut Outbox,
}

impl<'a> Requester<'a> {
    /// The send queue of `qp`.
    pub fn new(device: &'a mut Device, qp: &'a mut Qp, outbox: &'a mut Outbox) -> Self {
        Requester { device, qp, outbox }
    }

    /// Sends what may be sent.
    pub fn proceed(&mut self) {
        let mut left = BURST;
        while left > 0 && self.step() {
            left -= 1;
        }
        if left == 0 {
            self.device.engine.wake(self.qp.number);
        }
        if self.qp.state == qp::State::Error {
            return;
        }
        self.check_drained();
        self.set_deadline();
    }

    /// An answer of the peer arrived.
    pub fn answered(&mut self, packet: &Packet) {
        let state = &self.qp.requester;
        let Some(sequence) = state.sequence else {
            return;
        };
        if packet.psn.since(sequence.acknowledged) < 0
            || packet.psn.since(sequence.sent) >= 0
            || !self.is_of_connection(packet.service)
        {
            return;
        }
        match packet.body {
            Body::ReadResponse | Body::AtomicResponse(_) => self.receive(packet),
            Body::Acknowledge(Answer::Ack) => {
                self.acknowledge(packet.psn.plus(1));
            }
            Body::Acknowledge(answer) if self.acknowledge(packet.psn) => match answer {
                Answer::ReceiverNotReady(code) => self.wait(code),
                Answer::Nak(Nak::Sequence) => self.lost(),
                Answer::Nak(nak) => self.fail_first(refused(nak)),
                Answer::Ack => {}
            },
            _ => {}
        }
    }

    /// Time has passed.
    pub fn timeout(&mut self) {
        if self.qp.state == qp::State::Error {
            return;
        }
        let now = self.outbox.now;
        let state = &mut self.qp.requester;
        if state.resume.is_some_and(|time| time <= now) {
            state.resume = None;
        }
        if state.deadline.is_some_and(|time| time <= now) {
            self.device.cost.count.timeouts += 1;
            state.deadline = None;
            match state.retries.checked_sub(1) {
                Some(left) => {
                    state.retries = left;
                    self.rewind();
                }
                None => self.fail_first(Syndrome::TransportRetry),
            }
        }
    }

    /// Sends a packet or begins a work request. Returns whether there was one.
    fn step(&mut self) -> bool {
        let state = &self.qp.requester;
        if self.qp.state == qp::State::Error
            || state.resume.is_some()
            || page_fault::is_waiting(self.device, self.qp.number)
        {
            return false;
        }
        match state.sequence {
            Some(sequence) if sequence.cursor.since(sequence.acknowledged) >= WINDOW => false,
            Some(sequence) if sequence.cursor != sequence.end => self.transmit(sequence),
            _ => self.begin(),
        }
    }

    // Beginning.

    /// Begins the next work request, if there is one and it may.
    fn begin(&mut self) -> bool {
        if self
            .qp
            .requester
            .work
            .back()
            .is_some_and(|work| work.error.is_some())
        {
            return false;
        }
        let Some(wqe) = self.next_wqe() else {
            return false;
        };
        if !self.may_begin(&wqe) {
            self.qp.requester.stalled = Some(wqe);
            return false;
        }
        let sequence = self.start_sequence();
        let (packets, error) = match self.prepare(&wqe, sequence.end) {
            Ok(packets) => (packets, None),
            Err(Stop::Failed(syndrome)) => (0, Some(syndrome)),
            Err(Stop::Waiting) => {
                self.qp.requester.stalled = Some(wqe);
                return false;
            }
        };
        let state = &mut self.qp.requester;
        let work = Work {
            wqe,
            first: sequence.end,
            packets,
            error,
            inline: Vec::new(),
        };
        state.reads += u32::from(work.is_read());
        state.work.push_back(work);
        state.sequence = Some(Sequence {
            end: sequence.end.plus(packets),
            cursor: if packets == 0 {
                sequence.end
            } else {
                sequence.cursor
            },
            ..sequence
        });
        self.retire();
        true
    }

    fn start_sequence(&mut self) -> Sequence {
        let attributes = &self.qp.attributes;
        let state = &mut self.qp.requester;
        if state.sequence.is_none() {
            state.retries = attributes.retry_count;
            state.not_ready = attributes.rnr_retry;
        }
        let first = Psn::new(attributes.send_psn);
        *state.sequence.get_or_insert(Sequence {
            acknowledged: first,
            cursor: first,
            sent: first,
            end: first,
        })
    }

    /// The next work request, if there is one.
    fn next_wqe(&mut self) -> Option<Wqe> {
        if let Some(wqe) = self.qp.requester.stalled.take() {
            return Some(wqe);
        }
        if self.qp.state != qp::State::Rts || !self.qp.requester.has_posted() {
            return None;
        }
        let wqe = self.fetch();
        if wqe.is_none() {
            self.malformed();
        }
        wqe
    }

    /// Takes a work request from the ring; `None` if it makes no sense.
    fn fetch(&mut self) -> Option<Wqe> {
        let next = self.qp.requester.next;
        let ring = self.qp.send.as_ref()?;
        let mut bytes = [0; wqe::MAX];
        ring.read(&self.device.dma, next, &mut bytes[..BLOCK])
            .ok()?;
        let control = Control::decode(&bytes);
        if control.index != next || control.qpn != self.qp.number {
            return None;
        }
        let bytes = &mut bytes[..control.bytes()];
        if let Some(rest) = bytes.get_mut(BLOCK..).filter(|rest| !rest.is_empty()) {
            ring.read(&self.device.dma, next.wrapping_add(1), rest)
                .ok()?;
        }
        let wqe = wqe::decode(bytes, self.qp.transport).ok()?;
        self.qp.requester.next = next.wrapping_add(control.blocks());
        self.device.cost.count.wqes += 1;
        self.device.cost.count.wqe_bytes += bytes.len() as u64;
        Some(wqe)
    }

    /// The next work request cannot be understood: it fails when those before it have ended.
    fn malformed(&mut self) {
        let sequence = self.start_sequence();
        let state = &mut self.qp.requester;
        let wqe = Wqe::malformed(state.next);
        state.next = state.next.wrapping_add(1);
        state.work.push_back(Work {
            wqe,
            first: sequence.end,
            packets: 0,
            error: Some(Syndrome::LocalQpOperation),
            inline: Vec::new(),
        });
        self.retire();
    }

    /// Whether a work request need not wait for those before it.
    fn may_begin(&self, wqe: &Wqe) -> bool {
        let state = &self.qp.requester;
        let is_read = matches!(wqe.operation, Operation::Read(_) | Operation::Atomic(_));
        let fence = match wqe.operation {
            // What is sent again is to find the keys as they were.
            Operation::Umr(_) => Fence::All,
            _ => wqe.control.fence,
        };
        if fence == Fence::All && !state.work.is_empty()
            || fence == Fence::Reads && state.reads > 0
            || is_read && state.reads >= self.qp.attributes.max_reads
        {
            return false;
        }
        // One DC target at a time.
        let connected = state.connection.map(|(address, _)| address);
        self.qp.transport != Transport::Dci
            || wqe.address.is_none()
            || connected == wqe.address
            || state.work.is_empty()
    }

    /// Prepares a work request. Returns how many packets it takes.
    fn prepare(&mut self, wqe: &Wqe, first: Psn) -> Result<u32, Stop> {
        check(self.qp, wqe).map_err(Stop::Failed)?;
        if let (Transport::Dci, Some(address)) = (self.qp.transport, wqe.address) {
            let state = &mut self.qp.requester;
            if state
                .connection
                .is_none_or(|(current, _)| current != address)
            {
                let connection = dc::connect(self.device, self.qp.number, &address, first);
                state.connection = Some((address, connection));
            }
        }
        match &wqe.operation {
            Operation::Nop => Ok(0),
            Operation::Umr(bytes) => umr::execute(self.device, self.qp, bytes)
                .map(|()| 0)
                .map_err(Stop::Failed),
            _ if is_datagram(self.qp.transport) => {
                datagram::send(self.device, self.qp, wqe, self.outbox).map(|()| 0)
            }
            Operation::Atomic(_) => Ok(1),
            _ => {
                let packets = wqe
                    .data
                    .length()
                    .div_ceil(u64::from(self.qp.attributes.mtu));
                Ok(packets.max(1) as u32)
            }
        }
    }

    // Sending.

    /// Sends the packet at the cursor. Returns whether it could be made.
    fn transmit(&mut self, sequence: Sequence) -> bool {
        let psn = sequence.cursor;
        let state = &self.qp.requester;
        let index = state
            .work
            .partition_point(|work| work.end().since(psn) <= 0);
        let Some(work) = state.work.get(index).filter(|work| work.error.is_none()) else {
            return false;
        };
        let skip = psn.since(work.first) as u32 * self.qp.attributes.mtu;
        let end = work.end();
        let (body, next) = body(work, psn, skip);
        let acknowledge = next == end || psn.get() % ASK == 0;
        let (solicited, srq) = (work.wqe.control.solicited, work.wqe.srq);
        let payload = match self.payload(index, skip) {
            Ok(payload) => payload,
            Err(fault) => {
                if let Stop::Failed(syndrome) = Stop::at(self.device, self.qp.number, fault) {
                    self.qp.requester.work[index].error = Some(syndrome);
                    self.retire();
                }
                return false;
            }
        };
        let packet = Packet {
            path: self.path(),
            service: self.service(srq),
            destination: self.destination(),
            psn,
            acknowledge,
            solicited: solicited && next == end,
            body,
            payload,
        };
        send(self.device, self.outbox, packet);
        let reliable = self.qp.transport != Transport::Uc;
        self.qp.requester.sequence = Some(Sequence {
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
            self.retire();
        }
        true
    }

    /// The data of a packet.
    fn payload(&mut self, index: usize, skip: u32) -> Result<Vec<u8>, Fault> {
        let work = &self.qp.requester.work[index];
        if work.is_read() {
            return Ok(Vec::new());
        }
        let length = (work.length() - skip).min(self.qp.attributes.mtu);
        let mut payload = self.outbox.buffer(length as usize);
        gather(self.device, self.qp, &work.wqe, skip, &mut payload)?;
        Ok(payload)
    }

    fn path(&self) -> Path {
        let (lid, gid) = (self.device.port.lid, self.device.port.gid());
        if let Some((address, _)) = &self.qp.requester.connection {
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

    fn service(&self, srq: u32) -> Service {
        match (&self.qp.requester.connection, self.qp.transport) {
            (Some((_, connection)), _) => Service::Dc(*connection),
            (None, Transport::Uc) => Service::Uc,
            (None, Transport::Xrc) => Service::Xrc { srq },
            (None, _) => Service::Rc,
        }
    }

    fn destination(&self) -> u32 {
        match &self.qp.requester.connection {
            Some((address, _)) => address.number,
            None => self.qp.attributes.remote_qpn,
        }
    }

    // Being answered.

    /// Whether an answer is of the connection in use.
    fn is_of_connection(&self, service: Service) -> bool {
        match (service, &self.qp.requester.connection) {
            (Service::Dc(answered), Some((_, current))) => answered.number == current.number,
            (Service::Dc(_), None) => false,
            _ => true,
        }
    }

    /// The peer has done all before `upto`, it says. Returns whether nothing of that is missing: answers
    /// with data may be.
    fn acknowledge(&mut self, upto: Psn) -> bool {
        let state = &self.qp.requester;
        let acknowledged = state.sequence.map(|sequence| sequence.acknowledged);
        let is_new = |psn: Psn| acknowledged.is_some_and(|done| psn.since(done) > 0);
        let missing = match state.reads > 0 && is_new(upto) {
            false => None,
            true => state.work.iter().find(|work| work.is_read()),
        };
        let missing = missing.map(|work| work.first);
        let missing = missing.filter(|first| first.since(upto) < 0);
        let reached = missing.unwrap_or(upto);
        if is_new(reached) {
            self.progress(reached);
        }
        if missing.is_some() {
            self.lost();
        }
        missing.is_none()
    }

    /// All before `to` is done.
    fn progress(&mut self, to: Psn) {
        let state = &mut self.qp.requester;
        if let Some(sequence) = &mut state.sequence {
            sequence.acknowledged = to;
            if sequence.cursor.since(to) < 0 {
                sequence.cursor = to;
            }
        }
        state.repeated = false;
        state.retries = self.qp.attributes.retry_count;
        state.not_ready = self.qp.attributes.rnr_retry;
        state.resume = None;
        state.deadline = None;
        self.retire();
    }

    /// Something was lost: sends it again, once.
    fn lost(&mut self) {
        if !self.qp.requester.repeated && self.qp.requester.resume.is_none() {
            self.rewind();
        }
    }

    fn rewind(&mut self) {
        let state = &mut self.qp.requester;
        state.repeated = true;
        if let Some(sequence) = &mut state.sequence {
            sequence.cursor = sequence.acknowledged;
        }
    }

    /// The peer was not ready: asks again after the time that it says.
    fn wait(&mut self, code: u8) {
        let state = &mut self.qp.requester;
        if state.resume.is_some() {
            return;
        }
        if state.not_ready != FOR_EVER {
            match state.not_ready.checked_sub(1) {
                Some(left) => state.not_ready = left,
                None => return self.fail_first(Syndrome::RnrRetry),
            }
        }
        state.resume = Some(self.outbox.now + rnr_delay(code));
        state.deadline = None;
        self.rewind();
    }

    /// Data that was asked for arrived.
    fn receive(&mut self, packet: &Packet) {
        let psn = packet.psn;
        let work = &self.qp.requester.work;
        let index = work.partition_point(|work| work.end().since(psn) <= 0);
        let Some(first) = work.get(index).map(|work| work.first) else {
            return;
        };
        if !self.acknowledge(first) {
            return;
        }
        let state = &self.qp.requester;
        let expected = state.sequence.map(|sequence| sequence.acknowledged);
        if expected != Some(psn) {
            return self.lost();
        }
        match self.take_answer(packet) {
            Ok(()) => self.progress(psn.plus(1)),
            Err(Stop::Failed(syndrome)) => self.fail_first(syndrome),
            Err(Stop::Waiting) => self.rewind(),
        }
    }

    /// Takes the data of the first work request's answer.
    fn take_answer(&mut self, packet: &Packet) -> Result<(), Stop> {
        const BAD: Stop = Stop::Failed(Syndrome::BadResponse);
        let mtu = self.qp.attributes.mtu;
        let work = self.qp.requester.work.front().ok_or(BAD)?;
        let skip = packet.psn.since(work.first) as u32 * mtu;
        let mut operand = [0; 8];
        let data = match (&work.wqe.operation, packet.body) {
            (Operation::Read(_), Body::ReadResponse) => {
                let expected = (work.length() - skip).min(mtu);
                if packet.payload.len() != expected as usize {
                    return Err(BAD);
                }
                &packet.payload[..]
            }
            (Operation::Atomic(atomic), Body::AtomicResponse(found)) => {
                let size = usize::from(atomic.size);
                match self.device.firmware.settings.host_order {
                    true => operand = found.to_le_bytes(),
                    false => operand[..size].copy_from_slice(&found.to_be_bytes()[8 - size..]),
                }
                &operand[..size]
            }
            _ => return Err(BAD),
        };
        let scatter = u32::from(self.qp.attributes.requester_scatter);
        if work.wqe.control.signalled && work.length() <= scatter {
            let inline = data.to_vec();
            self.qp.requester.work[0].inline = inline;
            return Ok(());
        }
        let (pd, number) = (self.qp.attributes.pd, self.qp.number);
        reach(self.device)
            .scatter(pd, number, &work.wqe.data.segments, u64::from(skip), data)
            .map_err(|fault| Stop::at(self.device, number, fault))
    }

    // Ending.

    /// Completes the work requests that are done.
    fn retire(&mut self) {
        while let (Some(work), Some(sequence)) =
            (self.qp.requester.work.front(), self.qp.requester.sequence)
        {
            if let Some(syndrome) = work.error {
                return self.fail_first(syndrome);
            }
            if work.end().since(sequence.acknowledged) > 0 {
                return;
            }
            let state = &mut self.qp.requester;
            let Some(work) = state.work.pop_front() else {
                return;
            };
            state.reads -= u32::from(work.is_read());
            if work.wqe.control.signalled {
                let completion = Completion {
                    byte_count: work.length(),
                    inline: work.inline,
                    ..completion(self.qp, &work.wqe.control)
                };
                self.device.complete(self.qp.attributes.send_cq, completion);
            }
        }
    }

    /// The first work request that has not ended fails, and so does the queue pair.
    fn fail_first(&mut self, syndrome: Syndrome) {
        if let Some(work) = self.qp.requester.work.pop_front() {
            complete_in_error(self.device, self.qp, &work.wqe.control, syndrome);
        }
        fail(self.device, self.qp);
    }

    /// Tells the driver when a send queue that was to be drained is.
    fn check_drained(&mut self) {
        let state = &self.qp.requester;
        let idle = state.work.is_empty() && state.stalled.is_none();
        if self.qp.state == qp::State::SqDraining && idle {
            self.qp.state = qp::State::SqDrained;
            let event = Event::Qp(QpEvent::SqDrained, self.qp.number);
            self.device.event(event);
        }
    }

    /// Sets the time for the peer to answer, if it has to and none is set.
    fn set_deadline(&mut self) {
        let state = &mut self.qp.requester;
        let under_way = state
            .sequence
            .is_some_and(|sequence| sequence.cursor.since(sequence.acknowledged) > 0);
        let code = self.qp.attributes.ack_timeout;
        if !under_way || code == 0 {
            state.deadline = None;
        } else if state.deadline.is_none() {
            state.deadline = Some(self.outbox.now + Duration::from_nanos(4096 << code));
        }
    }
}

/// Completes as flushed all that is posted to a send queue, for a queue pair in the error state.
pub fn flush(device: &mut Device, qp: &mut Qp) {
    let state = &mut qp.requester;
    let stalled = state.stalled.take();
    let work = std::mem::take(&mut state.work);
    let begun = work.into_iter().map(|work| work.wqe).chain(stalled);
    let begun: Vec<Control> = begun.map(|wqe| wqe.control).collect();
    state.reads = 0;
    state.sequence = None;
    for control in begun {
        complete_in_error(device, qp, &control, Syndrome::Flush);
    }
    while let Some(control) = take_control(device, qp) {
        complete_in_error(device, qp, &control, Syndrome::Flush);
    }
}

/// Takes the next work request from the ring only to know which it is.
fn take_control(device: &Device, qp: &mut Qp) -> Option<Control> {
    let state = &mut qp.requester;
    let posted = state.posted.filter(|_| state.has_posted())?;
    let mut bytes = [0; BLOCK];
    let ring = qp.send.as_ref()?;
    let read = ring.read(&device.dma, state.next, &mut bytes);
    let control = Control::decode(&bytes);
    let next = state.next.wrapping_add(control.blocks());
    let sensible = read.is_ok() && control.index == state.next;
    state.next = if sensible {
        next
    } else {
        posted.wrapping_add(1)
    };
    sensible.then_some(control)
}

/// Gathers all of `payload` from a work request's data after `skip` bytes.
pub fn gather(
    device: &mut Device,
    qp: &Qp,
    wqe: &Wqe,
    skip: u32,
    payload: &mut [u8],
) -> Result<(), Fault> {
    let data = &wqe.data;
    let inline = data.inline.get(skip as usize..).unwrap_or_default();
    let inline = &inline[..inline.len().min(payload.len())];
    let (head, rest) = payload.split_at_mut(inline.len());
    head.copy_from_slice(inline);
    let skip = u64::from(skip).saturating_sub(data.inline.len() as u64);
    reach(device).gather(qp.attributes.pd, qp.number, &data.segments, skip, rest)
}

/// Checks what a queue pair asks for before it begins.
fn check(qp: &Qp, wqe: &Wqe) -> Result<(), Syndrome> {
    let transport = qp.transport;
    let allowed = match &wqe.operation {
        Operation::Nop => true,
        Operation::Umr(_) => !is_datagram(transport),
        _ if transport == Transport::Umr => false,
        Operation::Send(Tail::Invalidate(_)) => {
            !is_datagram(transport) && transport != Transport::Uc
        }
        Operation::Send(_) => true,
        Operation::Write(..) => !is_datagram(transport),
        Operation::Read(_) | Operation::Atomic(_) => {
            !is_datagram(transport) && transport != Transport::Uc && wqe.data.inline.is_empty()
        }
    };
    let length = wqe.data.length();
    let fits = match &wqe.operation {
        Operation::Atomic(atomic) => length == u64::from(atomic.size),
        _ => length <= qp.attributes.max_message,
    };
    if !allowed {
        Err(Syndrome::LocalQpOperation)
    } else if !fits {
        Err(Syndrome::LocalLength)
    } else {
        Ok(())
    }
}

fn is_datagram(transport: Transport) -> bool {
    matches!(transport, Transport::Ud | Transport::Smi | Transport::Gsi)
}

/// What a packet asks for, and the sequence number after it.
fn body(work: &Work, psn: Psn, skip: u32) -> (Body, Psn) {
    let reth = |remote: &wqe::Remote| Reth {
        address: remote.address.wrapping_add(u64::from(skip)),
        key: remote.key,
        length: work.length() - skip,
    };
    let next = psn.plus(1);
    let position = Position::new(skip == 0, next == work.end());
    match &work.wqe.operation {
        Operation::Send(tail) => (Body::Send(position, *tail), next),
        Operation::Write(remote, tail) => {
            let reth = position.begins().then(|| reth(remote));
            (Body::Write(position, reth, *tail), next)
        }
        Operation::Read(remote) => (Body::ReadRequest(reth(remote)), work.end()),
        Operation::Atomic(atomic) => (Body::Atomic(*atomic), next),
        // Has no packets.
        Operation::Nop | Operation::Umr(_) => (Body::Acknowledge(Answer::Ack), next),
    }
}

/// What a refusal means for the work request that was refused.
fn refused(nak: Nak) -> Syndrome {
    match nak {
        Nak::InvalidRequest => Syndrome::RemoteInvalidRequest,
        Nak::RemoteAccess | Nak::ConnectionKey => Syndrome::RemoteAccess,
        Nak::RemoteOperation | Nak::Sequence => Syndrome::RemoteOperation,
    }
}

/// The time that a code of the RNR timer stands for.
fn rnr_delay(code: u8) -> Duration {
    // In units of 10 µs, by the InfiniBand specification.
    const DELAYS: [u64; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024,
        1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    Duration::from_micros(10 * DELAYS[usize::from(code % 32)])
}

/// A completion for a work request.
fn completion(qp: &Qp, control: &Control) -> Completion {
    Completion {
        kind: Kind::Request,
        qpn: qp.number,
        user_index: qp.attributes.user_index,
        opcode: control.opcode,
        wqe_counter: control.index,
        ..Completion::default()
    }
}

fn complete_in_error(device: &mut Device, qp: &Qp, control: &Control, syndrome: Syndrome) {
    let completion = Completion {
        kind: Kind::RequestError,
        syndrome,
        ..completion(qp, control)
    };
    device.complete(qp.attributes.send_cq, completion);
}
