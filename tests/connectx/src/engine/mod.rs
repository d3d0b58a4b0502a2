// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Transport engine: executes the work requests of queue pairs.
//!
//! # Operation
//!
//! Doorbells and packets are handled at once, without waiting. Deferred work is recorded in the [`EngineState`] of the
//! device: [`run_turn`] sends responses and the rest of long messages, [`handle_timeouts`] retransmits. Turns run after
//! all packets are delivered, so that one acknowledgement covers several packets.
//!
//! # Ownership
//!
//! A queue pair is removed from its table while the engine works on it. The engine can then borrow the device and the
//! queue pair independently.

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
use crate::object::scatter::KeyMemory;
use page_fault::PageFaultState;
use requester::{Requester, RequesterState};
use responder::{Responder, ResponderContext, ResponderState};

/// Maximum number of packets that a queue pair sends in one turn.
const BURST: usize = 64;

/// Minimum and maximum time between two polls of a receive queue in the error state. Receives that the driver posts in
/// this state must be flushed, and receives ring no doorbell.
const FLUSH: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(64));

/// Pending work of a device's engines.
#[derive(Debug, Default)]
pub struct EngineState {
    /// Numbers of queue pairs and DC targets with deferred work.
    ready: VecDeque<u32>,
    /// Expiry time of each timer, and the number of its queue pair or DC target.
    timers: BTreeSet<(Duration, u32)>,
    /// Page faults in progress.
    faults: PageFaultState,
}

impl EngineState {
    /// Schedules a turn of a queue pair or DC target.
    fn wake(&mut self, number: u32) {
        if self.ready.back() != Some(&number) {
            self.ready.push_back(number);
        }
    }
}

/// Handles a doorbell of the send queue of `qpn`. `counter` is the index, in basic blocks, of the last posted work
/// request. The doorbell carries the control segment of this work request.
pub fn handle_doorbell(device: &mut Device, qpn: u32, counter: u16, outbox: &mut Outbox) {
    with_qp(device, qpn, |device, qp| {
        device.cost.record_context(qpn);
        let blocks = qp.send.as_ref().map_or(0, qp::SendRing::blocks);
        qp.requester.record_posted(counter, blocks);
        process_send_queue(device, qp, outbox);
    });
}

/// Handles a received packet.
pub fn handle_packet(device: &mut Device, packet: Packet, outbox: &mut Outbox) {
    device.cost.count.packets_received += 1;
    device.cost.count.bytes_received += packet.payload.len() as u64;
    match packet.service {
        Service::Ud { .. } => datagram::handle_datagram(device, &packet),
        Service::Dc(connection) if packet.body.is_request() => {
            dc::handle_request(device, connection, &packet);
        }
        _ => with_qp(device, packet.destination, |device, qp| {
            handle_connection_packet(device, qp, &packet, outbox);
        }),
    }
    outbox.recycle(packet.payload);
}

/// Runs the turn of one queue pair or DC target. Returns `false` if no turn is scheduled.
pub fn run_turn(device: &mut Device, outbox: &mut Outbox) -> bool {
    let Some(number) = device.engine.ready.pop_front() else {
        return false;
    };
    if device.objects.dcts.get(number).is_some() {
        dc::send_responses(device, number, outbox);
    }
    with_qp(device, number, |device, qp| {
        send_responses(device, qp, outbox);
        process_send_queue(device, qp, outbox);
    });
    true
}

/// Handles all expired timers. Returns `true` if any timer has expired.
pub fn handle_timeouts(device: &mut Device, outbox: &mut Outbox) -> bool {
    let mut any = false;
    while let Some(&(time, qpn)) = device.engine.timers.first() {
        if time > outbox.now {
            break;
        }
        device.engine.timers.pop_first();
        any = true;
        dc::handle_timeout(device, qpn);
        with_qp(device, qpn, |device, qp| {
            if qp.requester.expire_timer(time) {
                Requester::new(device, qp, outbox).handle_timeouts();
                process_send_queue(device, qp, outbox);
            }
        });
    }
    any
}

/// Returns the time of the next turn or timer: [`Duration::ZERO`], which is in the past, if a turn is scheduled.
pub fn next_deadline(device: &Device) -> Option<Duration> {
    if !device.engine.ready.is_empty() {
        return Some(Duration::ZERO);
    }
    device.engine.timers.first().map(|(time, _)| *time)
}

/// Schedules a turn of a queue pair after a change of its state by a command.
pub fn wake_qp(device: &mut Device, qpn: u32) {
    device.engine.wake(qpn);
}

/// Moves a queue pair to the error state, which flushes its work requests.
pub fn move_to_error(device: &mut Device, qpn: u32) {
    with_qp(device, qpn, enter_error);
}

/// Clears the requester and responder of a queue pair that a command has moved to the reset state.
pub fn reset_qp(qp: &mut Qp) {
    qp.requester = RequesterState::default();
    qp.responder = ResponderState::default();
}

/// Removes a queue pair from its table, calls `f` with it, and puts it back. Does nothing without this queue pair.
fn with_qp(device: &mut Device, qpn: u32, f: impl FnOnce(&mut Device, &mut Qp)) {
    if let Some(mut qp) = device.objects.qps.take(qpn) {
        f(device, &mut qp);
        device.objects.qps.put_back(qpn, qp);
    }
}

/// Returns the protection domain of receives. A shared receive queue has its own domain; `own` is that of the QP.
fn receive_pd(device: &Device, from: &Receive, own: u32) -> u32 {
    match from {
        Receive::Shared(srqn) => device.objects.srqs.get(*srqn).map_or(own, |srq| srq.pd),
        _ => own,
    }
}

/// Returns access to the memory of keys.
fn key_memory(device: &mut Device) -> KeyMemory<'_> {
    KeyMemory {
        dma: &device.dma,
        memic: &device.objects.memic,
        keys: &device.objects.mkeys,
        cost: &mut device.cost,
    }
}

/// Counts a packet and appends it to the outbox.
fn send_packet(device: &mut Device, outbox: &mut Outbox, packet: Packet) {
    device.cost.count.packets_sent += 1;
    device.cost.count.bytes_sent += packet.payload.len() as u64;
    outbox.send(packet);
}

/// Handles a received packet of a connection. Drops a packet of another service or from another port.
fn handle_connection_packet(
    device: &mut Device,
    qp: &mut Qp,
    packet: &Packet,
    outbox: &mut Outbox,
) {
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
    device.cost.record_context(qp.number);
    if !packet.body.is_request() {
        Requester::new(device, qp, outbox).handle_response(packet);
        process_send_queue(device, qp, outbox);
    } else if qp.state.responds() {
        handle_request(device, qp, packet);
    }
}

/// Handles a received request.
fn handle_request(device: &mut Device, qp: &mut Qp, packet: &Packet) {
    let (context, mut receive) = ResponderContext::for_qp(device, qp, packet);
    if qp.responder.is_new() && qp.state == QpState::Rtr {
        device.event(Event::Qp(QpEvent::CommunicationEstablished, qp.number));
    }
    let receive = receive.as_mut().unwrap_or(&mut qp.receive);
    let done = Responder {
        device,
        context: &context,
        receive,
        state: &mut qp.responder,
    }
    .handle_request(packet);
    if let Err(responder::Failed) = done {
        enter_error(device, qp);
    } else if qp.responder.has_responses() {
        device.engine.wake(qp.number);
    }
}

/// Sends queued responses to the peer.
fn send_responses(device: &mut Device, qp: &mut Qp, outbox: &mut Outbox) {
    if !qp.state.responds() {
        return;
    }
    match qp.responder.send_responses(device, outbox) {
        responder::Progress::Done => {}
        responder::Progress::More => device.engine.wake(qp.number),
        responder::Progress::FinalNak(event) => {
            enter_error(device, qp);
            if let Some(event) = event {
                device.event(Event::Qp(event, qp.number));
            }
        }
    }
}

/// Executes the send queue as far as its state allows, and updates the timer of the queue pair.
fn process_send_queue(device: &mut Device, qp: &mut Qp, outbox: &mut Outbox) {
    match qp.state {
        QpState::Error => {
            flush_qp(device, qp);
            qp.requester.schedule_poll(outbox.now, FLUSH);
        }
        QpState::Rts | QpState::SqDraining => Requester::new(device, qp, outbox).run(),
        _ => {}
    }
    let before = qp.requester.timer();
    if let Some(time) = qp.requester.update_timer() {
        let timers = &mut device.engine.timers;
        if let Some(before) = before {
            timers.remove(&(before, qp.number));
        }
        timers.insert((time, qp.number));
    }
}

/// Moves a queue pair to the error state, flushes its work requests and raises the event for its SRQ.
fn enter_error(device: &mut Device, qp: &mut Qp) {
    let before = std::mem::replace(&mut qp.state, QpState::Error);
    if before == QpState::Error {
        return;
    }
    flush_qp(device, qp);
    if let Receive::Shared(_) = qp.receive {
        device.event(Event::Qp(QpEvent::LastWqe, qp.number));
    }
    // The turn starts to poll the receive queue.
    device.engine.wake(qp.number);
}

/// Completes all work requests of a queue pair in the error state as flushed.
fn flush_qp(device: &mut Device, qp: &mut Qp) {
    requester::flush_send_queue(device, qp);
    let begun = qp.responder.abort_message().into_iter();
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
