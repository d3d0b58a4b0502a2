// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The sending side of a queue pair: takes work requests from the send queue and completes them in order.
//!
//! A [`Channel`] carries out the work requests that have begun. If a packet is lost, sending begins again at the first
//! packet that is not acknowledged. Each packet is then built again from guest memory, and a READ requests only the
//! rest.
//!
//! With streams, which a DC initiator may have, a failure is of one stream: what else is posted to it is
//! flushed, until the driver resets it. The queue pair fails when too many streams have.

mod admission;
mod completion;
mod response;
mod transmission;

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use super::channel::{Channel, Work};
use super::wqe::Wqe;
use super::{page_fault, BURST};
use crate::device::Device;
use crate::network::Outbox;
use crate::object::cq::Syndrome;
use crate::object::eq::{Event, QpEvent};
use crate::object::mkey::Fault;
use crate::object::qp::{self, Qp};

pub(super) use completion::flush;
pub(super) use transmission::gather;

/// State of a send queue.
#[derive(Debug, Default)]
pub struct State {
    /// The block after the last work request that was taken.
    next: u16,
    /// The last work request that is posted.
    posted: Option<u16>,
    /// A work request that was taken, and waits until it may begin.
    stalled: Option<Wqe>,
    /// Channels that carry out work requests: more than one only with streams.
    channels: Vec<Channel>,
    /// The channels of the work requests that have begun and were not completed, in order.
    order: VecDeque<usize>,
    /// Streams that have failed.
    errors: BTreeSet<u16>,
    /// In the error state when to look for work requests.
    watch: Option<Duration>,
    /// When the engine will call.
    alarm: Option<Duration>,
    /// After which time work requests are looked for again, in the error state.
    interval: Duration,
}

/// Why a work request does not go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// It has failed.
    Failed(Syndrome),
    /// Memory is absent, and asked for: nothing was done.
    Waiting,
}

impl Stop {
    /// Returns the effect of a fault in local memory on a work request of the queue pair `number`.
    pub fn at(device: &mut Device, number: u32, fault: Fault) -> Stop {
        match page_fault::waits(device, number, fault) {
            true => Stop::Waiting,
            false => Stop::Failed(Syndrome::LocalProtection),
        }
    }
}

impl State {
    /// Learns of work requests up to the one at the index `counter`, in a ring of so many blocks.
    pub fn post(&mut self, counter: u16, blocks: u32) {
        if !self.knows(counter, blocks) {
            self.posted = Some(counter);
        }
    }

    /// Returns `true` if posted work requests up to the index `counter` are known already, in a ring of `blocks`
    /// blocks.
    pub fn knows(&self, counter: u16, blocks: u32) -> bool {
        let known = self.posted.unwrap_or(self.next.wrapping_sub(1));
        let ahead = counter.wrapping_sub(known);
        !(1..=blocks).contains(&u32::from(ahead))
    }

    /// The engine calls at `time`. Returns whether it is expected.
    pub fn alarm(&mut self, time: Duration) -> bool {
        let expected = self.alarm == Some(time);
        if expected {
            self.alarm = None;
        }
        expected
    }

    /// When the engine will call.
    pub fn alarm_time(&self) -> Option<Duration> {
        self.alarm
    }

    /// When the engine is to call, if it does not know yet, or thinks that it is later.
    pub fn set_alarm(&mut self) -> Option<Duration> {
        let channels = self.channels.iter();
        let due = channels.flat_map(|channel| [channel.resume, channel.deadline]);
        let due = due.chain([self.watch]).flatten().min()?;
        if self.alarm.is_some_and(|alarm| alarm <= due) {
            return None;
        }
        self.alarm = Some(due);
        self.alarm
    }

    /// In the error state: looks for work requests again, in intervals from the first to the second.
    pub fn watch(&mut self, now: Duration, (first, last): (Duration, Duration)) {
        self.interval = (self.interval * 2).clamp(first, last);
        self.watch = Some(now + self.interval);
    }

    /// The sequence number of the first packet of the next work request, once there was one.
    pub fn next_psn(&self) -> Option<u32> {
        let sequence = self.channels.first()?.sequence;
        sequence.map(|sequence| sequence.end.get())
    }

    /// Lets a stream that has failed go on. Returns `None` if it has not failed.
    pub fn reset_stream(&mut self, stream: u16) -> Option<()> {
        self.errors.remove(&stream).then_some(())
    }

    /// Takes the next work request to complete, if it has ended.
    fn take_ended(&mut self) -> Option<Work> {
        let channel = self.channels.get_mut(*self.order.front()?)?;
        let work = channel.work.front()?;
        let has_failed = channel.failed && work.error.is_some();
        if !has_failed && !channel.is_done(work) {
            return None;
        }
        channel.reads -= u32::from(work.is_read());
        self.order.pop_front();
        channel.work.pop_front()
    }

    /// Returns `true` if there are posted work requests that were not taken.
    fn has_posted(&self) -> bool {
        let posted = self.posted.map(|posted| posted.wrapping_sub(self.next));
        posted.is_some_and(|ahead| ahead as i16 >= 0)
    }
}

/// A send queue at work.
#[derive(Debug)]
pub struct Requester<'a> {
    device: &'a mut Device,
    qp: &'a mut Qp,
    outbox: &'a mut Outbox,
}

impl<'a> Requester<'a> {
    /// The send queue of `qp`.
    pub fn new(device: &'a mut Device, qp: &'a mut Qp, outbox: &'a mut Outbox) -> Self {
        Requester { device, qp, outbox }
    }

    /// Sends what may be sent.
    pub fn proceed(&mut self) {
        let mut left = BURST;
        while left > 0 && self.step() {
            left -= 1;
        }
        if left == 0 {
            self.device.engine.wake(self.qp.number);
        }
        if self.qp.state == qp::State::Error {
            return;
        }
        self.check_drained();
        self.set_deadlines();
    }

    /// Time has passed.
    pub fn timeout(&mut self) {
        for c in 0..self.qp.requester.channels.len() {
            self.channel_timeout(c);
        }
    }

    fn channel_timeout(&mut self, c: usize) {
        let now = self.outbox.now;
        // Another channel may have failed, and the queue pair with it.
        let Some(channel) = self.qp.requester.channels.get_mut(c) else {
            return;
        };
        if channel.resume.is_some_and(|time| time <= now) {
            channel.resume = None;
        }
        if channel.deadline.is_some_and(|time| time <= now) {
            channel.deadline = None;
            let counters = self.qp.attributes.counters;
            self.device.count(counters, |count| count.timeouts += 1);
            match channel.retries.checked_sub(1) {
                Some(left) => {
                    channel.retries = left;
                    channel.rewind();
                }
                None => self.fail_first(c, Syndrome::TransportRetry),
            }
        }
    }

    /// Sends a packet or begins a work request. Returns whether there was one.
    fn step(&mut self) -> bool {
        (0..self.qp.requester.channels.len()).any(|c| self.transmit(c)) || self.begin()
    }

    /// Returns `true` if the queue may make progress: it is not in the error state, and waits for no page.
    fn is_able(&self) -> bool {
        self.qp.state != qp::State::Error && !page_fault::is_waiting(self.device, self.qp.number)
    }

    /// Raises an event when a send queue that the driver drains is drained.
    fn check_drained(&mut self) {
        let state = &self.qp.requester;
        let idle = state.order.is_empty() && state.stalled.is_none();
        if self.qp.state == qp::State::SqDraining && idle {
            self.qp.state = qp::State::SqDrained;
            let event = Event::Qp(QpEvent::SqDrained, self.qp.number);
            self.device.event(event);
        }
    }

    /// Sets the time for peers to answer, where they have to and none is set.
    fn set_deadlines(&mut self) {
        let code = self.qp.attributes.ack_timeout;
        for channel in &mut self.qp.requester.channels {
            let under_way = channel.sequence.is_some_and(|sequence| {
                !channel.failed && sequence.cursor.since(sequence.acknowledged) > 0
            });
            if !under_way || code == 0 {
                channel.deadline = None;
            } else if channel.deadline.is_none() {
                channel.deadline = Some(self.outbox.now + Duration::from_nanos(4096 << code));
            }
        }
    }
}
