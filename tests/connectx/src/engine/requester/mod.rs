// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Sending side of a queue pair, which takes work requests from the send queue and completes them in order.
//!
//! # Operation
//!
//! A [`Channel`] executes the work requests that have begun. `admission` selects the channel of a work request,
//! `transmission` sends its packets, `response` handles the responses, and `completion` reports the result.
//!
//! # Recovery
//!
//! After a lost packet, transmission resumes at the first unacknowledged packet. Each packet is built from guest memory
//! again, and a READ requests only the missing part.
//!
//! A DC initiator may have streams. A failure then affects one stream: its later work requests are flushed until the
//! driver resets the stream. The queue pair fails when too many streams have failed.

mod admission;
mod completion;
mod response;
mod transmission;

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use super::channel::{ActiveWqe, Channel};
use super::wqe::SendWqe;
use super::{page_fault, BURST};
use crate::device::Device;
use crate::network::Outbox;
use crate::object::cq::Syndrome;
use crate::object::eq::{Event, QpEvent};
use crate::object::mkey::MkeyFault;
use crate::object::qp::{Qp, QpState};

pub(super) use completion::flush;
pub(super) use transmission::gather;

/// State of a send queue.
#[derive(Debug, Default)]
pub struct RequesterState {
    /// The block after the last work request taken from the ring.
    next: u16,
    /// Index of the last posted work request.
    posted: Option<u16>,
    /// A work request that is taken from the ring and cannot begin yet.
    stalled: Option<SendWqe>,
    /// Channels that execute work requests. Only a queue pair with streams has several.
    channels: Vec<Channel>,
    /// Channels of the work requests that have begun and are not completed, in order.
    order: VecDeque<usize>,
    /// Streams that have failed.
    errors: BTreeSet<u16>,
    /// In the error state: time of the next poll for work requests.
    watch: Option<Duration>,
    /// Time of the timer that the engine has for this queue pair.
    alarm: Option<Duration>,
    /// In the error state: time between two polls for work requests.
    interval: Duration,
}

/// Reason for which a work request does not proceed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// It has failed.
    Failed(Syndrome),
    /// Memory is absent, and a page fault is raised. The request has had no effect.
    Waiting,
}

impl Stop {
    /// Returns the effect of a fault in local memory on a work request of the queue pair `number`.
    pub fn at(device: &mut Device, number: u32, fault: MkeyFault) -> Stop {
        match page_fault::waits(device, number, fault) {
            true => Stop::Waiting,
            false => Stop::Failed(Syndrome::LocalProtection),
        }
    }
}

impl RequesterState {
    /// Records that work requests up to the index `counter` are posted, in a ring of `blocks` blocks.
    pub fn post(&mut self, counter: u16, blocks: u32) {
        if !self.knows(counter, blocks) {
            self.posted = Some(counter);
        }
    }

    /// Returns `true` if work requests up to the index `counter` are already recorded as posted, in a ring of `blocks`
    /// blocks.
    pub fn knows(&self, counter: u16, blocks: u32) -> bool {
        let known = self.posted.unwrap_or(self.next.wrapping_sub(1));
        let ahead = counter.wrapping_sub(known);
        !(1..=blocks).contains(&u32::from(ahead))
    }

    /// Handles the alarm of `time`. Returns `true` if this alarm is set.
    pub fn alarm(&mut self, time: Duration) -> bool {
        let expected = self.alarm == Some(time);
        if expected {
            self.alarm = None;
        }
        expected
    }

    /// Returns the time of the timer that the engine has for this queue pair.
    pub fn alarm_time(&self) -> Option<Duration> {
        self.alarm
    }

    /// Sets the alarm to the earliest deadline. Returns the time if the alarm has changed.
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

    /// In the error state: schedules the next poll for work requests. The interval doubles from `first` to `last`.
    pub fn watch(&mut self, now: Duration, (first, last): (Duration, Duration)) {
        self.interval = (self.interval * 2).clamp(first, last);
        self.watch = Some(now + self.interval);
    }

    /// Returns the first sequence number of the next work request. Returns `None` before the first work request.
    pub fn next_psn(&self) -> Option<u32> {
        let sequence = self.channels.first()?.sequence;
        sequence.map(|sequence| sequence.end.get())
    }

    /// Resets a failed stream. Returns `None` if the stream has not failed.
    pub fn reset_stream(&mut self, stream: u16) -> Option<()> {
        self.errors.remove(&stream).then_some(())
    }

    /// Takes the next work request to complete, if it is done or has failed.
    fn take_ended(&mut self) -> Option<ActiveWqe> {
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

    /// Returns `true` if the ring has posted work requests.
    fn has_posted(&self) -> bool {
        let posted = self.posted.map(|posted| posted.wrapping_sub(self.next));
        posted.is_some_and(|ahead| ahead as i16 >= 0)
    }
}

/// Send queue of a queue pair, with the device and the network that it uses.
#[derive(Debug)]
pub struct Requester<'a> {
    device: &'a mut Device,
    qp: &'a mut Qp,
    outbox: &'a mut Outbox,
}

impl<'a> Requester<'a> {
    /// Returns the send queue of `qp`.
    pub fn new(device: &'a mut Device, qp: &'a mut Qp, outbox: &'a mut Outbox) -> Self {
        Requester { device, qp, outbox }
    }

    /// Sends packets and begins work requests, up to `BURST` steps.
    pub fn proceed(&mut self) {
        let mut left = BURST;
        while left > 0 && self.step() {
            left -= 1;
        }
        if left == 0 {
            self.device.engine.wake(self.qp.number);
        }
        if self.qp.state == QpState::Error {
            return;
        }
        self.check_drained();
        self.set_deadlines();
    }

    /// Handles the expired deadlines of all channels.
    pub fn timeout(&mut self) {
        for c in 0..self.qp.requester.channels.len() {
            self.channel_timeout(c);
        }
    }

    fn channel_timeout(&mut self, c: usize) {
        let now = self.outbox.now;
        // A failure of another channel may have failed the queue pair, which removes all channels.
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

    /// Sends a packet or begins a work request. Returns `false` if neither is possible.
    fn step(&mut self) -> bool {
        (0..self.qp.requester.channels.len()).any(|c| self.transmit(c)) || self.begin()
    }

    /// Returns `true` if the queue pair is not in the error state and waits for no page.
    fn is_able(&self) -> bool {
        self.qp.state != QpState::Error && !page_fault::is_waiting(self.device, self.qp.number)
    }

    /// Raises an event if the driver drains the send queue and the queue is idle.
    fn check_drained(&mut self) {
        let state = &self.qp.requester;
        let idle = state.order.is_empty() && state.stalled.is_none();
        if self.qp.state == QpState::SqDraining && idle {
            self.qp.state = QpState::SqDrained;
            let event = Event::Qp(QpEvent::SqDrained, self.qp.number);
            self.device.event(event);
        }
    }

    /// Sets the response deadline of each channel with packets in flight, if it is not set yet.
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
