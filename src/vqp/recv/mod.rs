// SPDX-License-Identifier: GPL-2.0

//! Messages received by a VQP, and how a process receives them.
//!
//! # Operation
//!
//! Short messages are queued and copied. Long messages are fetched with one READ, directly into the buffer of
//! the process. Before the READ, the MR entry of the sender is validated, so a dead sender cannot cause an
//! error on the QP. After a message was taken, the receiver sends an update if the sender could otherwise
//! block.
//!
//! # Locking
//!
//! All fields of [`RecvQueue`] are under `Vqp::state`. The lock is not held during the READ.
//! Meanwhile `popping` reserves the first message.

pub(crate) mod deliver;
pub(crate) mod window_update;

use super::{send::mr_cache, table::VqpTable, Vqp};
use crate::{
    errno,
    fabric::mr::table::UserMr,
    sys::{
        deadline::{retry_until, Deadline},
        memcg,
    },
    verbs::work::{RemoteAddr, Sge},
};
use kernel::{alloc::Flags, prelude::*, sync::Arc};
use kite_core::{
    proto::window::{RecvWindow, SequenceCheck},
    rights::Rights,
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

    /// Drops all messages that no process will take.
    pub(super) fn clear(&mut self) {
        self.messages.clear();
    }
}

/// Destination of a message in a process.
pub(crate) struct RecvBuffer {
    pub(crate) mr: Arc<UserMr>,
    pub(crate) addr: u64,
    pub(crate) len: u32,
}

/// Message metadata for the receiving process.
#[derive(Clone, Copy)]
pub(crate) struct ReceivedMsg {
    pub(crate) len: u32,
    pub(crate) immediate: Option<u32>,
    /// Set if the sender wrote the data before, at an address of its choice.
    pub(crate) is_written: bool,
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
    pub(super) fn on_window_update(&self, peer_vqpn: u64, update: &WindowUpdate, table: &VqpTable) {
        let mut state = self.state.lock();
        state.send_window.on_window_update(update);
        match update.phase {
            VqpPhase::Open => state.ids.peer_vqpn = peer_vqpn,
            VqpPhase::Refused => state.on_peer_closed(errno::connrefused()),
            VqpPhase::Closed => state.on_peer_closed(errno::connreset()),
        }
        self.make_progress_and_kick(&table.lmr.cluster.fabric, &mut state);
        drop(state);
        self.wake_waiters();
    }

    /// Takes the first message.
    ///
    /// # Errors
    ///
    /// See `struct kite_pop_message` in `include/uapi/kite.h`.
    pub(crate) fn pop_message(
        self: &Arc<Self>,
        table: &Arc<VqpTable>,
        buffer: &RecvBuffer,
        deadline: Deadline,
    ) -> Result<ReceivedMsg> {
        let msg = self.start_pop(buffer)?;
        let received = self.receive_payload(table, &msg, buffer, deadline);
        let needs_update = self.finish_pop(msg, &received);
        self.wake_waiters();
        if received.is_ok() {
            table.lmr.stats.vqp_messages_received.add(1);
        }
        if needs_update {
            table.send_update_or_defer(self);
        }
        received.map_err(|error| match error == ENOENT {
            true => errno::connreset(),
            false => error,
        })
    }

    /// Completes a pop: consumes the message, or requeues it. Returns `true` if the sender must receive an
    /// update.
    fn finish_pop(&self, msg: QueuedMsg, received: &Result<ReceivedMsg>) -> bool {
        let mut state = self.state.lock();
        state.recv_queue.popping = false;
        match received {
            Ok(_) => {
                state.recv_queue.recv_window.consume();
                state.received_messages += 1;
                let is_rendezvous = matches!(msg.message.payload, Payload::Remote { .. });
                is_rendezvous || state.recv_queue.recv_window.should_advertise()
            }
            // The sender deregistered its memory: close the connection.
            Err(error) if *error == ENOENT => {
                state.closed_with = state.closed_with.or(Some(errno::connreset()));
                true
            }
            Err(_) => {
                // Put the message back at the front.
                let _ = state.recv_queue.messages.insert_within_capacity(0, msg);
                false
            }
        }
    }

    fn start_pop(&self, buffer: &RecvBuffer) -> Result<QueuedMsg> {
        let mut state = self.state.lock();
        if state.ids.local_vqpn == 0 {
            return Err(EINVAL);
        }
        if state.recv_queue.is_empty() {
            // Other messages can follow while one is popped, so do not report the close yet.
            let close_error = state.closed_with.filter(|_| !state.recv_queue.popping);
            return Err(close_error.unwrap_or(EAGAIN));
        }
        let first = state.recv_queue.messages.first().ok_or(EAGAIN)?;
        let is_written = matches!(first.message.payload, Payload::Placed { .. });
        if !is_written && first.message.payload.len() > buffer.len {
            return Err(errno::msgsize());
        }
        state.recv_queue.popping = true;
        state.recv_queue.messages.remove(0).map_err(|_| EAGAIN)
    }

    /// Copies or fetches the payload of a message to its destination.
    ///
    /// # Errors
    ///
    /// See [`Vqp::pop_message`]. `ENOENT`: the memory of the sender is gone.
    fn receive_payload(
        &self,
        table: &VqpTable,
        msg: &QueuedMsg,
        buffer: &RecvBuffer,
        deadline: Deadline,
    ) -> Result<ReceivedMsg> {
        let message = &msg.message;
        match message.payload {
            Payload::Inline { .. } => buffer.mr.write(buffer.addr, &msg.bytes)?,
            Payload::Remote {
                mr_key: key,
                addr,
                len,
            } => {
                let mut remaining = Some(Sge::new(buffer.addr, len, buffer.mr.local_key()));
                retry_until(deadline, || {
                    self.fetch_payload(table, (key, addr, len), &mut remaining, deadline)
                })?;
            }
            Payload::Placed { .. } => {}
        }
        Ok(ReceivedMsg {
            len: message.payload.len(),
            immediate: message.immediate,
            is_written: matches!(message.payload, Payload::Placed { .. }),
        })
    }

    /// Reads the remaining payload from the memory of the sender. `remaining` is updated even on failure.
    ///
    /// # Errors
    ///
    /// - `ENOENT`: the sender deregistered the memory, or its entry does not cover the message.
    /// - See also [`crate::fabric::Fabric::read_remote_into`].
    fn fetch_payload(
        &self,
        table: &VqpTable,
        (key, addr, len): (u32, u64, u32),
        remaining: &mut Option<Sge>,
        deadline: Deadline,
    ) -> Result {
        let cluster = &table.lmr.cluster;
        let cached = mr_cache::resolve_mr(&self.mr_cache, cluster, self.peer, key, deadline)?;
        let entry = cached.entry;
        // The sender's kernel has checked the access of its own process.
        entry
            .check_access(entry.owner_uid, Rights::READ, addr, len.into())
            .map_err(|_| ENOENT)?;
        let fetched_bytes = len - remaining.map_or(0, |sge| sge.len());
        let remote = RemoteAddr {
            addr: addr + u64::from(fetched_bytes),
            rkey: entry.rkey,
        };
        let address = cluster.resolve_address(self.peer, deadline)?;
        let (peer, has_valid_lease) = ((self.peer, &*address), || cached.lease.is_valid());
        // SAFETY: The caller holds the registered memory and waits for the end of the READ.
        unsafe {
            cluster
                .fabric
                .read_remote_into(peer, remote, remaining, has_valid_lease, deadline)
        }
    }
}
