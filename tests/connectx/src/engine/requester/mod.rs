// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Requester of a queue pair: executes the work requests of the send queue and completes them in order.
//!
//! # Operation
//!
//! A [`Channel`] executes started work requests. `admission` selects the channel of a work request,
//! `transmission` sends its packets, `response` handles the responses, and `completion` reports the result.
//!
//! # Recovery
//!
//! After a loss, transmission resumes at the first unacknowledged packet. Packets are rebuilt from guest memory. A
//! retried READ requests only the rest of its data.
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

pub(super) use completion::flush_send_queue;
pub(super) use transmission::gather_payload;

/// State of a send queue.
#[derive(Debug, Default)]
pub struct RequesterState {
    /// Index of the block after the last WQE taken from the ring.
    next: u16,
    /// Index of the last posted work request.
    posted: Option<u16>,
    /// Work request that is taken from the ring and cannot start yet.
    stalled: Option<SendWqe>,
    /// Channels that execute work requests. Only a queue pair with streams has several.
    channels: Vec<Channel>,
    /// Channel of each started work request without a completion, in order.
    order: VecDeque<usize>,
    /// Streams that have failed.
    errors: BTreeSet<u16>,
    /// In the error state: time of the next poll for work requests.
    next_poll: Option<Duration>,
    /// Time of the timer that the engine has for this queue pair.
    timer: Option<Duration>,
    /// In the error state: time between two polls for work requests.
    interval: Duration,
}

/// Reason for which a work request does not proceed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The work request has failed.
    Failed(Syndrome),
    /// A page is absent, and a page fault is raised. The work request had no effect.
    Waiting,
}

impl Stop {
    /// Returns the effect of a fault in local memory on a work request of the queue pair `number`.
    pub fn from_fault(device: &mut Device, number: u32, fault: MkeyFault) -> Stop {
        match page_fault::request_absent(device, number, fault) {
            true => Stop::Waiting,
            false => Stop::Failed(Syndrome::LocalProtection),
        }
    }
}

impl RequesterState {
    /// Records that work requests up to the index `counter` are posted, in a ring of `blocks` blocks.
    pub fn record_posted(&mut self, counter: u16, blocks: u32) {
        if !self.is_posted(counter, blocks) {
            self.posted = Some(counter);
        }
    }

    /// Returns `true` if work requests up to the index `counter` are already recorded as posted, in a ring of `blocks`
    /// blocks.
    pub fn is_posted(&self, counter: u16, blocks: u32) -> bool {
        let last_posted = self.posted.unwrap_or(self.next.wrapping_sub(1));
        let ahead = counter.wrapping_sub(last_posted);
        !(1..=blocks).contains(&u32::from(ahead))
    }

    /// Clears the timer if it is set to `time`. Returns `false` for a stale timer.
    pub fn expire_timer(&mut self, time: Duration) -> bool {
        let expected = self.timer == Some(time);
        if expected {
            self.timer = None;
        }
        expected
    }

    /// Returns the time of the timer that the engine has for this queue pair.
    pub fn timer(&self) -> Option<Duration> {
        self.timer
    }

    /// Sets the timer to the earliest deadline. Returns the new time, or `None` if the timer is unchanged.
    pub fn update_timer(&mut self) -> Option<Duration> {
        let channels = self.channels.iter();
        let due = channels.flat_map(|channel| [channel.rnr_deadline, channel.ack_deadline]);
        let due = due.chain([self.next_poll]).flatten().min()?;
        if self.timer.is_some_and(|timer| timer <= due) {
            return None;
        }
        self.timer = Some(due);
        self.timer
    }

    /// In the error state: schedules the next poll for work requests. The interval doubles from `first` to `last`.
    pub fn schedule_poll(&mut self, now: Duration, (first, last): (Duration, Duration)) {
        self.interval = (self.interval * 2).clamp(first, last);
        self.next_poll = Some(now + self.interval);
    }

    /// Returns the first PSN of the next work request. Returns `None` before the first work request.
    pub fn next_psn(&self) -> Option<u32> {
        let sequence = self.channels.first()?.sequence;
        sequence.map(|sequence| sequence.end.get())
    }

    /// Resets a failed stream. Returns `None` if the stream has not failed.
    pub fn reset_stream(&mut self, stream: u16) -> Option<()> {
        self.errors.remove(&stream).then_some(())
    }

    /// Takes the next work request to complete, if it has finished or failed.
    fn take_finished(&mut self) -> Option<ActiveWqe> {
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

    /// Sends packets and starts work requests, up to `BURST` in total.
    pub fn run(&mut self) {
        let mut left = BURST;
        while left > 0 && self.send_or_begin() {
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
    pub fn handle_timeouts(&mut self) {
        for c in 0..self.qp.requester.channels.len() {
            self.handle_channel_timeout(c);
        }
    }

    fn handle_channel_timeout(&mut self, c: usize) {
        let now = self.outbox.now;
        // A failure of another channel may have failed the queue pair, which removes all channels.
        let Some(channel) = self.qp.requester.channels.get_mut(c) else {
            return;
        };
        if channel.rnr_deadline.is_some_and(|time| time <= now) {
            channel.rnr_deadline = None;
        }
        if channel.ack_deadline.is_some_and(|time| time <= now) {
            channel.ack_deadline = None;
            let counters = self.qp.attributes.counters;
            self.device.count(counters, |count| count.timeouts += 1);
            match channel.retries.checked_sub(1) {
                Some(left) => {
                    channel.retries = left;
                    channel.rewind_cursor();
                }
                None => self.fail_channel(c, Syndrome::TransportRetry),
            }
        }
    }

    /// Sends a packet or starts a work request. Returns `false` if neither is possible.
    fn send_or_begin(&mut self) -> bool {
        (0..self.qp.requester.channels.len()).any(|c| self.send_next_packet(c)) || self.begin_wqe()
    }

    /// Returns `true` if the queue pair is not in the error state and has no page request in flight.
    fn is_able(&self) -> bool {
        self.qp.state != QpState::Error && !page_fault::is_waiting(self.device, self.qp.number)
    }

    /// Completes the drain of an idle send queue, and raises the event.
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
            let in_flight = channel.sequence.is_some_and(|sequence| {
                !channel.failed && sequence.cursor.since(sequence.acknowledged) > 0
            });
            if !in_flight || code == 0 {
                channel.ack_deadline = None;
            } else if channel.ack_deadline.is_none() {
                channel.ack_deadline = Some(self.outbox.now + Duration::from_nanos(4096 << code));
            }
        }
    }
}
