// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Receiving side of a connection, which executes the requests of a peer and responds.
//!
//! Requests are executed in the order of their sequence numbers, each once. A duplicate request gets another response:
//! a READ is executed again, and the result of an atomic operation is kept for this. Responses wait in a queue, and
//! are sent in order in the turn of the queue pair.

mod atomic;
mod execution;
mod state;
mod target;

use crate::cost::DeviceCounters;
use crate::device::Device;
use crate::network::packet::{Answer, Nak, Packet, PacketBody, Psn, Reth};
use crate::object::qp::Receive;
use execution::Rejection;
use state::{Response, Turn};

pub use state::{Progress, ResponderState};
pub use target::{Peer, ResponderContext};

/// The receiver failed, and sends no NAK.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failed;

/// Receiver of requests, with the state of one connection.
#[derive(Debug)]
pub struct Responder<'a> {
    /// The device.
    pub device: &'a mut Device,
    /// The receiver.
    pub target: &'a ResponderContext,
    /// Receive queue.
    pub receive: &'a mut Receive,
    /// Receive state of the connection.
    pub state: &'a mut ResponderState,
}

impl Responder<'_> {
    /// Handles a request.
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

    /// Executes the expected packet.
    fn in_sequence(&mut self, packet: &Packet) {
        let psn = packet.psn;
        match self.execute(packet) {
            Ok(()) => {
                self.state.refused = false;
                self.state.expected = Some(psn.plus(self.packets(&packet.body)));
                if packet.acknowledge && !is_answered(&packet.body) {
                    self.state.reply(Response::Ack(psn));
                }
            }
            Err(Rejection::NotReady) => {
                self.count(|count| count.receiver_not_ready += 1);
                self.state.refused = true;
                let answer = Answer::ReceiverNotReady(self.target.min_rnr_nak);
                self.state.reply(Response::TryAgain(psn, answer));
            }
            Err(Rejection::Final(nak, event)) => {
                self.state.failed = true;
                self.state.reply(Response::Refuse(psn, nak, event));
            }
        }
    }

    /// Handles a gap: requests the packet `expected` again, once.
    fn missing(&mut self, expected: Psn) {
        if !self.state.refused {
            self.count(|count| count.out_of_sequence += 1);
            self.state.refused = true;
            let answer = Answer::Nak(Nak::Sequence);
            self.state.reply(Response::TryAgain(expected, answer));
        }
    }

    /// Handles a duplicate, whose response is late or lost.
    fn again(&mut self, packet: &Packet, expected: Psn) {
        self.count(|count| count.duplicates += 1);
        match packet.body {
            PacketBody::ReadRequest(reth) => {
                let end = packet.psn.plus(self.packets(&packet.body));
                if end.since(expected) <= 0 && self.may_read(&reth).is_ok() {
                    self.reply_read(packet.psn, reth, Turn::Again);
                }
            }
            PacketBody::Atomic(_) => {
                if let Some(found) = self.state.found(packet.psn) {
                    let answer = Response::Atomic(packet.psn, found, Turn::Again);
                    self.state.reply(answer);
                }
            }
            _ if packet.acknowledge => self.state.reply(Response::Ack(expected.previous())),
            _ => {}
        }
    }

    /// Handles a packet of a connection without responses. A lost packet discards its message.
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

    fn count(&mut self, count: impl Fn(&mut DeviceCounters)) {
        self.device.count(self.target.counters, count);
    }

    /// Returns the number of sequence numbers that a request takes.
    fn packets(&self, body: &PacketBody) -> u32 {
        match body {
            PacketBody::ReadRequest(reth) => reth.length.div_ceil(self.target.peer.mtu).max(1),
            _ => 1,
        }
    }
}

/// Returns `true` if the response to a request has data, which replaces an acknowledgement.
fn is_answered(body: &PacketBody) -> bool {
    matches!(body, PacketBody::ReadRequest(_) | PacketBody::Atomic(_))
}

/// Returns the rest of remote memory after `length` bytes.
fn advance(reth: Reth, length: u32) -> Reth {
    Reth {
        address: reth.address.wrapping_add(u64::from(length)),
        length: reth.length - length,
        ..reth
    }
}
