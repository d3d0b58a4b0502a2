// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The sending side of a queue pair: takes work requests from the send queue and completes them in order.
//!
//! A [`Channel`] carries out the work requests that have begun. If a packet is lost, sending begins again at the first
//! packet that is not acknowledged. Each packet is then built again from guest memory, and a READ requests only the
//! rest.
//!
//! With streams, which a DC initiator may have, a failure is of one stream: what else is posted to it is
//! flushed, until the driver resets it. The queue pair fails when too many streams have.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use super::channel::{Channel, Sequence, Work};
use super::wqe::{self, Control, Fence, Operation, Wqe, BLOCK};
use super::{datagram, dc, fail, page_fault, reach, send, umr, BURST};
use crate::device::Device;
use crate::network::packet::{
    Answer, Body, Grh, Nak, Packet, Path, Position, Psn, Reth, Service, Tail,
};
use crate::network::Outbox;
use crate::object::cq::{Completion, Kind, Syndrome};
use crate::object::eq::{Event, QpEvent};
use crate::object::mkey::Fault;
use crate::object::qp::{self, Qp, Transport};

/// Every so many packets of a long message an acknowledgement is asked for.
const ASK: u32 = BURST as u32 / 2;

/// The RNR retry count that stands for no limit.
const FOR_EVER: u8 = 7;

/// State of a send queue.
#[derive(Debug, Default)]
pub struct State {
    /// The block after the last work request that was taken.
    next: u16,
    /// The last work request that is posted.
    posted: Option<u16>,
    /// A work request that was taken, and waits until it may begin.
    stalled: Option<Wqe>,
    /// Channels that carry out work requests: more than one only with streams.
    channels: Vec<Channel>,
    /// The channels of the work requests that have begun and were not completed, in order.
    order: VecDeque<usize>,
    /// Streams that have failed.
    errors: BTreeSet<u16>,
    /// In the error state when to look for work requests.
    watch: Option<Duration>,
    /// When the engine will call.
    alarm: Option<Duration>,
    /// After which time work requests are looked for again, in the error state.
    interval: Duration,
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
    /// Returns the effect of a fault in local memory on a work request of the queue pair `number`.
    pub fn at(device: &mut Device, number: u32, fault: Fault) -> Stop {
        match page_fault::waits(device, number, fault) {
            true => Stop::Waiting,
            false => Stop::Failed(Syndrome::LocalProtection),
        }
    }
}

impl State {
    /// Learns of work requests up to the one at the index `counter`, in a ring of so many blocks.
    pub fn post(&mut self, counter: u16, blocks: u32) {
        if !self.knows(counter, blocks) {
            self.posted = Some(counter);
        }
    }

    /// Returns `true` if posted work requests up to the index `counter` are known already, in a ring of `blocks`
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
        let channels = self.channels.iter();
        let due = channels.flat_map(|channel| [channel.resume, channel.deadline]);
        let due = due.chain([self.watch]).flatten().min()?;
        if self.alarm.is_some_and(|alarm| alarm <= due) {
            return None;
        }
        self.alarm = Some(due);
        self.alarm
    }

    /// In the error state: looks for work requests again, in intervals from the first to the second.
    pub fn watch(&mut self, now: Duration, (first, last): (Duration, Duration)) {
        self.interval = (self.interval * 2).clamp(first, last);
        self.watch = Some(now + self.interval);
    }

    /// The sequence number of the first packet of the next work request, once there was one.
    pub fn next_psn(&self) -> Option<u32> {
        let sequence = self.channels.first()?.sequence;
        sequence.map(|sequence| sequence.end.get())
    }

    /// Lets a stream that has failed go on. Returns `None` if it has not failed.
    pub fn reset_stream(&mut self, stream: u16) -> Option<()> {
        self.errors.remove(&stream).then_some(())
    }

    /// Takes the next work request to complete, if it has ended.
    fn take_ended(&mut self) -> Option<Work> {
        let channel = self.channels.get_mut(*self.order.front()?)?;
        let work = channel.work.front()?;
        let has_failed = channel.failed && work.error.is_some();
        if !has_failed && !channel.is_done(work) {
            return None;
        }
        channel.reads -= u32::from(work.is_read());
        self.order.pop_front();
        channel.work.pop_front()
    }

    /// Returns `true` if there are posted work requests that were not taken.
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
        self.set_deadlines();
    }

    /// An answer of the peer arrived.
    pub fn answered(&mut self, packet: &Packet) {
        let Some(c) = self.channel_of(packet) else {
            return;
        };
        match packet.body {
            Body::ReadResponse | Body::AtomicResponse(_) => self.receive(c, packet),
            Body::Acknowledge(Answer::Ack) => {
                self.acknowledge(c, packet.psn.plus(1));
            }
            Body::Acknowledge(answer) if self.acknowledge(c, packet.psn) => match answer {
                Answer::ReceiverNotReady(code) => self.wait(c, code),
                Answer::Nak(Nak::Sequence) => self.lost(c),
                Answer::Nak(nak) => self.fail_first(c, refused(nak)),
                Answer::Ack => {}
            },
            _ => {}
        }
    }

    /// The channel that an answer is for, if it was waited for.
    fn channel_of(&self, packet: &Packet) -> Option<usize> {
        let is_of = |channel: &Channel| match (packet.service, &channel.connection) {
            (Service::Dc(answered), Some((_, current))) => answered.number == current.number,
            (Service::Dc(_), None) => false,
            _ => true,
        };
        let channels = &self.qp.requester.channels;
        let c = channels.iter().position(is_of)?;
        let sequence = channels[c].sequence.filter(|_| !channels[c].failed)?;
        let is_waited_for =
            packet.psn.since(sequence.acknowledged) >= 0 && packet.psn.since(sequence.sent) < 0;
        is_waited_for.then_some(c)
    }

    /// Time has passed.
    pub fn timeout(&mut self) {
        for c in 0..self.qp.requester.channels.len() {
            self.channel_timeout(c);
        }
    }

    fn channel_timeout(&mut self, c: usize) {
        let now = self.outbox.now;
        // Another channel may have failed, and the queue pair with it.
        let Some(channel) = self.qp.requester.channels.get_mut(c) else {
            return;
        };
        if channel.resume.is_some_and(|time| time <= now) {
            channel.resume = None;
        }
        if channel.deadline.is_some_and(|time| time <= now) {
            channel.deadline = None;
            let counters = self.qp.attributes.counters;
            self.device.count(counters, |count| count.timeouts += 1);
            match channel.retries.checked_sub(1) {
                Some(left) => {
                    channel.retries = left;
                    channel.rewind();
                }
                None => self.fail_first(c, Syndrome::TransportRetry),
            }
        }
    }

    /// Sends a packet or begins a work request. Returns whether there was one.
    fn step(&mut self) -> bool {
        (0..self.qp.requester.channels.len()).any(|c| self.transmit(c)) || self.begin()
    }

    /// Returns `true` if the queue may make progress: it is not in the error state, and waits for no page.
    fn is_able(&self) -> bool {
        self.qp.state != qp::State::Error && !page_fault::is_waiting(self.device, self.qp.number)
    }

    // Beginning.

    /// Begins the next work request, if there is one and it may.
    fn begin(&mut self) -> bool {
        let state = &self.qp.requester;
        let is_clear = state.channels.len() < self.qp.attributes.streams.channels
            || state.channels.iter().any(Channel::is_clear);
        if !self.is_able() || !is_clear {
            return false;
        }
        let Some(wqe) = self.next_wqe() else {
            return false;
        };
        let Some(c) = self.channel_for(&wqe) else {
            self.qp.requester.stalled = Some(wqe);
            return false;
        };
        let sequence = self.start_sequence(c);
        let (packets, error) = match self.prepare(c, &wqe, sequence.end) {
            Ok(packets) => (packets, None),
            Err(Stop::Failed(syndrome)) => (0, Some(syndrome)),
            Err(Stop::Waiting) => {
                self.qp.requester.stalled = Some(wqe);
                return false;
            }
        };
        self.qp.requester.order.push_back(c);
        self.qp.requester.channels[c].push(wqe, sequence, packets, error);
        self.settle(c);
        true
    }

    /// The channel for a work request, if it need not wait: that which has its stream already, a new one, or
    /// one that is idle.
    fn channel_for(&mut self, wqe: &Wqe) -> Option<usize> {
        let streams = self.qp.attributes.streams;
        let stream = if streams.any() { wqe.control.stream } else { 0 };
        let channels = &mut self.qp.requester.channels;
        let known = channels.iter().position(|channel| channel.stream == stream);
        let c = match known {
            Some(c) => c,
            None if channels.len() < streams.channels => {
                channels.push(Channel::new(stream));
                channels.len() - 1
            }
            None => channels
                .iter()
                .position(|channel| channel.work.is_empty())?,
        };
        channels[c].stream = stream;
        let failed = self.qp.requester.errors.contains(&stream);
        let channel = &mut self.qp.requester.channels[c];
        if channel.work.is_empty() && channel.failed != failed {
            *channel = Channel::new(stream);
            channel.failed = failed;
        }
        (channel.failed == failed && self.may_begin(c, wqe)).then_some(c)
    }

    fn start_sequence(&mut self, c: usize) -> Sequence {
        let attributes = &self.qp.attributes;
        let channel = &mut self.qp.requester.channels[c];
        if channel.sequence.is_none() {
            channel.retries = attributes.retry_count;
            channel.not_ready = attributes.rnr_retry;
        }
        let first = Psn::new(attributes.send_psn);
        *channel.sequence.get_or_insert(Sequence {
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
        self.fetch().or_else(|| {
            let state = &mut self.qp.requester;
            let wqe = Wqe::malformed(state.next);
            state.next = state.next.wrapping_add(1);
            Some(wqe)
        })
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

    /// Returns `true` if a work request need not wait for those before it on its channel.
    fn may_begin(&self, c: usize, wqe: &Wqe) -> bool {
        let channel = &self.qp.requester.channels[c];
        let fails = channel.work.back().is_some_and(|work| work.error.is_some());
        let is_read = matches!(wqe.operation, Operation::Read(_) | Operation::Atomic(_));
        let fence = match wqe.operation {
            // What is sent again is to find the keys as they were.
            Operation::Umr(_) => Fence::All,
            _ => wqe.control.fence,
        };
        if channel.failed {
            return true;
        }
        if fails
            || !channel.is_clear()
            || fence == Fence::All && !channel.is_idle()
            || fence == Fence::Reads && channel.reads > 0
            || is_read && channel.reads >= self.qp.attributes.max_reads
        {
            return false;
        }
        // One DC target at a time.
        let connected = channel.connection.map(|(address, _)| address);
        self.qp.transport != Transport::Dci
            || wqe.address.is_none()
            || connected == wqe.address
            || channel.is_idle()
    }

    /// Prepares a work request. Returns how many packets it takes.
    fn prepare(&mut self, c: usize, wqe: &Wqe, first: Psn) -> Result<u32, Stop> {
        if self.qp.requester.channels[c].failed {
            return Err(Stop::Failed(Syndrome::Flush));
        }
        check(self.qp, wqe).map_err(Stop::Failed)?;
        if let (Transport::Dci, Some(address)) = (self.qp.transport, wqe.address) {
            let channel = &mut self.qp.requester.channels[c];
            let connected = channel.connection.map(|(address, _)| address);
            if connected != Some(address) {
                let number = self.qp.number;
                let connection = dc::connect(self.device, number, c as u16, &address, first);
                channel.connection = Some((address, connection));
            }
        }
        match &wqe.operation {
            Operation::Malformed | Operation::Nop => Ok(0),
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

    /// Sends the packet at the cursor of a channel. Returns whether there was one, and it could be made.
    fn transmit(&mut self, c: usize) -> bool {
        let channel = self.qp.requester.channels.get(c);
        let sequence = channel.and_then(Channel::to_send);
        let (Some(channel), Some(sequence), true) = (channel, sequence, self.is_able()) else {
            return false;
        };
        let psn = sequence.cursor;
        let index = channel.find(psn);
        let Some(work) = channel.work.get(index).filter(|work| work.error.is_none()) else {
            return false;
        };
        let skip = psn.since(work.first) as u32 * self.qp.attributes.mtu;
        let end = work.end();
        let (body, next) = body(work, psn, skip);
        let acknowledge = next == end || psn.get() % ASK == 0;
        let (solicited, srq) = (work.wqe.control.solicited, work.wqe.srq);
        let payload = match self.payload(c, index, skip) {
            Ok(payload) => payload,
            Err(fault) => {
                if let Stop::Failed(syndrome) = Stop::at(self.device, self.qp.number, fault) {
                    self.qp.requester.channels[c].work[index].error = Some(syndrome);
                    self.settle(c);
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
        send(self.device, self.outbox, packet);
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
            self.settle(c);
        }
        true
    }

    /// The data of a packet.
    fn payload(&mut self, c: usize, index: usize, skip: u32) -> Result<Vec<u8>, Fault> {
        let work = &self.qp.requester.channels[c].work[index];
        if work.is_read() {
            return Ok(Vec::new());
        }
        let length = (work.length() - skip).min(self.qp.attributes.mtu);
        let mut payload = self.outbox.buffer(length as usize);
        gather(self.device, self.qp, &work.wqe, skip, &mut payload)?;
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

    // Being answered.

    /// Handles an acknowledgement of all before `upto`. Returns `true` if no response with data before `upto` is
    /// missing and the channel has not failed.
    fn acknowledge(&mut self, c: usize, upto: Psn) -> bool {
        let channel = &self.qp.requester.channels[c];
        let missing = channel.missing(upto);
        let reached = missing.unwrap_or(upto);
        if channel.is_new(reached) {
            self.progress(c, reached);
        }
        if missing.is_some() {
            self.lost(c);
        }
        // What has ended may have let another fail, and perhaps the queue pair.
        let channel = self.qp.requester.channels.get(c);
        missing.is_none() && channel.is_some_and(|channel| !channel.failed)
    }

    /// All before `to` is done.
    fn progress(&mut self, c: usize, to: Psn) {
        let attributes = &self.qp.attributes;
        let channel = &mut self.qp.requester.channels[c];
        channel.progress(to);
        channel.retries = attributes.retry_count;
        channel.not_ready = attributes.rnr_retry;
        self.settle(c);
    }

    /// Something was lost: sends it again, once.
    fn lost(&mut self, c: usize) {
        let channel = self.qp.requester.channels.get_mut(c);
        if let Some(channel) = channel.filter(|it| !it.repeated && it.resume.is_none()) {
            channel.rewind();
        }
    }

    /// Handles an RNR NAK: sends again after the delay of `code`, or fails if no retry is left.
    fn wait(&mut self, c: usize, code: u8) {
        let channel = &mut self.qp.requester.channels[c];
        if channel.resume.is_some() {
            return;
        }
        if channel.not_ready != FOR_EVER {
            match channel.not_ready.checked_sub(1) {
                Some(left) => channel.not_ready = left,
                None => return self.fail_first(c, Syndrome::RnrRetry),
            }
        }
        channel.resume = Some(self.outbox.now + rnr_delay(code));
        channel.deadline = None;
        channel.rewind();
    }

    /// Data that was asked for arrived.
    fn receive(&mut self, c: usize, packet: &Packet) {
        let psn = packet.psn;
        let channel = &self.qp.requester.channels[c];
        let Some(first) = channel.work.get(channel.find(psn)).map(|work| work.first) else {
            return;
        };
        if !self.acknowledge(c, first) {
            return;
        }
        let sequence = self.qp.requester.channels[c].sequence;
        if sequence.map(|sequence| sequence.acknowledged) != Some(psn) {
            return self.lost(c);
        }
        match self.take_answer(c, packet) {
            Ok(()) => self.progress(c, psn.plus(1)),
            Err(Stop::Failed(syndrome)) => self.fail_first(c, syndrome),
            Err(Stop::Waiting) => self.qp.requester.channels[c].rewind(),
        }
    }

    /// Takes the data of the first work request's answer.
    fn take_answer(&mut self, c: usize, packet: &Packet) -> Result<(), Stop> {
        const BAD: Stop = Stop::Failed(Syndrome::BadResponse);
        let mtu = self.qp.attributes.mtu;
        let channel = &mut self.qp.requester.channels[c];
        let first = channel.first();
        let work = channel.work.get_mut(first).ok_or(BAD)?;
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
            work.inline = data.to_vec();
            return Ok(());
        }
        let (pd, number) = (self.qp.attributes.pd, self.qp.number);
        reach(self.device)
            .scatter(pd, number, &work.wqe.data.segments, u64::from(skip), data)
            .map_err(|fault| Stop::at(self.device, number, fault))
    }

    // Ending.

    /// Ends what is done on a channel, or fails.
    fn settle(&mut self, c: usize) {
        let channel = &self.qp.requester.channels[c];
        let first = channel.work.get(channel.first());
        match first.and_then(|work| work.error) {
            Some(syndrome) if !channel.failed => self.fail_first(c, syndrome),
            _ => self.retire(),
        }
    }

    /// Completes the work requests that are done, as long as all before them are.
    fn retire(&mut self) {
        while let Some(work) = self.qp.requester.take_ended() {
            let control = work.wqe.control;
            if let Some(syndrome) = work.error {
                complete_in_error(self.device, self.qp, &control, syndrome);
            } else if control.signalled {
                let completion = Completion {
                    byte_count: work.length(),
                    inline: work.inline,
                    ..completion(self.qp, &control)
                };
                self.device.complete(self.qp.attributes.send_cq, completion);
            }
        }
    }

    /// The first work request of a channel that has not ended fails, and so does its stream. With too many
    /// of them, and with what is no matter of streams, the queue pair does.
    fn fail_first(&mut self, c: usize, syndrome: Syndrome) {
        let state = &mut self.qp.requester;
        let channel = &mut state.channels[c];
        channel.fail(syndrome);
        state.errors.insert(channel.stream);
        let too_many = state.errors.len() >= self.qp.attributes.streams.errors;
        self.retire();
        if too_many || syndrome == Syndrome::LocalQpOperation {
            fail(self.device, self.qp);
        }
    }

    /// Raises an event when a send queue that the driver drains is drained.
    fn check_drained(&mut self) {
        let state = &self.qp.requester;
        let idle = state.order.is_empty() && state.stalled.is_none();
        if self.qp.state == qp::State::SqDraining && idle {
            self.qp.state = qp::State::SqDrained;
            let event = Event::Qp(QpEvent::SqDrained, self.qp.number);
            self.device.event(event);
        }
    }

    /// Sets the time for peers to answer, where they have to and none is set.
    fn set_deadlines(&mut self) {
        let code = self.qp.attributes.ack_timeout;
        for channel in &mut self.qp.requester.channels {
            let under_way = channel.sequence.is_some_and(|sequence| {
                !channel.failed && sequence.cursor.since(sequence.acknowledged) > 0
            });
            if !under_way || code == 0 {
                channel.deadline = None;
            } else if channel.deadline.is_none() {
                channel.deadline = Some(self.outbox.now + Duration::from_nanos(4096 << code));
            }
        }
    }
}

/// Completes as flushed all that is posted to a send queue, for a queue pair in the error state.
pub fn flush(device: &mut Device, qp: &mut Qp) {
    let state = &mut qp.requester;
    let stalled = state.stalled.take().map(|wqe| (wqe.control, None));
    let mut channels = std::mem::take(&mut state.channels);
    let order = std::mem::take(&mut state.order).into_iter();
    let begun = order.filter_map(|c| {
        let work = channels[c].work.pop_front()?;
        let error = work.error.filter(|_| channels[c].failed);
        Some((work.wqe.control, error))
    });
    let begun: Vec<_> = begun.chain(stalled).collect();
    state.errors.clear();
    for (control, error) in begun {
        complete_in_error(device, qp, &control, error.unwrap_or(Syndrome::Flush));
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
        Operation::Malformed => false,
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

/// Returns the operation of a packet, and the sequence number after it.
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
        Operation::Malformed | Operation::Nop | Operation::Umr(_) => {
            (Body::Acknowledge(Answer::Ack), next)
        }
    }
}

/// Returns the syndrome of a work request that received this NAK.
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
