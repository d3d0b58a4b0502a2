// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Receive state of a connection, with the responses that wait to be sent.

use std::collections::VecDeque;

use super::{advance, Peer};
use crate::device::Device;
use crate::engine::{page_fault, reach, send, BURST};
use crate::network::packet::{Answer, Nak, Packet, PacketBody, Psn, Reth};
use crate::network::Outbox;
use crate::object::eq::QpEvent;
use crate::object::mkey::User;
use crate::object::receive::ReceiveWqe;

/// Maximum number of responses that wait. Further responses, except a final NAK, are dropped, and their requester
/// retries.
const REPLIES: usize = 256;

/// Number of results of atomic operations that are kept: at least as many as a peer may have in flight.
const ATOMICS: usize = 128;

/// Receive state of a connection.
#[derive(Clone, Debug, Default)]
pub struct ResponderState {
    /// Next sequence number; `None` before the first packet.
    pub(super) expected: Option<Psn>,
    /// `true` if the expected packet was requested again: the packets behind it are ignored until it arrives.
    pub(super) refused: bool,
    /// `true` if a request was rejected with a final NAK.
    pub(super) failed: bool,
    /// The message in progress.
    pub(super) message: Option<Message>,
    /// A receive taken for a message that was discarded.
    pub(super) spare: Option<ReceiveWqe>,
    /// Responses that wait to be sent.
    replies: VecDeque<Response>,
    /// Results of atomic operations, by sequence number.
    atomics: VecDeque<(Psn, u64)>,
    /// The sender, which receives the responses.
    pub(super) peer: Option<Peer>,
}

/// Message of which more packets follow.
#[derive(Clone, Debug)]
pub(super) enum Message {
    /// A SEND: its receive, and the number of received bytes.
    Send(ReceiveWqe, u64),
    /// A WRITE: its remaining part, and its total length.
    Write(Reth, u32),
}

/// Response that waits to be sent.
#[derive(Clone, Debug)]
pub(super) enum Response {
    /// Acknowledges all packets up to this one.
    Ack(Psn),
    /// This packet was not executed, and the peer may retry.
    TryAgain(Psn, Answer),
    /// This packet is rejected, which ends the connection, perhaps with an event.
    Refuse(Psn, Nak, Option<QpEvent>),
    /// The result of an atomic operation.
    Atomic(Psn, u64, Turn),
    /// The remaining part of a READ.
    Read(Reading),
}

/// Distinguishes the first response to a request from a response to a duplicate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    First,
    Again,
}

/// Remaining part of the response to a READ.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reading {
    pub(super) psn: Psn,
    pub(super) rest: Reth,
    pub(super) user: User,
    pub(super) turn: Turn,
    /// RNR timer code for the peer if memory is absent.
    pub(super) min_rnr_nak: u8,
}

/// Progress of sending responses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// All responses are sent.
    Done,
    /// More responses wait.
    More,
    /// The last response was a final NAK, which ends the connection.
    Refused(Option<QpEvent>),
}

impl ResponderState {
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
    pub(super) fn unanswered(&self) -> usize {
        let is_first = |reply: &&Response| match reply {
            Response::Atomic(_, _, turn) => *turn == Turn::First,
            Response::Read(reading) => reading.turn == Turn::First,
            _ => false,
        };
        self.replies.iter().filter(is_first).count()
    }

    /// Returns `true` if a message or a response is in progress.
    pub fn is_busy(&self) -> bool {
        self.message.is_some() || self.has_replies()
    }

    /// Returns the next sequence number. Returns `None` before the first packet.
    pub fn next_psn(&self) -> Option<u32> {
        self.expected.map(Psn::get)
    }

    /// Discards the message in progress and the waiting responses. Returns the receive that the message has taken.
    pub fn abandon(&mut self) -> Option<ReceiveWqe> {
        self.replies.clear();
        match self.message.take() {
            Some(Message::Send(wqe, _)) => Some(wqe),
            _ => self.spare.take(),
        }
    }

    /// Returns the value that the atomic operation with this sequence number found. Sequence numbers wrap, so the last
    /// such operation counts.
    pub(super) fn found(&self, psn: Psn) -> Option<u64> {
        let mut atomics = self.atomics.iter();
        let last = atomics.rfind(|(number, _)| *number == psn);
        last.map(|(_, found)| *found)
    }

    /// Keeps the value that an atomic operation found, for duplicates of its request.
    pub(super) fn keep(&mut self, psn: Psn, found: u64) {
        if self.atomics.len() == ATOMICS {
            self.atomics.pop_front();
        }
        self.atomics.push_back((psn, found));
    }

    /// Sends waiting responses, up to `BURST` packets.
    pub fn answer(&mut self, device: &mut Device, outbox: &mut Outbox) -> Progress {
        let Some(peer) = self.peer else {
            return Progress::Done;
        };
        for _ in 0..BURST {
            let Some(reply) = self.replies.pop_front() else {
                return Progress::Done;
            };
            let (psn, body) = match reply {
                Response::Ack(psn) => (psn, PacketBody::Acknowledge(Answer::Ack)),
                Response::TryAgain(psn, answer) => (psn, PacketBody::Acknowledge(answer)),
                Response::Atomic(psn, found, _) => (psn, PacketBody::AtomicResponse(found)),
                Response::Read(reading) => {
                    self.read(device, outbox, &peer, reading);
                    continue;
                }
                Response::Refuse(psn, nak, event) => {
                    let body = PacketBody::Acknowledge(Answer::Nak(nak));
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

    /// Sends one packet of the response to a READ. If memory is absent, sends an RNR NAK, so that the peer requests the
    /// rest again.
    fn read(&mut self, device: &mut Device, outbox: &mut Outbox, peer: &Peer, reading: Reading) {
        let Reading {
            psn, rest, user, ..
        } = reading;
        let length = rest.length.min(peer.mtu);
        let mut payload = outbox.buffer(length as usize);
        let read = reach(device).read(rest.key, user, rest.address, &mut payload);
        if let Err(fault) = read {
            let refusal = if page_fault::waits(device, user.qp, fault) {
                Response::TryAgain(psn, Answer::ReceiverNotReady(reading.min_rnr_nak))
            } else {
                self.failed = true;
                Response::Refuse(psn, Nak::RemoteAccess, Some(QpEvent::AccessError))
            };
            return self.replies.push_front(refusal);
        }
        let body = PacketBody::ReadResponse;
        let packet = Packet {
            payload,
            ..peer.packet(psn, body)
        };
        send(device, outbox, packet);
        let rest = advance(rest, length);
        if rest.length > 0 {
            self.replies.push_front(Response::Read(Reading {
                psn: psn.plus(1),
                rest,
                ..reading
            }));
        }
    }

    /// Queues a response. An acknowledgement replaces an acknowledgement directly before it. A final NAK is queued even
    /// if the queue is full.
    pub(super) fn reply(&mut self, reply: Response) {
        if let (Some(Response::Ack(last)), Response::Ack(psn)) = (self.replies.back_mut(), &reply) {
            *last = *psn;
        } else if self.replies.len() < REPLIES || matches!(reply, Response::Refuse(..)) {
            self.replies.push_back(reply);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn final_nak_is_queued_although_reply_queue_is_full() {
        let mut state = ResponderState::default();
        for number in 0..2 * REPLIES as u32 {
            state.reply(Response::Atomic(Psn::new(number), 0, Turn::First));
        }
        assert_eq!(state.replies.len(), REPLIES);
        state.reply(Response::Refuse(Psn::new(0), Nak::InvalidRequest, None));
        assert!(matches!(state.replies.back(), Some(Response::Refuse(..))));
    }

    #[test]
    fn repeated_psn_returns_latest_atomic_result() {
        let psn = Psn::new(7);
        let mut state = ResponderState::default();
        state.atomics.extend([(psn, 1), (psn, 2), (psn.plus(1), 3)]);
        assert_eq!(state.found(psn), Some(2));
        assert_eq!(state.found(psn.plus(2)), None);
    }
}
