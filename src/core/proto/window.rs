// SPDX-License-Identifier: GPL-2.0

//! How many messages may be under way between two virtual queue pairs.
//!
//! The receiver keeps up to [`RECV_WINDOW_MESSAGES`] messages that its process has not taken, and says up to which number it will
//! keep what comes. So nothing is ever sent for which there is no room, and nobody who is slow holds up the receive
//! buffers that all share. What an end says holds more each time, so it does no harm if it is said twice.

use crate::wire::packet::{VqpPhase, WindowUpdate, RECV_WINDOW_MESSAGES};

/// Messages that may be sent at once: whoever has sent all that it may is told more before.
pub const MAX_BURST_MESSAGES: u64 = RECV_WINDOW_MESSAGES / 2;

/// The messages that an end sends.
#[derive(Debug)]
pub struct SendWindow {
    next_sequence: u64,
    credit_limit: u64,
    consumed: u64,
    is_peer_open: bool,
}

impl SendWindow {
    /// None was sent. `open` says whether the other end is known to be a process's.
    #[must_use]
    pub const fn new(open: bool) -> Self {
        Self {
            next_sequence: 0,
            credit_limit: RECV_WINDOW_MESSAGES,
            consumed: 0,
            is_peer_open: open,
        }
    }

    /// A number for one more.
    pub fn allocate_sequence(&mut self) -> u64 {
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        sequence
    }

    /// Whether there was one.
    #[must_use]
    pub const fn has_sent(&self) -> bool {
        self.next_sequence != 0
    }

    /// Whether the receiver keeps it.
    #[must_use]
    pub const fn can_send(&self, sequence: u64) -> bool {
        sequence < self.credit_limit
    }

    /// Whether one that has arrived needs nothing more of the sender. Of one that is to be fetched the bytes are needed
    /// until it is taken.
    #[must_use]
    pub const fn is_acknowledged(&self, sequence: u64, is_remote: bool) -> bool {
        sequence < self.consumed || self.is_peer_open && !is_remote
    }

    /// The receiver says how it is, and is not over.
    pub fn on_window_update(&mut self, update: &WindowUpdate) {
        self.is_peer_open |= update.phase == VqpPhase::Open;
        self.credit_limit = self.credit_limit.max(update.credit_limit);
        self.consumed = self.consumed.max(update.consumed);
    }
}

/// What to do with a message that came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SequenceCheck {
    /// Keep it.
    InOrder,
    /// It was here before: the sender may not know what was told since.
    Duplicate,
    /// No sender does that: forget it.
    OutOfWindow,
}

/// The messages that an end receives.
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
    /// One has come.
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

    /// A process has taken the first that was kept.
    pub fn consume(&mut self) {
        self.consumed += 1;
        debug_assert!(self.consumed <= self.received, "nothing was kept");
    }

    const fn credit_limit(&self) -> u64 {
        self.consumed + RECV_WINDOW_MESSAGES
    }

    /// Whether the sender may soon have to wait for what it is to be told.
    #[must_use]
    pub const fn should_advertise(&self) -> bool {
        self.credit_limit() > self.advertised_limit
            && self.advertised_limit < self.received + MAX_BURST_MESSAGES
    }

    /// What the sender is to be told.
    #[must_use]
    pub const fn window_update(&self, phase: VqpPhase) -> WindowUpdate {
        WindowUpdate {
            phase,
            credit_limit: self.credit_limit(),
            consumed: self.consumed,
        }
    }

    /// The sender was told that.
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
            "nobody took any"
        );
    }

    proptest! {
        /// Whatever the order of things: all arrive, in order, none is kept beyond the window, and both go on,
        /// however many are sent at a time.
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
                // Who is told may be faster than who takes note of that.
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
