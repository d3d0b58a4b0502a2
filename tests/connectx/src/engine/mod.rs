// SPDX-License-Identifier: GPL-2.0 OR MIT
//! What makes queue pairs move: doorbells and packets come in, packets and completions go out.
//!
//! Each entry does all that can be done at once and returns. What has to wait for its turn (the rest of a
//! long message, answers) or for time (a repetition) is noted in the device's [`EngineState`], for [`turn`] and
//! [`timeout`]. Turns come when all packets are delivered, so one answer can stand for several.
//!
//! A queue pair is taken out of its table while the engine works on it, so that the rest of the device is
//! at hand as well.

pub mod channel;
pub mod datagram;
pub mod dc;
pub mod page_fault;
pub mod requester;
pub mod responder;
pub mod umr;
pub mod wqe;

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use crate::device::Device;
use crate::network::packet::{Packet, Service};
use crate::network::Outbox;
use crate::object::cq::{Completion, CqeKind, Syndrome};
use crate::object::eq::{Event, QpEvent};
use crate::object::qp::{self, Qp, QpState, Receive, Transport};
use crate::object::receive::ReceiveWqe;
use crate::object::scatter::Reach;
use page_fault::PageFaultState;
use requester::{Requester, RequesterState};
use responder::{Responder, ResponderContext, ResponderState};

/// Maximum number of packets that a queue pair sends in one turn.
const BURST: usize = 64;

/// Minimum and maximum time between two polls of a receive queue in the error state. Receives that the driver posts
/// there must be flushed, and no doorbell announces them.
const FLUSH: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(64));

/// Pending work of a device's engines.
#[derive(Debug, Default)]
pub struct EngineState {
    /// Queue pairs and DC targets that have more to do.
    ready: VecDeque<u32>,
    /// When to look at which queue pair or DC target again.
    timers: BTreeSet<(Duration, u32)>,
    /// Page faults in progress.
    faults: PageFaultState,
}

impl EngineState {
    /// Lets a queue pair or DC target go on at its turn.
    fn wake(&mut self, number: u32) {
        if self.ready.back() != Some(&number) {
            self.ready.push_back(number);
        }
    }
}

/// A doorbell rang: the send queue of `qpn` has work requests up to and including the one whose control
/// segment the doorbell carried, `counter` being its index in basic blocks.
pub fn doorbell(device: &mut Device, qpn: u32, counter: u16, outbox: &mut Outbox) {
    with(device, qpn, |device, qp| {
        device.cost.context(qpn);
        let blocks = qp.send.as_ref().map_or(0, qp::SendRing::blocks);
        qp.requester.post(counter, blocks);
        proceed(device, qp, outbox);
    });
}

/// A packet arrived.
pub fn packet(device: &mut Device, packet: Packet, outbox: &mut Outbox) {
    device.cost.count.packets_received += 1;
    device.cost.count.bytes_received += packet.payload.len() as u64;
    match packet.service {
        Service::Ud { .. } => datagram::arrive(device, &packet),
        Service::Dc(connection) if packet.body.is_request() => {
            dc::request(device, connection, &packet);
        }
        _ => with(device, packet.destination, |device, qp| {
            connected(device, qp, &packet, outbox);
        }),
    }
    outbox.recycle(packet.payload);
}

/// Lets one queue pair that has more to do go on. Returns whether there was one.
pub fn turn(device: &mut Device, outbox: &mut Outbox) -> bool {
    let Some(number) = device.engine.ready.pop_front() else {
        return false;
    };
    if device.objects.dcts.get(number).is_some() {
        dc::answer(device, number, outbox);
    }
    with(device, number, |device, qp| {
        answer(device, qp, outbox);
        proceed(device, qp, outbox);
    });
    true
}

/// Does what is due by now.
pub fn timeout(device: &mut Device, outbox: &mut Outbox) -> bool {
    let mut any = false;
    while let Some(&(time, qpn)) = device.engine.timers.first() {
        if time > outbox.now {
            break;
        }
        device.engine.timers.pop_first();
        any = true;
        dc::timeout(device, qpn);
        with(device, qpn, |device, qp| {
            if qp.requester.alarm(time) {
                Requester::new(device, qp, outbox).timeout();
                proceed(device, qp, outbox);
            }
        });
    }
    any
}

/// When there is something to do without a doorbell or a packet; the past if that is now.
pub fn deadline(device: &Device) -> Option<Duration> {
    if !device.engine.ready.is_empty() {
        return Some(Duration::ZERO);
    }
    device.engine.timers.first().map(|(time, _)| *time)
}

/// A queue pair has entered another state by a command, and may have something to do in it.
pub fn enter(device: &mut Device, qpn: u32) {
    device.engine.wake(qpn);
}

/// A queue pair gives up what it was asked to do: it enters the error state, where all is flushed.
pub fn error(device: &mut Device, qpn: u32) {
    with(device, qpn, fail);
}

/// A queue pair, in the reset state now, forgets what it was doing.
pub fn reset(qp: &mut Qp) {
    qp.requester = RequesterState::default();
    qp.responder = ResponderState::default();
}

/// Takes a queue pair out of its table for a while.
fn with(device: &mut Device, qpn: u32, act: impl FnOnce(&mut Device, &mut Qp)) {
    if let Some(mut qp) = device.objects.qps.take(qpn) {
        act(device, &mut qp);
        device.objects.qps.put_back(qpn, qp);
    }
}

/// The protection domain of receives: a shared queue has one of its own.
fn local_domain(device: &Device, from: &Receive, own: u32) -> u32 {
    match from {
        Receive::Shared(srqn) => device.objects.srqs.get(*srqn).map_or(own, |srq| srq.pd),
        _ => own,
    }
}

/// The memory that keys lead to.
fn reach(device: &mut Device) -> Reach<'_> {
    Reach {
        dma: &device.dma,
        memic: &device.objects.memic,
        keys: &device.objects.mkeys,
        cost: &mut device.cost,
    }
}

/// Sends a packet.
fn send(device: &mut Device, outbox: &mut Outbox, packet: Packet) {
    device.cost.count.packets_sent += 1;
    device.cost.count.bytes_sent += packet.payload.len() as u64;
    outbox.send(packet);
}

/// A packet of a connection arrived.
fn connected(device: &mut Device, qp: &mut Qp, packet: &Packet, outbox: &mut Outbox) {
    let service = match packet.service {
        Service::Rc => Transport::Rc,
        Service::Uc => Transport::Uc,
        Service::Xrc { .. } => Transport::Xrc,
        Service::Dc(_) => Transport::Dci,
        Service::Ud { .. } => return,
    };
    let dynamic = service == Transport::Dci;
    if qp.transport != service || !(dynamic || packet.path.source == qp.attributes.path.lid) {
        return;
    }
    device.cost.context(qp.number);
    if !packet.body.is_request() {
        Requester::new(device, qp, outbox).answered(packet);
        proceed(device, qp, outbox);
    } else if qp.state.responds() {
        respond(device, qp, packet);
    }
}

/// A request of the peer arrived.
fn respond(device: &mut Device, qp: &mut Qp, packet: &Packet) {
    let (target, mut receive) = ResponderContext::of_qp(device, qp, packet);
    if qp.responder.is_new() && qp.state == QpState::Rtr {
        device.event(Event::Qp(QpEvent::CommunicationEstablished, qp.number));
    }
    let receive = receive.as_mut().unwrap_or(&mut qp.receive);
    let done = Responder {
        device,
        target: &target,
        receive,
        state: &mut qp.responder,
    }
    .request(packet);
    if let Err(responder::Failed) = done {
        fail(device, qp);
    } else if qp.responder.has_replies() {
        device.engine.wake(qp.number);
    }
}

/// Sends answers to the peer.
fn answer(device: &mut Device, qp: &mut Qp, outbox: &mut Outbox) {
    if !qp.state.responds() {
        return;
    }
    match qp.responder.answer(device, outbox) {
        responder::Progress::Done => {}
        responder::Progress::More => device.engine.wake(qp.number),
        responder::Progress::Refused(event) => {
            fail(device, qp);
            if let Some(event) = event {
                device.event(Event::Qp(event, qp.number));
            }
        }
    }
}

/// Does what the send queue of a queue pair asks for, as far as possible now.
fn proceed(device: &mut Device, qp: &mut Qp, outbox: &mut Outbox) {
    match qp.state {
        QpState::Error => {
            flush(device, qp);
            qp.requester.watch(outbox.now, FLUSH);
        }
        QpState::Rts | QpState::SqDraining => Requester::new(device, qp, outbox).proceed(),
        _ => {}
    }
    let before = qp.requester.alarm_time();
    if let Some(time) = qp.requester.set_alarm() {
        let timers = &mut device.engine.timers;
        if let Some(before) = before {
            timers.remove(&(before, qp.number));
        }
        timers.insert((time, qp.number));
    }
}

/// Enters the error state.
fn fail(device: &mut Device, qp: &mut Qp) {
    let before = std::mem::replace(&mut qp.state, QpState::Error);
    if before == QpState::Error {
        return;
    }
    flush(device, qp);
    if let Receive::Shared(_) = qp.receive {
        device.event(Event::Qp(QpEvent::LastWqe, qp.number));
    }
    // To watch the receive queue.
    device.engine.wake(qp.number);
}

/// Completes all that is posted to a queue pair in the error state.
fn flush(device: &mut Device, qp: &mut Qp) {
    requester::flush(device, qp);
    let begun = qp.responder.abandon().into_iter();
    let posted = std::iter::from_fn(|| match &mut qp.receive {
        Receive::Own(ring) => ring.take(&device.dma).ok().flatten(),
        _ => None,
    });
    let wqes: Vec<ReceiveWqe> = begun.chain(posted).collect();
    for wqe in wqes {
        let completion = Completion {
            kind: CqeKind::ReceiveError,
            qpn: qp.number,
            user_index: qp.attributes.user_index,
            wqe_counter: wqe.index,
            syndrome: Syndrome::Flush,
            ..Completion::default()
        };
        device.complete(qp.attributes.receive_cq, completion);
    }
}
