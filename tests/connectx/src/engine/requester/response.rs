// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Responses of the peer: acknowledgements, NAKs, and the data of READs and atomic operations.

use std::time::Duration;

use super::{Requester, Stop};
use crate::engine::channel::Channel;
use crate::engine::key_memory;
use crate::engine::wqe::Operation;
use crate::network::packet::{Answer, Nak, Packet, PacketBody, Psn, Service};
use crate::object::cq::Syndrome;

/// RNR retry count that means unlimited retries.
const UNLIMITED_RETRIES: u8 = 7;

impl Requester<'_> {
    /// Handles a response of the peer.
    pub fn handle_response(&mut self, packet: &Packet) {
        let Some(c) = self.find_channel(packet) else {
            return;
        };
        match packet.body {
            PacketBody::ReadResponse | PacketBody::AtomicResponse(_) => {
                self.handle_data_response(c, packet)
            }
            PacketBody::Acknowledge(Answer::Ack) => {
                self.handle_ack(c, packet.psn.plus(1));
            }
            PacketBody::Acknowledge(acknowledgement) if self.handle_ack(c, packet.psn) => {
                match acknowledgement {
                    Answer::ReceiverNotReady(code) => self.handle_rnr_nak(c, code),
                    Answer::Nak(Nak::Sequence) => self.retransmit(c),
                    Answer::Nak(nak) => self.fail_channel(c, nak_syndrome(nak)),
                    Answer::Ack => {}
                }
            }
            _ => {}
        }
    }

    /// Returns the channel of a response. Returns `None` if no channel has a request in flight for it.
    fn find_channel(&self, packet: &Packet) -> Option<usize> {
        let is_of = |channel: &Channel| match (packet.service, &channel.connection) {
            (Service::Dc(received), Some((_, current))) => received.number == current.number,
            (Service::Dc(_), None) => false,
            _ => true,
        };
        let channels = &self.qp.requester.channels;
        let c = channels.iter().position(is_of)?;
        let sequence = channels[c].sequence.filter(|_| !channels[c].failed)?;
        let is_in_flight =
            packet.psn.since(sequence.acknowledged) >= 0 && packet.psn.since(sequence.sent) < 0;
        is_in_flight.then_some(c)
    }

    /// Handles an acknowledgement of all PSNs before `upto`. Returns `true` if no response with data before `upto` is
    /// lost and the channel has not failed.
    fn handle_ack(&mut self, c: usize, upto: Psn) -> bool {
        let channel = &self.qp.requester.channels[c];
        let lost = channel.lost_response(upto);
        let reached = lost.unwrap_or(upto);
        if channel.is_new_ack(reached) {
            self.advance_ack(c, reached);
        }
        if lost.is_some() {
            self.retransmit(c);
        }
        // Completion may have failed another channel and the queue pair.
        let channel = self.qp.requester.channels.get(c);
        lost.is_none() && channel.is_some_and(|channel| !channel.failed)
    }

    /// Records that all packets before `to` are acknowledged.
    fn advance_ack(&mut self, c: usize, to: Psn) {
        let attributes = &self.qp.attributes;
        let channel = &mut self.qp.requester.channels[c];
        channel.advance_ack(to);
        channel.retries = attributes.retry_count;
        channel.rnr_retries = attributes.rnr_retry;
        self.complete_or_fail(c);
    }

    /// Retransmits after a loss, unless a retransmission is in progress or an RNR delay runs.
    fn retransmit(&mut self, c: usize) {
        let channel = self.qp.requester.channels.get_mut(c);
        if let Some(channel) =
            channel.filter(|channel| !channel.is_retransmitting && channel.rnr_deadline.is_none())
        {
            channel.rewind_cursor();
        }
    }

    /// Handles an RNR NAK: retransmits after the delay of `code`, or fails the channel if no retry is left.
    fn handle_rnr_nak(&mut self, c: usize, code: u8) {
        let channel = &mut self.qp.requester.channels[c];
        if channel.rnr_deadline.is_some() {
            return;
        }
        if channel.rnr_retries != UNLIMITED_RETRIES {
            match channel.rnr_retries.checked_sub(1) {
                Some(left) => channel.rnr_retries = left,
                None => return self.fail_channel(c, Syndrome::RnrRetry),
            }
        }
        channel.rnr_deadline = Some(self.outbox.now + rnr_delay(code));
        channel.ack_deadline = None;
        channel.rewind_cursor();
    }

    /// Handles a response with data.
    fn handle_data_response(&mut self, c: usize, packet: &Packet) {
        let psn = packet.psn;
        let channel = &self.qp.requester.channels[c];
        let Some(first) = channel
            .work
            .get(channel.find_wqe(psn))
            .map(|work| work.first)
        else {
            return;
        };
        if !self.handle_ack(c, first) {
            return;
        }
        let sequence = self.qp.requester.channels[c].sequence;
        if sequence.map(|sequence| sequence.acknowledged) != Some(psn) {
            return self.retransmit(c);
        }
        match self.store_response_data(c, packet) {
            Ok(()) => self.advance_ack(c, psn.plus(1)),
            Err(Stop::Failed(syndrome)) => self.fail_channel(c, syndrome),
            Err(Stop::Waiting) => self.qp.requester.channels[c].rewind_cursor(),
        }
    }

    /// Stores the data of a response to the first unfinished work request.
    fn store_response_data(&mut self, c: usize, packet: &Packet) -> Result<(), Stop> {
        const BAD: Stop = Stop::Failed(Syndrome::BadResponse);
        let mtu = self.qp.attributes.mtu;
        let channel = &mut self.qp.requester.channels[c];
        let first = channel.first_unfinished();
        let work = channel.work.get_mut(first).ok_or(BAD)?;
        let skip = packet.psn.since(work.first) as u32 * mtu;
        let mut operand = [0; 8];
        let data = match (&work.wqe.operation, packet.body) {
            (Operation::Read(_), PacketBody::ReadResponse) => {
                let expected = (work.length() - skip).min(mtu);
                if packet.payload.len() != expected as usize {
                    return Err(BAD);
                }
                &packet.payload[..]
            }
            (Operation::Atomic(atomic), PacketBody::AtomicResponse(found)) => {
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
        key_memory(self.device)
            .scatter(pd, number, &work.wqe.data.segments, u64::from(skip), data)
            .map_err(|fault| Stop::from_fault(self.device, number, fault))
    }
}

/// Returns the completion syndrome for a NAK.
fn nak_syndrome(nak: Nak) -> Syndrome {
    match nak {
        Nak::InvalidRequest => Syndrome::RemoteInvalidRequest,
        Nak::RemoteAccess | Nak::ConnectionKey => Syndrome::RemoteAccess,
        Nak::RemoteOperation | Nak::Sequence => Syndrome::RemoteOperation,
    }
}

/// Returns the delay of an RNR timer code.
fn rnr_delay(code: u8) -> Duration {
    // In units of 10 µs, by the InfiniBand specification.
    const DELAYS: [u64; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024,
        1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    Duration::from_micros(10 * DELAYS[usize::from(code % 32)])
}
