// SPDX-License-Identifier: GPL-2.0 OR MIT
//! A channel of a send queue: work requests that are carried out in order, by packets that are numbered.
//!
//! A send queue has one. A DC initiator may have several, each with a connection of its own: each carries
//! out one stream of work requests at a time, so that streams do not wait for each other's targets.
//!
//! Three sequence numbers separate the packets that the peer has acknowledged, those that are sent, and those that
//! wait to be sent, in this order.

use std::collections::VecDeque;
use std::time::Duration;

use super::wqe::{Address, Operation, SendWqe};
use super::BURST;
use crate::network::packet::{DcConnection, Psn};
use crate::object::cq::Syndrome;

/// Maximum number of packets in flight without an acknowledgement.
const WINDOW: i32 = 2 * BURST as i32;

/// State of a channel.
#[derive(Debug, Default)]
pub struct Channel {
    /// The stream.
    pub stream: u16,
    /// Work requests that have begun and were not completed, in order.
    pub work: VecDeque<ActiveWqe>,
    /// Number of READs and atomic operations among them.
    pub reads: u32,
    /// Sequence numbers, once the first work request began.
    pub sequence: Option<Sequence>,
    /// The dynamic connection in use.
    pub connection: Option<(Address, DcConnection)>,
    /// `true` if a work request has failed, so that those after it are flushed.
    pub failed: bool,
    /// `true` if packets were sent again since the last new acknowledgement.
    pub repeated: bool,
    /// Remaining retries after a timeout.
    pub retries: u8,
    /// Remaining retries after an RNR NAK.
    pub not_ready: u8,
    /// End of the delay after an RNR NAK, during which nothing is sent.
    pub resume: Option<Duration>,
    /// Time at which the wait for a response times out.
    pub deadline: Option<Duration>,
}

/// The sequence numbers of a channel. Each is at or after the one before it.
#[derive(Clone, Copy, Debug)]
pub struct Sequence {
    /// The first that is not acknowledged.
    pub acknowledged: Psn,
    /// The next to send: at most `sent`, if some are sent again.
    pub cursor: Psn,
    /// The first that was never sent.
    pub sent: Psn,
    /// The first that belongs to no work request.
    pub end: Psn,
}

/// A work request that has begun.
#[derive(Debug)]
pub struct ActiveWqe {
    /// Work request.
    pub wqe: SendWqe,
    /// Its first sequence number.
    pub first: Psn,
    /// Number of sequence numbers. Work that is done without packets has none.
    pub packets: u32,
    /// Why it cannot go on. It ends so as soon as those before it have ended.
    pub error: Option<Syndrome>,
    /// An answer that goes into the completion.
    pub inline: Vec<u8>,
}

impl Sequence {
    /// Returns `true` if another packet may be in flight.
    fn has_room(&self) -> bool {
        self.cursor.since(self.acknowledged) < WINDOW
    }
}

impl ActiveWqe {
    /// The sequence number after its last.
    pub fn end(&self) -> Psn {
        self.first.plus(self.packets)
    }

    /// Bytes of its data.
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
    /// A channel for a stream.
    pub fn new(stream: u16) -> Self {
        Channel {
            stream,
            ..Channel::default()
        }
    }

    /// Returns `true` if nothing waits to be sent, so that another work request may begin, if only to be flushed.
    pub fn is_clear(&self) -> bool {
        let is_sent = |sequence: Sequence| sequence.cursor == sequence.end && sequence.has_room();
        self.failed || !self.is_held() && self.sequence.is_none_or(is_sent)
    }

    /// Returns `true` if nothing may be sent: the channel has failed, or the peer was not ready.
    fn is_held(&self) -> bool {
        self.failed || self.resume.is_some()
    }

    /// The sequence numbers, if there is a packet that may be sent.
    pub fn to_send(&self) -> Option<Sequence> {
        let sequence = self.sequence.filter(|_| !self.is_held())?;
        (sequence.cursor != sequence.end && sequence.has_room()).then_some(sequence)
    }

    /// Takes a work request, whose packets are the next.
    pub fn push(
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

    /// The index of the work request that a packet belongs to.
    pub fn find(&self, psn: Psn) -> usize {
        self.work.partition_point(|work| work.end().since(psn) <= 0)
    }

    /// Returns `true` if a work request is done.
    pub fn is_done(&self, work: &ActiveWqe) -> bool {
        let acknowledged = self.sequence.map(|sequence| sequence.acknowledged);
        work.error.is_none() && acknowledged.is_some_and(|psn| work.end().since(psn) <= 0)
    }

    /// The index of the first work request that is not done: others after it may be, if it failed when it was
    /// to be sent again.
    pub fn first(&self) -> usize {
        let undone = self.work.iter().position(|work| !self.is_done(work));
        undone.unwrap_or(self.work.len())
    }

    /// Returns `true` if all work requests are done. Some of them may not be completed yet.
    pub fn is_idle(&self) -> bool {
        self.first() == self.work.len()
    }

    /// Returns `true` if an acknowledgement of all before `upto` covers a packet that was not acknowledged before.
    pub fn is_new(&self, upto: Psn) -> bool {
        self.sequence
            .is_some_and(|sequence| upto.since(sequence.acknowledged) > 0)
    }

    /// The first answer with data that is missing although the peer has done all before `upto`.
    pub fn missing(&self, upto: Psn) -> Option<Psn> {
        if self.reads == 0 || !self.is_new(upto) {
            return None;
        }
        let mut undone = self.work.iter().skip(self.first());
        let read = undone.find(|work| work.is_read())?;
        (read.first.since(upto) < 0).then_some(read.first)
    }

    /// All before `to` is done.
    pub fn progress(&mut self, to: Psn) {
        if let Some(sequence) = &mut self.sequence {
            sequence.acknowledged = to;
            if sequence.cursor.since(to) < 0 {
                sequence.cursor = to;
            }
        }
        self.repeated = false;
        self.resume = None;
        self.deadline = None;
    }

    /// Sends all packets again that are not acknowledged.
    pub fn rewind(&mut self) {
        self.repeated = true;
        if let Some(sequence) = &mut self.sequence {
            sequence.cursor = sequence.acknowledged;
        }
    }

    /// The first work request that is not done fails, and all after it are flushed.
    pub fn fail(&mut self, syndrome: Syndrome) {
        let first = self.first();
        self.failed = true;
        self.resume = None;
        self.deadline = None;
        for (index, work) in self.work.iter_mut().enumerate().skip(first) {
            let is_first = index == first;
            work.error = Some(if is_first { syndrome } else { Syndrome::Flush });
        }
    }
}
