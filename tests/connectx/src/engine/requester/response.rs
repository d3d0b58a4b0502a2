// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Responses of the peer: acknowledgements, NAKs, and the data of READs and atomic operations.

use std::time::Duration;

use super::{Requester, Stop};
use crate::engine::channel::Channel;
use crate::engine::reach;
use crate::engine::wqe::Operation;
use crate::network::packet::{Answer, Nak, Packet, PacketBody, Psn, Service};
use crate::object::cq::Syndrome;

/// RNR retry count that means unlimited retries.
const FOR_EVER: u8 = 7;

impl Requester<'_> {
    /// Handles a response of the peer.
    pub fn answered(&mut self, packet: &Packet) {
        let Some(c) = self.channel_of(packet) else {
            return;
        };
        match packet.body {
            PacketBody::ReadResponse | PacketBody::AtomicResponse(_) => self.receive(c, packet),
            PacketBody::Acknowledge(Answer::Ack) => {
                self.acknowledge(c, packet.psn.plus(1));
            }
            PacketBody::Acknowledge(answer) if self.acknowledge(c, packet.psn) => match answer {
                Answer::ReceiverNotReady(code) => self.wait(c, code),
                Answer::Nak(Nak::Sequence) => self.lost(c),
                Answer::Nak(nak) => self.fail_first(c, refused(nak)),
                Answer::Ack => {}
            },
            _ => {}
        }
    }

    /// Returns the channel of a response. Returns `None` if no channel has a request in flight for it.
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
        // Completion may have failed another channel and the queue pair.
        let channel = self.qp.requester.channels.get(c);
        missing.is_none() && channel.is_some_and(|channel| !channel.failed)
    }

    /// Records that all packets before `to` are acknowledged.
    fn progress(&mut self, c: usize, to: Psn) {
        let attributes = &self.qp.attributes;
        let channel = &mut self.qp.requester.channels[c];
        channel.progress(to);
        channel.retries = attributes.retry_count;
        channel.not_ready = attributes.rnr_retry;
        self.settle(c);
    }

    /// Resends after a loss, unless a resend is already in progress or an RNR delay runs.
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

    /// Handles a response with data.
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

    /// Stores the data of a response to the first unfinished work request.
    fn take_answer(&mut self, c: usize, packet: &Packet) -> Result<(), Stop> {
        const BAD: Stop = Stop::Failed(Syndrome::BadResponse);
        let mtu = self.qp.attributes.mtu;
        let channel = &mut self.qp.requester.channels[c];
        let first = channel.first();
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
        reach(self.device)
            .scatter(pd, number, &work.wqe.data.segments, u64::from(skip), data)
            .map_err(|fault| Stop::at(self.device, number, fault))
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

/// Returns the delay of an RNR timer code.
fn rnr_delay(code: u8) -> Duration {
    // In units of 10 µs, by the InfiniBand specification.
    const DELAYS: [u64; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024,
        1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    Duration::from_micros(10 * DELAYS[usize::from(code % 32)])
}
