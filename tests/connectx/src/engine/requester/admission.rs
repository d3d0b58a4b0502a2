// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Admission of work requests: takes WQEs from the ring in order, and starts each on a channel.

use super::{Requester, Stop};
use crate::engine::channel::{Channel, Sequence};
use crate::engine::wqe::{self, ControlSegment, Fence, Operation, SendWqe, BLOCK};
use crate::engine::{datagram, dc, umr};
use crate::network::packet::{Psn, Tail};
use crate::object::cq::Syndrome;
use crate::object::qp::{Qp, QpState, Transport};

impl Requester<'_> {
    /// Starts the next work request. Returns `false` if the ring is empty, or if the work request must wait.
    pub(super) fn begin_wqe(&mut self) -> bool {
        let state = &self.qp.requester;
        let has_channel = state.channels.len() < self.qp.attributes.streams.channels
            || state.channels.iter().any(Channel::can_begin);
        if !self.is_able() || !has_channel {
            return false;
        }
        let Some(wqe) = self.take_wqe() else {
            return false;
        };
        let Some(c) = self.select_channel(&wqe) else {
            self.qp.requester.stalled = Some(wqe);
            return false;
        };
        let sequence = self.start_sequence(c);
        let (packets, error) = match self.prepare_wqe(c, &wqe, sequence.end) {
            Ok(packets) => (packets, None),
            Err(Stop::Failed(syndrome)) => (0, Some(syndrome)),
            Err(Stop::Waiting) => {
                self.qp.requester.stalled = Some(wqe);
                return false;
            }
        };
        self.qp.requester.order.push_back(c);
        self.qp.requester.channels[c].push_wqe(wqe, sequence, packets, error);
        self.complete_or_fail(c);
        true
    }

    /// Returns the channel for a work request: the channel of its stream, a new channel, or an idle channel. Returns
    /// `None` if the work request must wait.
    fn select_channel(&mut self, wqe: &SendWqe) -> Option<usize> {
        let streams = self.qp.attributes.streams;
        let stream = if streams.any() { wqe.control.stream } else { 0 };
        let channels = &mut self.qp.requester.channels;
        let existing = channels.iter().position(|channel| channel.stream == stream);
        let c = match existing {
            Some(c) => c,
            None if channels.len() < streams.channels => {
                channels.push(Channel::new(stream));
                channels.len() - 1
            }
            None => channels
                .iter()
                .position(|channel| channel.work.is_empty())?,
        };
        channels[c].stream = stream;
        let failed = self.qp.requester.errors.contains(&stream);
        let channel = &mut self.qp.requester.channels[c];
        if channel.work.is_empty() && channel.failed != failed {
            *channel = Channel::new(stream);
            channel.failed = failed;
        }
        (channel.failed == failed && self.can_begin(c, wqe)).then_some(c)
    }

    fn start_sequence(&mut self, c: usize) -> Sequence {
        let attributes = &self.qp.attributes;
        let channel = &mut self.qp.requester.channels[c];
        if channel.sequence.is_none() {
            channel.retries = attributes.retry_count;
            channel.rnr_retries = attributes.rnr_retry;
        }
        let first = Psn::new(attributes.send_psn);
        *channel.sequence.get_or_insert(Sequence {
            acknowledged: first,
            cursor: first,
            sent: first,
            end: first,
        })
    }

    /// Takes the next work request: the stalled one, or the next WQE in the ring. A malformed WQE yields a placeholder.
    fn take_wqe(&mut self) -> Option<SendWqe> {
        if let Some(wqe) = self.qp.requester.stalled.take() {
            return Some(wqe);
        }
        if self.qp.state != QpState::Rts || !self.qp.requester.has_posted() {
            return None;
        }
        self.fetch_wqe().or_else(|| {
            let state = &mut self.qp.requester;
            let wqe = SendWqe::malformed(state.next);
            state.next = state.next.wrapping_add(1);
            Some(wqe)
        })
    }

    /// Reads and decodes the next WQE of the ring. Returns `None` if the WQE is malformed.
    fn fetch_wqe(&mut self) -> Option<SendWqe> {
        let next = self.qp.requester.next;
        let ring = self.qp.send.as_ref()?;
        let mut bytes = [0; wqe::MAX_BYTES];
        ring.read(&self.device.dma, next, &mut bytes[..BLOCK])
            .ok()?;
        let control = ControlSegment::decode(&bytes);
        if control.index != next || control.qpn != self.qp.number {
            return None;
        }
        let bytes = &mut bytes[..control.bytes()];
        if let Some(rest) = bytes.get_mut(BLOCK..).filter(|rest| !rest.is_empty()) {
            ring.read(&self.device.dma, next.wrapping_add(1), rest)
                .ok()?;
        }
        let wqe = wqe::decode(bytes, self.qp.transport).ok()?;
        self.qp.requester.next = next.wrapping_add(control.blocks());
        self.device.cost.count.wqes += 1;
        self.device.cost.count.wqe_bytes += bytes.len() as u64;
        Some(wqe)
    }

    /// Returns `true` if a work request may start before the earlier work requests of its channel have finished.
    fn can_begin(&self, c: usize, wqe: &SendWqe) -> bool {
        let channel = &self.qp.requester.channels[c];
        let fails = channel.work.back().is_some_and(|work| work.error.is_some());
        let is_read = matches!(wqe.operation, Operation::Read(_) | Operation::Atomic(_));
        let fence = match wqe.operation {
            // Retransmissions of earlier requests need the unchanged keys.
            Operation::Umr(_) => Fence::All,
            _ => wqe.control.fence,
        };
        if channel.failed {
            return true;
        }
        if fails
            || !channel.can_begin()
            || fence == Fence::All && !channel.is_idle()
            || fence == Fence::Reads && channel.reads > 0
            || is_read && channel.reads >= self.qp.attributes.max_reads
        {
            return false;
        }
        // A channel is connected to one DC target at a time.
        let connected = channel.connection.map(|(address, _)| address);
        self.qp.transport != Transport::Dci
            || wqe.address.is_none()
            || connected == wqe.address
            || channel.is_idle()
    }

    /// Checks a work request, connects its channel, and executes it if it needs no PSNs. Returns the number of its
    /// PSNs.
    fn prepare_wqe(&mut self, c: usize, wqe: &SendWqe, first: Psn) -> Result<u32, Stop> {
        if self.qp.requester.channels[c].failed {
            return Err(Stop::Failed(Syndrome::Flush));
        }
        check_wqe(self.qp, wqe).map_err(Stop::Failed)?;
        if let (Transport::Dci, Some(address)) = (self.qp.transport, wqe.address) {
            let channel = &mut self.qp.requester.channels[c];
            let connected = channel.connection.map(|(address, _)| address);
            if connected != Some(address) {
                let number = self.qp.number;
                let connection = dc::new_connection(self.device, number, c as u16, &address, first);
                channel.connection = Some((address, connection));
            }
        }
        match &wqe.operation {
            Operation::Malformed | Operation::Nop => Ok(0),
            Operation::Umr(bytes) => umr::execute(self.device, self.qp, bytes)
                .map(|()| 0)
                .map_err(Stop::Failed),
            _ if is_datagram(self.qp.transport) => {
                datagram::send_datagram(self.device, self.qp, wqe, self.outbox).map(|()| 0)
            }
            Operation::Atomic(_) => Ok(1),
            _ => {
                let packets = wqe
                    .data
                    .length()
                    .div_ceil(u64::from(self.qp.attributes.mtu));
                Ok(packets.max(1) as u32)
            }
        }
    }
}

/// Checks that the transport supports the operation, and that the length is valid.
fn check_wqe(qp: &Qp, wqe: &SendWqe) -> Result<(), Syndrome> {
    let transport = qp.transport;
    let allowed = match &wqe.operation {
        Operation::Malformed => false,
        Operation::Nop => true,
        Operation::Umr(_) => !is_datagram(transport),
        _ if transport == Transport::Umr => false,
        Operation::Send(Tail::Invalidate(_)) => {
            !is_datagram(transport) && transport != Transport::Uc
        }
        Operation::Send(_) => true,
        Operation::Write(..) => !is_datagram(transport),
        Operation::Read(_) | Operation::Atomic(_) => {
            !is_datagram(transport) && transport != Transport::Uc && wqe.data.inline.is_empty()
        }
    };
    let length = wqe.data.length();
    let fits = match &wqe.operation {
        Operation::Atomic(atomic) => length == u64::from(atomic.size),
        _ => length <= qp.attributes.max_message,
    };
    if !allowed {
        Err(Syndrome::LocalQpOperation)
    } else if !fits {
        Err(Syndrome::LocalLength)
    } else {
        Ok(())
    }
}

fn is_datagram(transport: Transport) -> bool {
    matches!(transport, Transport::Ud | Transport::Smi | Transport::Gsi)
}
