// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Responder of a connection: executes the requests of the peer and sends responses.
//!
//! # Operation
//!
//! The responder executes requests in PSN order, each once. Responses are queued, and sent in order in the turn of the
//! queue pair.
//!
//! # Recovery
//!
//! A gap in the PSNs causes one sequence NAK. The response to a duplicate request is repeated: a READ is executed
//! again, and results of atomic operations are saved.

mod atomic;
mod execution;
mod state;
mod target;

use crate::cost::DeviceCounters;
use crate::device::Device;
use crate::network::packet::{Answer, Nak, Packet, PacketBody, Psn, Reth};
use crate::object::qp::Receive;
use execution::Rejection;
use state::{Delivery, Response};

pub use state::{Progress, ResponderState};
pub use target::{Peer, ResponderContext};

/// The responder of an unreliable connection has failed. It sends no NAK.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failed;

/// Responder of one connection.
#[derive(Debug)]
pub struct Responder<'a> {
    /// Device.
    pub device: &'a mut Device,
    /// Attributes of the queue pair or DC target.
    pub context: &'a ResponderContext,
    /// Receive queue.
    pub receive: &'a mut Receive,
    /// State of the connection.
    pub state: &'a mut ResponderState,
}

impl Responder<'_> {
    /// Handles a received request.
    pub fn handle_request(&mut self, packet: &Packet) -> Result<(), Failed> {
        if self.state.failed {
            return Ok(());
        }
        self.state.peer = Some(self.context.peer);
        let expected = *self.state.expected.get_or_insert(self.context.first);
        let distance = packet.psn.since(expected);
        if !self.context.reliable {
            return self.handle_unreliable(packet, distance);
        }
        match distance {
            0 => self.handle_expected(packet),
            1.. => self.nak_sequence_gap(expected),
            _ => self.repeat_response(packet, expected),
        }
        Ok(())
    }

    /// Executes a packet with the expected PSN.
    fn handle_expected(&mut self, packet: &Packet) {
        let psn = packet.psn;
        match self.execute_request(packet) {
            Ok(()) => {
                self.state.nak_sent = false;
                self.state.expected = Some(psn.plus(self.psn_count(&packet.body)));
                if packet.acknowledge && !has_data_response(&packet.body) {
                    self.state.queue_response(Response::Ack(psn));
                }
            }
            Err(Rejection::NotReady) => {
                self.count(|count| count.receiver_not_ready += 1);
                self.state.nak_sent = true;
                let nak = Answer::ReceiverNotReady(self.context.min_rnr_nak);
                self.state.queue_response(Response::RetryableNak(psn, nak));
            }
            Err(Rejection::Final(nak, event)) => {
                self.state.failed = true;
                self.state
                    .queue_response(Response::FinalNak(psn, nak, event));
            }
        }
    }

    /// Handles a gap in the PSNs: sends one sequence NAK for `expected`.
    fn nak_sequence_gap(&mut self, expected: Psn) {
        if !self.state.nak_sent {
            self.count(|count| count.out_of_sequence += 1);
            self.state.nak_sent = true;
            let nak = Answer::Nak(Nak::Sequence);
            self.state
                .queue_response(Response::RetryableNak(expected, nak));
        }
    }

    /// Handles a duplicate request, whose response was delayed or lost.
    fn repeat_response(&mut self, packet: &Packet, expected: Psn) {
        self.count(|count| count.duplicates += 1);
        match packet.body {
            PacketBody::ReadRequest(reth) => {
                let end = packet.psn.plus(self.psn_count(&packet.body));
                if end.since(expected) <= 0 && self.check_read(&reth).is_ok() {
                    self.queue_read_response(packet.psn, reth, Delivery::Duplicate);
                }
            }
            PacketBody::Atomic(_) => {
                if let Some(found) = self.state.atomic_result(packet.psn) {
                    let response = Response::Atomic(packet.psn, found, Delivery::Duplicate);
                    self.state.queue_response(response);
                }
            }
            _ if packet.acknowledge => self
                .state
                .queue_response(Response::Ack(expected.previous())),
            _ => {}
        }
    }

    /// Handles a packet of an unreliable connection. A lost packet aborts its message.
    fn handle_unreliable(&mut self, packet: &Packet, distance: i32) -> Result<(), Failed> {
        if distance != 0 {
            self.count(|count| count.out_of_sequence += 1);
            self.state.unused_receive = self.state.abort_message();
        }
        self.state.expected = Some(packet.psn.plus(1));
        if self.execute_request(packet).is_err() {
            self.state.unused_receive = self.state.abort_message();
        }
        match self.state.failed {
            true => Err(Failed),
            false => Ok(()),
        }
    }

    fn count(&mut self, count: impl Fn(&mut DeviceCounters)) {
        self.device.count(self.context.counters, count);
    }

    /// Returns the number of PSNs that a request occupies.
    fn psn_count(&self, body: &PacketBody) -> u32 {
        match body {
            PacketBody::ReadRequest(reth) => reth.length.div_ceil(self.context.peer.mtu).max(1),
            _ => 1,
        }
    }
}

/// Returns `true` if the response to a request has data. It replaces the acknowledgement.
fn has_data_response(body: &PacketBody) -> bool {
    matches!(body, PacketBody::ReadRequest(_) | PacketBody::Atomic(_))
}

/// Returns the part of `reth` after the first `length` bytes.
fn advance_reth(reth: Reth, length: u32) -> Reth {
    Reth {
        address: reth.address.wrapping_add(u64::from(length)),
        length: reth.length - length,
        ..reth
    }
}
