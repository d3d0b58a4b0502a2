// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Responder state of a connection, with its queue of responses.

use std::collections::VecDeque;

use super::{advance_reth, Peer};
use crate::device::Device;
use crate::engine::{key_memory, page_fault, send_packet, BURST};
use crate::network::packet::{Answer, Nak, Packet, PacketBody, Psn, Reth};
use crate::network::Outbox;
use crate::object::eq::QpEvent;
use crate::object::mkey::User;
use crate::object::receive::ReceiveWqe;

/// Maximum number of queued responses. Further responses, except a final NAK, are dropped, and the requester retries.
const MAX_RESPONSES: usize = 256;

/// Number of saved results of atomic operations: at least the maximum number that a peer has in flight.
const MAX_ATOMIC_RESULTS: usize = 128;

/// Responder state of a connection.
#[derive(Clone, Debug, Default)]
pub struct ResponderState {
    /// Expected PSN; `None` before the first packet.
    pub(super) expected: Option<Psn>,
    /// `true` if a sequence or RNR NAK was sent for the expected PSN. Later packets are then ignored until it arrives.
    pub(super) nak_sent: bool,
    /// `true` if a request has failed, on a reliable connection with a final NAK.
    pub(super) failed: bool,
    /// Message in progress.
    pub(super) message: Option<Message>,
    /// Receive of an aborted message, for the next message.
    pub(super) unused_receive: Option<ReceiveWqe>,
    /// Queued responses.
    responses: VecDeque<Response>,
    /// Results of atomic operations, with their PSNs.
    atomics: VecDeque<(Psn, u64)>,
    /// Requester, the destination of responses.
    pub(super) peer: Option<Peer>,
}

/// Message with outstanding packets.
#[derive(Clone, Debug)]
pub(super) enum Message {
    /// SEND: receive, and number of received bytes.
    Send(ReceiveWqe, u64),
    /// WRITE: remaining part, and total length.
    Write(Reth, u32),
}

/// Queued response.
#[derive(Clone, Debug)]
pub(super) enum Response {
    /// Acknowledgement of all packets up to this PSN.
    Ack(Psn),
    /// Sequence or RNR NAK: the packet was not executed, and the peer may retry.
    RetryableNak(Psn, Answer),
    /// NAK that ends the connection, and event to raise.
    FinalNak(Psn, Nak, Option<QpEvent>),
    /// Result of an atomic operation.
    Atomic(Psn, u64, Delivery),
    /// Remaining part of a READ.
    Read(ReadProgress),
}

/// Distinguishes a request received for the first time from a duplicate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Delivery {
    First,
    Duplicate,
}

/// Remaining part of the response to a READ.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReadProgress {
    pub(super) psn: Psn,
    pub(super) rest: Reth,
    pub(super) user: User,
    pub(super) delivery: Delivery,
    /// RNR timer code for the peer if memory is absent.
    pub(super) min_rnr_nak: u8,
}

/// Progress of sending responses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// All responses are sent.
    Done,
    /// More responses are queued.
    More,
    /// The last response was a final NAK, which ends the connection.
    FinalNak(Option<QpEvent>),
}

impl ResponderState {
    /// Returns `true` if no packet has arrived so far.
    pub fn is_new(&self) -> bool {
        self.expected.is_none()
    }

    /// Returns `true` if responses wait.
    pub fn has_responses(&self) -> bool {
        !self.responses.is_empty()
    }

    /// Returns the number of READs and atomic operations with a queued first response. Responses to duplicates are not
    /// counted: the first response to the same request was.
    pub(super) fn pending_data_responses(&self) -> usize {
        let is_first = |response: &&Response| match response {
            Response::Atomic(_, _, delivery) => *delivery == Delivery::First,
            Response::Read(progress) => progress.delivery == Delivery::First,
            _ => false,
        };
        self.responses.iter().filter(is_first).count()
    }

    /// Returns `true` if a message or a response is in progress.
    pub fn is_busy(&self) -> bool {
        self.message.is_some() || self.has_responses()
    }

    /// Returns the expected PSN. Returns `None` before the first packet.
    pub fn next_psn(&self) -> Option<u32> {
        self.expected.map(Psn::get)
    }

    /// Discards the message in progress and the queued responses. Returns the receive of the message.
    pub fn abort_message(&mut self) -> Option<ReceiveWqe> {
        self.responses.clear();
        match self.message.take() {
            Some(Message::Send(wqe, _)) => Some(wqe),
            _ => self.unused_receive.take(),
        }
    }

    /// Returns the previous value of the atomic operation with this PSN. PSNs wrap, so the latest such operation is
    /// selected.
    pub(super) fn atomic_result(&self, psn: Psn) -> Option<u64> {
        let mut atomics = self.atomics.iter();
        let last = atomics.rfind(|(number, _)| *number == psn);
        last.map(|(_, found)| *found)
    }

    /// Saves the previous value of an atomic operation, for duplicates of its request.
    pub(super) fn save_atomic_result(&mut self, psn: Psn, found: u64) {
        if self.atomics.len() == MAX_ATOMIC_RESULTS {
            self.atomics.pop_front();
        }
        self.atomics.push_back((psn, found));
    }

    /// Sends queued responses, up to `BURST` packets.
    pub fn send_responses(&mut self, device: &mut Device, outbox: &mut Outbox) -> Progress {
        let Some(peer) = self.peer else {
            return Progress::Done;
        };
        for _ in 0..BURST {
            let Some(response) = self.responses.pop_front() else {
                return Progress::Done;
            };
            let (psn, body) = match response {
                Response::Ack(psn) => (psn, PacketBody::Acknowledge(Answer::Ack)),
                Response::RetryableNak(psn, acknowledgement) => {
                    (psn, PacketBody::Acknowledge(acknowledgement))
                }
                Response::Atomic(psn, found, _) => (psn, PacketBody::AtomicResponse(found)),
                Response::Read(progress) => {
                    self.send_read_response(device, outbox, &peer, progress);
                    continue;
                }
                Response::FinalNak(psn, nak, event) => {
                    let body = PacketBody::Acknowledge(Answer::Nak(nak));
                    send_packet(device, outbox, peer.response_packet(psn, body));
                    return Progress::FinalNak(event);
                }
            };
            send_packet(device, outbox, peer.response_packet(psn, body));
        }
        match self.has_responses() {
            true => Progress::More,
            false => Progress::Done,
        }
    }

    /// Sends one packet of the response to a READ. If a page is absent, queues an RNR NAK, so that the peer retries the
    /// rest.
    fn send_read_response(
        &mut self,
        device: &mut Device,
        outbox: &mut Outbox,
        peer: &Peer,
        progress: ReadProgress,
    ) {
        let ReadProgress {
            psn, rest, user, ..
        } = progress;
        let length = rest.length.min(peer.mtu);
        let mut payload = outbox.buffer(length as usize);
        let read = key_memory(device).read(rest.key, user, rest.address, &mut payload);
        if let Err(fault) = read {
            let response = if page_fault::request_absent(device, user.qp, fault) {
                Response::RetryableNak(psn, Answer::ReceiverNotReady(progress.min_rnr_nak))
            } else {
                self.failed = true;
                Response::FinalNak(psn, Nak::RemoteAccess, Some(QpEvent::AccessError))
            };
            return self.responses.push_front(response);
        }
        let body = PacketBody::ReadResponse;
        let packet = Packet {
            payload,
            ..peer.response_packet(psn, body)
        };
        send_packet(device, outbox, packet);
        let rest = advance_reth(rest, length);
        if rest.length > 0 {
            self.responses.push_front(Response::Read(ReadProgress {
                psn: psn.plus(1),
                rest,
                ..progress
            }));
        }
    }

    /// Queues a response. An acknowledgement replaces an acknowledgement directly before it. A final NAK is queued even
    /// if the queue is full.
    pub(super) fn queue_response(&mut self, response: Response) {
        if let (Some(Response::Ack(last)), Response::Ack(psn)) =
            (self.responses.back_mut(), &response)
        {
            *last = *psn;
        } else if self.responses.len() < MAX_RESPONSES || matches!(response, Response::FinalNak(..))
        {
            self.responses.push_back(response);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn final_nak_is_queued_although_response_queue_is_full() {
        let mut state = ResponderState::default();
        for number in 0..2 * MAX_RESPONSES as u32 {
            state.queue_response(Response::Atomic(Psn::new(number), 0, Delivery::First));
        }
        assert_eq!(state.responses.len(), MAX_RESPONSES);
        state.queue_response(Response::FinalNak(Psn::new(0), Nak::InvalidRequest, None));
        assert!(matches!(
            state.responses.back(),
            Some(Response::FinalNak(..))
        ));
    }

    #[test]
    fn repeated_psn_returns_latest_atomic_result() {
        let psn = Psn::new(7);
        let mut state = ResponderState::default();
        state.atomics.extend([(psn, 1), (psn, 2), (psn.plus(1), 3)]);
        assert_eq!(state.atomic_result(psn), Some(2));
        assert_eq!(state.atomic_result(psn.plus(2)), None);
    }
}
