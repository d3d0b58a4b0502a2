// SPDX-License-Identifier: GPL-2.0

//! Receive queue of a VQP, and the packets that change it.
//!
//! # Operation
//!
//! [`deliver`] dispatches the packets of the peer endpoint. A message is queued until a process takes it
//! ([`pop`]). An update of the peer endpoint opens the send window ([`window_update`]).
//!
//! # Recovery
//!
//! A message without memory, or outside the receive window, closes the VQP: all later messages would be lost.
//!
//! # Locking
//!
//! All fields of [`RecvQueue`] are under `Vqp::state`.

pub(crate) mod deliver;
pub(crate) mod pop;
pub(crate) mod window_update;

use super::Vqp;
use crate::{
    errno::{self, TryError, TryResult},
    fabric::Fabric,
    sys::memcg,
};
use kernel::{alloc::Flags, prelude::*};
use kite_core::{
    proto::window::{RecvWindow, SequenceCheck},
    wire::packet::{
        Payload, VqpMessage, VqpPhase, WindowUpdate, MAX_INLINE_PAYLOAD_BYTES,
        MAX_RC_INLINE_PAYLOAD_BYTES, PACKET_HEADER_SIZE, RECV_WINDOW_MESSAGES,
    },
};

const _: () = {
    assert!(crate::bindings::KITE_RECV_CREDITS as u64 == RECV_WINDOW_MESSAGES);
    assert!(crate::bindings::KITE_SEND_MAX as usize == MAX_INLINE_PAYLOAD_BYTES);
    assert!(MAX_RC_INLINE_PAYLOAD_BYTES == 956);
};

/// Received message.
struct QueuedMsg {
    message: VqpMessage,
    /// Inline payload, empty if the message has none.
    bytes: KVec<u8>,
}

/// Messages that no process has taken.
pub(super) struct RecvQueue {
    pub(super) recv_window: RecvWindow,
    messages: KVec<QueuedMsg>,
    /// Set while a process takes the first message.
    popping: bool,
}

impl RecvQueue {
    /// Creates an empty queue with room for a full receive window.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory.
    pub(super) fn new(gfp: Flags) -> Result<Self> {
        Ok(Self {
            recv_window: RecvWindow::default(),
            messages: KVec::with_capacity(RECV_WINDOW_MESSAGES as usize, gfp)?,
            popping: false,
        })
    }

    /// Returns `true` if no message can be taken now.
    pub(super) fn is_empty(&self) -> bool {
        self.popping || self.messages.is_empty()
    }

    /// Returns `true` while a process takes the first message.
    pub(super) fn is_popping(&self) -> bool {
        self.popping
    }

    /// Takes the first message, for a process with a buffer of `max_len` bytes. The caller must clear
    /// `popping`.
    ///
    /// # Errors
    ///
    /// - [`TryError::WouldBlock`]: there is no message.
    /// - `EMSGSIZE`: the message is longer than the buffer.
    fn start_pop(&mut self, max_len: u32) -> TryResult<QueuedMsg> {
        let first = self.messages.first().ok_or(TryError::WouldBlock)?;
        let is_written = matches!(first.message.payload, Payload::Placed { .. });
        if !is_written && first.message.payload.len() > max_len {
            return Err(errno::msgsize().into());
        }
        self.popping = true;
        self.messages.remove(0).map_err(|_| TryError::WouldBlock)
    }

    /// Drops all messages that no process will take.
    pub(super) fn clear(&mut self) {
        self.messages.clear();
    }
}

impl Vqp {
    /// Queues a received message. Returns `true` if the sender must receive an update.
    pub(super) fn on_message(&self, message: VqpMessage, packet_bytes: &[u8]) -> bool {
        let bytes = packet_bytes.get(PACKET_HEADER_SIZE..).unwrap_or_default();
        let mut payload = KVec::new();
        let charged = self
            .memcg
            // The poller must not wait for a cgroup that has reached its limit.
            .with_active(|| payload.extend_from_slice(bytes, memcg::gfp_atomic_account()));
        let mut state = self.state.lock();
        if state.closed_with.is_some() {
            return true;
        }
        match state.recv_queue.recv_window.receive(message.sequence) {
            // Without memory the message is lost, and with it all later messages. Close the VQP.
            SequenceCheck::InOrder if charged.is_err() => {
                state.closed_with = Some(errno::connreset())
            }
            SequenceCheck::InOrder => {
                let queued_msg = QueuedMsg {
                    message,
                    bytes: payload,
                };
                // The queue has room for a full receive window, so this does not allocate.
                let _ = state.recv_queue.messages.push(queued_msg, GFP_ATOMIC);
            }
            // An endpoint that is not accepted sends no update yet.
            SequenceCheck::Duplicate => return state.accepted,
            SequenceCheck::OutOfWindow => state.closed_with = Some(errno::connreset()),
        }
        let is_closed = state.closed_with.is_some();
        state.deliver_completions();
        drop(state);
        self.wake_waiters();
        is_closed
    }

    /// Applies an update of the peer endpoint, whose number is `peer_vqpn`.
    pub(super) fn on_window_update(&self, peer_vqpn: u64, update: &WindowUpdate, fabric: &Fabric) {
        let mut state = self.state.lock();
        state.send_window.on_window_update(update);
        match update.phase {
            VqpPhase::Open => state.ids.peer_vqpn = peer_vqpn,
            VqpPhase::Refused => state.on_peer_closed(errno::connrefused()),
            VqpPhase::Denied => state.on_peer_closed(EACCES),
            VqpPhase::Closed => state.on_peer_closed(errno::connreset()),
        }
        self.make_progress_and_kick(fabric, &mut state);
        drop(state);
        self.wake_waiters();
    }
}
