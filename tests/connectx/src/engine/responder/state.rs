// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Receive state of a connection, with the responses that wait to be sent.

use std::collections::VecDeque;

use super::{advance, Peer};
use crate::device::Device;
use crate::engine::{page_fault, reach, send, BURST};
use crate::network::packet::{Answer, Body, Nak, Packet, Psn, Reth};
use crate::network::Outbox;
use crate::object::eq::QpEvent;
use crate::object::mkey::User;
use crate::object::receive::Wqe;

/// Maximum number of responses that wait. Further responses, except a final NAK, are dropped, and their requester
/// retries.
const REPLIES: usize = 256;

/// Number of results of atomic operations that are kept: at least as many as a peer may have in flight.
const ATOMICS: usize = 128;

/// Receive state of a connection.
#[derive(Clone, Debug, Default)]
pub struct State {
    /// The sequence number that comes next, once the first packet came.
    pub(super) expected: Option<Psn>,
    /// `true` if the expected packet was requested again: the packets behind it are ignored until it arrives.
    pub(super) refused: bool,
    /// `true` if a request was rejected with a final NAK.
    pub(super) failed: bool,
    /// The message that is under way.
    pub(super) message: Option<Message>,
    /// A receive that was taken for a message of which a part was lost.
    pub(super) spare: Option<Wqe>,
    /// Answers that were not sent yet.
    replies: VecDeque<Reply>,
    /// Values that atomic operations have found, by sequence number.
    atomics: VecDeque<(Psn, u64)>,
    /// Where answers go.
    pub(super) peer: Option<Peer>,
}

/// A message of which more is to come.
#[derive(Clone, Debug)]
pub(super) enum Message {
    /// A SEND, into this receive, of which so many bytes came.
    Send(Wqe, u64),
    /// A WRITE: what is left of it, and how long all of it is.
    Write(Reth, u32),
}

/// An answer to send.
#[derive(Clone, Debug)]
pub(super) enum Reply {
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
pub(super) enum Turn {
    First,
    Again,
}

/// The answer to a READ, from some packet on.
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
    pub(super) fn unanswered(&self) -> usize {
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
    pub(super) fn reply(&mut self, reply: Reply) {
        if let (Some(Reply::Ack(last)), Reply::Ack(psn)) = (self.replies.back_mut(), &reply) {
            *last = *psn;
        } else if self.replies.len() < REPLIES || matches!(reply, Reply::Refuse(..)) {
            self.replies.push_back(reply);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn final_nak_is_queued_although_reply_queue_is_full() {
        let mut state = State::default();
        for number in 0..2 * REPLIES as u32 {
            state.reply(Reply::Atomic(Psn::new(number), 0, Turn::First));
        }
        assert_eq!(state.replies.len(), REPLIES);
        state.reply(Reply::Refuse(Psn::new(0), Nak::InvalidRequest, None));
        assert!(matches!(state.replies.back(), Some(Reply::Refuse(..))));
    }

    #[test]
    fn repeated_psn_returns_latest_atomic_result() {
        let psn = Psn::new(7);
        let mut state = State::default();
        state.atomics.extend([(psn, 1), (psn, 2), (psn.plus(1), 3)]);
        assert_eq!(state.found(psn), Some(2));
        assert_eq!(state.found(psn.plus(2)), None);
    }
}
