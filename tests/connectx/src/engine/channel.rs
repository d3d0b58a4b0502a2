// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Channel of a send queue: executes work requests in order, with one sequence of PSNs.
//!
//! A send queue has one channel. A DC initiator may have several channels, each with its own connection. A channel
//! executes one stream of work requests at a time, so that a stream does not wait for the target of another stream.
//!
//! [`Sequence`] divides the packets into acknowledged, sent, and unsent packets.

use std::collections::VecDeque;
use std::time::Duration;

use super::wqe::{Address, Operation, SendWqe};
use super::BURST;
use crate::network::packet::{DcConnection, Psn};
use crate::object::cq::Syndrome;

/// Maximum number of packets in flight without an acknowledgement.
const WINDOW: i32 = 2 * BURST as i32;

/// Channel of a send queue.
#[derive(Debug, Default)]
pub struct Channel {
    /// Stream of the work requests.
    pub stream: u16,
    /// Started work requests without a completion, in order.
    pub work: VecDeque<ActiveWqe>,
    /// Number of READs and atomic operations in `work`.
    pub reads: u32,
    /// PSNs; `None` before the first work request.
    pub sequence: Option<Sequence>,
    /// Current dynamic connection, and the address of its target.
    pub connection: Option<(Address, DcConnection)>,
    /// `true` if a work request has failed. Later work requests are flushed.
    pub failed: bool,
    /// `true` if packets were retransmitted since the last new acknowledgement.
    pub is_retransmitting: bool,
    /// Remaining retries after a timeout.
    pub retries: u8,
    /// Remaining retries after an RNR NAK.
    pub rnr_retries: u8,
    /// End of the delay after an RNR NAK, during which the channel sends no packets.
    pub rnr_deadline: Option<Duration>,
    /// Time at which the wait for a response times out.
    pub ack_deadline: Option<Duration>,
}

/// PSNs of a channel.
///
/// # Invariants
///
/// `acknowledged` ≤ `cursor` ≤ `sent` ≤ `end`.
#[derive(Clone, Copy, Debug)]
pub struct Sequence {
    /// First unacknowledged PSN.
    pub acknowledged: Psn,
    /// Next PSN to send; less than `sent` during a retransmission.
    pub cursor: Psn,
    /// First PSN that was never sent.
    pub sent: Psn,
    /// First PSN after the last work request.
    pub end: Psn,
}

/// Started work request.
#[derive(Debug)]
pub struct ActiveWqe {
    /// Work request.
    pub wqe: SendWqe,
    /// First PSN.
    pub first: Psn,
    /// Number of PSNs; 0 for a work request without packets.
    pub packets: u32,
    /// Syndrome of a failed work request. It is reported after the completion of all earlier work requests.
    pub error: Option<Syndrome>,
    /// Response data that is placed in the CQE.
    pub inline: Vec<u8>,
}

impl Sequence {
    /// Returns `true` if the window allows another packet in flight.
    fn has_room(&self) -> bool {
        self.cursor.since(self.acknowledged) < WINDOW
    }
}

impl ActiveWqe {
    /// Returns the PSN after the last PSN of the work request.
    pub fn end(&self) -> Psn {
        self.first.plus(self.packets)
    }

    /// Returns the length of the data in bytes.
    pub fn length(&self) -> u32 {
        self.wqe.data.length() as u32
    }

    /// Returns `true` if the response has data, so that an acknowledgement does not complete the work request.
    pub fn is_read(&self) -> bool {
        matches!(
            self.wqe.operation,
            Operation::Read(_) | Operation::Atomic(_)
        )
    }
}

impl Channel {
    /// Returns an idle channel for a stream.
    pub fn new(stream: u16) -> Self {
        Channel {
            stream,
            ..Channel::default()
        }
    }

    /// Returns `true` if another work request may start: the channel has no unsent packets, or it has failed and
    /// flushes work requests.
    pub fn can_begin(&self) -> bool {
        let is_sent = |sequence: Sequence| sequence.cursor == sequence.end && sequence.has_room();
        self.failed || !self.is_paused() && self.sequence.is_none_or(is_sent)
    }

    /// Returns `true` if no packet may be sent: the channel has failed, or an RNR delay runs.
    fn is_paused(&self) -> bool {
        self.failed || self.rnr_deadline.is_some()
    }

    /// Returns the PSNs if a packet may be sent.
    pub fn sendable(&self) -> Option<Sequence> {
        let sequence = self.sequence.filter(|_| !self.is_paused())?;
        (sequence.cursor != sequence.end && sequence.has_room()).then_some(sequence)
    }

    /// Appends a work request, which gets the next `packets` PSNs.
    pub fn push_wqe(
        &mut self,
        wqe: SendWqe,
        sequence: Sequence,
        packets: u32,
        error: Option<Syndrome>,
    ) {
        let work = ActiveWqe {
            wqe,
            first: sequence.end,
            packets,
            error,
            inline: Vec::new(),
        };
        self.reads += u32::from(work.is_read());
        self.work.push_back(work);
        self.sequence = Some(Sequence {
            end: sequence.end.plus(packets),
            ..sequence
        });
    }

    /// Returns the index of the work request of a PSN.
    pub fn find_wqe(&self, psn: Psn) -> usize {
        self.work.partition_point(|work| work.end().since(psn) <= 0)
    }

    /// Returns `true` if all packets of a work request are acknowledged.
    pub fn is_done(&self, work: &ActiveWqe) -> bool {
        let acknowledged = self.sequence.map(|sequence| sequence.acknowledged);
        work.error.is_none() && acknowledged.is_some_and(|psn| work.end().since(psn) <= 0)
    }

    /// Returns the index of the first unfinished work request. Later work requests may be finished if its
    /// retransmission has failed.
    pub fn first_unfinished(&self) -> usize {
        let unfinished = self.work.iter().position(|work| !self.is_done(work));
        unfinished.unwrap_or(self.work.len())
    }

    /// Returns `true` if all work requests are finished. Their completions may be pending.
    pub fn is_idle(&self) -> bool {
        self.first_unfinished() == self.work.len()
    }

    /// Returns `true` if an acknowledgement of all PSNs before `upto` covers an unacknowledged packet.
    pub fn is_new_ack(&self, upto: Psn) -> bool {
        self.sequence
            .is_some_and(|sequence| upto.since(sequence.acknowledged) > 0)
    }

    /// Returns the PSN of the first lost response with data: the peer has executed all requests before `upto`, and the
    /// response has not arrived.
    pub fn lost_response(&self, upto: Psn) -> Option<Psn> {
        if self.reads == 0 || !self.is_new_ack(upto) {
            return None;
        }
        let mut unfinished = self.work.iter().skip(self.first_unfinished());
        let read = unfinished.find(|work| work.is_read())?;
        (read.first.since(upto) < 0).then_some(read.first)
    }

    /// Records that all PSNs before `to` are acknowledged.
    pub fn advance_ack(&mut self, to: Psn) {
        if let Some(sequence) = &mut self.sequence {
            sequence.acknowledged = to;
            if sequence.cursor.since(to) < 0 {
                sequence.cursor = to;
            }
        }
        self.is_retransmitting = false;
        self.rnr_deadline = None;
        self.ack_deadline = None;
    }

    /// Moves the cursor back to the first unacknowledged packet.
    pub fn rewind_cursor(&mut self) {
        self.is_retransmitting = true;
        if let Some(sequence) = &mut self.sequence {
            sequence.cursor = sequence.acknowledged;
        }
    }

    /// Fails the first unfinished work request, and flushes all later ones.
    pub fn fail(&mut self, syndrome: Syndrome) {
        let first = self.first_unfinished();
        self.failed = true;
        self.rnr_deadline = None;
        self.ack_deadline = None;
        for (index, work) in self.work.iter_mut().enumerate().skip(first) {
            let is_first = index == first;
            work.error = Some(if is_first { syndrome } else { Syndrome::Flush });
        }
    }
}
