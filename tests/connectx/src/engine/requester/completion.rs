// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Completion of work requests in order, and failure of channels.

use super::Requester;
use crate::device::Device;
use crate::engine::enter_error;
use crate::engine::wqe::{ControlSegment, BLOCK};
use crate::object::cq::{Completion, CqeKind, Syndrome};
use crate::object::qp::Qp;

impl Requester<'_> {
    /// Completes finished work requests. If the first unfinished work request of the channel has an error, fails the
    /// channel instead.
    pub(super) fn complete_or_fail(&mut self, c: usize) {
        let channel = &self.qp.requester.channels[c];
        let first = channel.work.get(channel.first_unfinished());
        match first.and_then(|work| work.error) {
            Some(syndrome) if !channel.failed => self.fail_channel(c, syndrome),
            _ => self.complete_finished(),
        }
    }

    /// Completes the finished work requests, in order, up to the first unfinished one.
    fn complete_finished(&mut self) {
        while let Some(work) = self.qp.requester.take_finished() {
            let control = work.wqe.control;
            if let Some(syndrome) = work.error {
                complete_in_error(self.device, self.qp, &control, syndrome);
            } else if control.signalled {
                let completion = Completion {
                    byte_count: work.length(),
                    inline: work.inline,
                    ..new_completion(self.qp, &control)
                };
                self.device.complete(self.qp.attributes.send_cq, completion);
            }
        }
    }

    /// Fails the first unfinished work request of a channel, and its stream. Also fails the queue pair if too many
    /// streams have failed, or if the error is not specific to a stream.
    pub(super) fn fail_channel(&mut self, c: usize, syndrome: Syndrome) {
        let state = &mut self.qp.requester;
        let channel = &mut state.channels[c];
        channel.fail(syndrome);
        state.errors.insert(channel.stream);
        let too_many = state.errors.len() >= self.qp.attributes.streams.errors;
        self.complete_finished();
        if too_many || syndrome == Syndrome::LocalQpOperation {
            enter_error(self.device, self.qp);
        }
    }
}

/// Completes all posted work requests as flushed, for a queue pair in the error state.
pub(in crate::engine) fn flush_send_queue(device: &mut Device, qp: &mut Qp) {
    let state = &mut qp.requester;
    let stalled = state.stalled.take().map(|wqe| (wqe.control, None));
    let mut channels = std::mem::take(&mut state.channels);
    let order = std::mem::take(&mut state.order).into_iter();
    let begun = order.filter_map(|c| {
        let work = channels[c].work.pop_front()?;
        let error = work.error.filter(|_| channels[c].failed);
        Some((work.wqe.control, error))
    });
    let begun: Vec<_> = begun.chain(stalled).collect();
    state.errors.clear();
    for (control, error) in begun {
        complete_in_error(device, qp, &control, error.unwrap_or(Syndrome::Flush));
    }
    while let Some(control) = take_control_segment(device, qp) {
        complete_in_error(device, qp, &control, Syndrome::Flush);
    }
}

/// Takes the control segment of the next work request from the ring.
fn take_control_segment(device: &Device, qp: &mut Qp) -> Option<ControlSegment> {
    let state = &mut qp.requester;
    let posted = state.posted.filter(|_| state.has_posted())?;
    let mut bytes = [0; BLOCK];
    let ring = qp.send.as_ref()?;
    let read = ring.read(&device.dma, state.next, &mut bytes);
    let control = ControlSegment::decode(&bytes);
    let next = state.next.wrapping_add(control.blocks());
    let sensible = read.is_ok() && control.index == state.next;
    state.next = if sensible {
        next
    } else {
        posted.wrapping_add(1)
    };
    sensible.then_some(control)
}

/// Returns the completion of a work request.
fn new_completion(qp: &Qp, control: &ControlSegment) -> Completion {
    Completion {
        kind: CqeKind::Request,
        qpn: qp.number,
        user_index: qp.attributes.user_index,
        opcode: control.opcode,
        wqe_counter: control.index,
        ..Completion::default()
    }
}

fn complete_in_error(device: &mut Device, qp: &Qp, control: &ControlSegment, syndrome: Syndrome) {
    let completion = Completion {
        kind: CqeKind::RequestError,
        syndrome,
        ..new_completion(qp, control)
    };
    device.complete(qp.attributes.send_cq, completion);
}
