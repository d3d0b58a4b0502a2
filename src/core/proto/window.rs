// SPDX-License-Identifier: GPL-2.0

//! Credit-based flow control between two virtual queue pairs.
//!
//! # Operation
//!
//! The receiver buffers up to [`RECV_WINDOW_MESSAGES`] messages that its process has not consumed. The
//! receiver advertises a credit limit: all messages with lower sequence numbers have a buffer. The sender
//! sends no message beyond the limit. Hence a slow process does not block the receive buffers that all VQPs
//! share.
//!
//! # Recovery
//!
//! Advertised values never decrease, so a duplicate or late window update has no effect.

use crate::wire::packet::{VqpPhase, WindowUpdate, RECV_WINDOW_MESSAGES};

/// Maximum number of messages in one batch. The receiver advertises credits when fewer than this number
/// remain.
pub const MAX_BURST_MESSAGES: u64 = RECV_WINDOW_MESSAGES / 2;

/// Send side of the flow control of a VQP.
#[derive(Debug)]
pub struct SendWindow {
    next_sequence: u64,
    credit_limit: u64,
    consumed: u64,
    is_peer_open: bool,
}

impl SendWindow {
    /// Creates the state before the first message. `open` is `true` if the peer VQP is known to belong to a
    /// process.
    #[must_use]
    pub const fn new(open: bool) -> Self {
        Self {
            next_sequence: 0,
            credit_limit: RECV_WINDOW_MESSAGES,
            consumed: 0,
            is_peer_open: open,
        }
    }

    /// Allocates the sequence number of the next message.
    pub fn allocate_sequence(&mut self) -> u64 {
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        sequence
    }

    /// Returns `true` if a sequence number was allocated.
    #[must_use]
    pub const fn has_sent(&self) -> bool {
        self.next_sequence != 0
    }

    /// Returns `true` if the receiver has a buffer for the message.
    #[must_use]
    pub const fn can_send(&self, sequence: u64) -> bool {
        sequence < self.credit_limit
    }

    /// Returns `true` if a delivered message needs nothing more from the sender.
    ///
    /// The sender must keep the payload of a remote message (`is_remote`) until the receiver has consumed it.
    #[must_use]
    pub const fn is_acknowledged(&self, sequence: u64, is_remote: bool) -> bool {
        sequence < self.consumed || self.is_peer_open && !is_remote
    }

    /// Applies a window update of the receiver.
    pub fn on_window_update(&mut self, update: &WindowUpdate) {
        self.is_peer_open |= update.phase == VqpPhase::Open;
        self.credit_limit = self.credit_limit.max(update.credit_limit);
        self.consumed = self.consumed.max(update.consumed);
    }
}

/// Result of the sequence check of a received message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SequenceCheck {
    /// The next message in order: keep it.
    InOrder,
    /// A message that was received before. The sender may have missed the window updates since.
    Duplicate,
    /// Protocol violation by the sender: the message is out of order or has no buffer. Drop it.
    OutOfWindow,
}

/// Receive side of the flow control of a VQP.
#[derive(Debug)]
pub struct RecvWindow {
    received: u64,
    consumed: u64,
    advertised_limit: u64,
}

impl Default for RecvWindow {
    fn default() -> Self {
        Self {
            received: 0,
            consumed: 0,
            advertised_limit: RECV_WINDOW_MESSAGES,
        }
    }
}

impl RecvWindow {
    /// Checks the sequence number of a message that arrived, and counts the message if it is in order.
    pub fn receive(&mut self, sequence: u64) -> SequenceCheck {
        if sequence < self.received {
            return SequenceCheck::Duplicate;
        }
        if sequence > self.received || sequence >= self.credit_limit() {
            return SequenceCheck::OutOfWindow;
        }
        self.received += 1;
        SequenceCheck::InOrder
    }

    /// Records that a process has consumed the oldest buffered message.
    pub fn consume(&mut self) {
        self.consumed += 1;
        debug_assert!(self.consumed <= self.received, "nothing was kept");
    }

    const fn credit_limit(&self) -> u64 {
        self.consumed + RECV_WINDOW_MESSAGES
    }

    /// Returns `true` if an update is due: the limit has grown, and fewer than [`MAX_BURST_MESSAGES`] credits
    /// remain.
    #[must_use]
    pub const fn should_advertise(&self) -> bool {
        self.credit_limit() > self.advertised_limit
            && self.advertised_limit < self.received + MAX_BURST_MESSAGES
    }

    /// Returns the window update to send.
    #[must_use]
    pub const fn window_update(&self, phase: VqpPhase) -> WindowUpdate {
        WindowUpdate {
            phase,
            credit_limit: self.credit_limit(),
            consumed: self.consumed,
        }
    }

    /// Records that a window update was sent.
    pub fn on_advertised(&mut self, update: &WindowUpdate) {
        self.advertised_limit = self.advertised_limit.max(update.credit_limit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    #[test]
    fn message_is_acknowledged_when_peer_is_open_or_has_consumed_it() {
        let mut send_window = SendWindow::new(false);
        let sequence = send_window.allocate_sequence();
        assert!(!send_window.is_acknowledged(sequence, false));
        send_window.on_window_update(&RecvWindow::default().window_update(VqpPhase::Open));
        assert!(send_window.is_acknowledged(sequence, false));
        assert!(
            !send_window.is_acknowledged(sequence, true),
            "its bytes are needed"
        );
        let mut recv_window = RecvWindow::default();
        assert_eq!(recv_window.receive(sequence), SequenceCheck::InOrder);
        recv_window.consume();
        send_window.on_window_update(&recv_window.window_update(VqpPhase::Open));
        assert!(send_window.is_acknowledged(sequence, true));
    }

    #[test]
    fn duplicate_and_out_of_window_messages_are_detected() {
        let mut recv_window = RecvWindow::default();
        assert_eq!(recv_window.receive(1), SequenceCheck::OutOfWindow);
        assert_eq!(recv_window.receive(0), SequenceCheck::InOrder);
        assert_eq!(recv_window.receive(0), SequenceCheck::Duplicate);
        for sequence in 1..RECV_WINDOW_MESSAGES {
            assert_eq!(recv_window.receive(sequence), SequenceCheck::InOrder);
        }
        assert_eq!(
            recv_window.receive(RECV_WINDOW_MESSAGES),
            SequenceCheck::OutOfWindow,
            "no message was consumed"
        );
    }

    proptest! {
        /// For any order of steps and any batch size, all messages arrive in order. No message is buffered
        /// beyond the window, and neither side blocks forever.
        #[test]
        fn sender_and_receiver_never_deadlock(
            steps in prop::collection::vec(0u8..3, 1..400),
            burst in 1..=MAX_BURST_MESSAGES,
        ) {
            let (mut send_window, mut recv_window) = (SendWindow::new(true), RecvWindow::default());
            let allocate_burst = |out: &mut SendWindow| (0..burst).map(|_| out.allocate_sequence()).last().unwrap();
            let (mut in_flight, mut kept, mut last) = (VecDeque::new(), 0, allocate_burst(&mut send_window));
            let mut unadvertised = None;
            let fair_steps = [0, 1, 2].into_iter().cycle().take(3 * 2 * RECV_WINDOW_MESSAGES as usize);
            for step in steps.into_iter().chain(fair_steps) {
                match step {
                    0 if send_window.can_send(last) => {
                        in_flight.extend(last + 1 - burst..=last);
                        last = allocate_burst(&mut send_window);
                    }
                    1 => if let Some(number) = in_flight.pop_front() {
                        prop_assert_eq!(recv_window.receive(number), SequenceCheck::InOrder);
                        kept += 1;
                    },
                    2 if kept != 0 => {
                        recv_window.consume();
                        kept -= 1;
                        if recv_window.should_advertise() {
                            let state = recv_window.window_update(VqpPhase::Open);
                            send_window.on_window_update(&state);
                            unadvertised = Some(state);
                        }
                    }
                    _ => {}
                }
                // The sender may act on an update before the receiver records it as sent.
                if step == 1 {
                    if let Some(state) = unadvertised.take() {
                        recv_window.on_advertised(&state);
                    }
                }
                prop_assert!(kept <= RECV_WINDOW_MESSAGES);
                prop_assert!(send_window.can_send(last) || kept != 0 || !in_flight.is_empty(), "both wait");
            }
        }
    }
}
