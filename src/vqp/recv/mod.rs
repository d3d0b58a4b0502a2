// SPDX-License-Identifier: GPL-2.0

//! Messages that have come to a virtual queue pair, and how a process takes them.
//!
//! Short ones are here, and copied. The bytes of long ones are fetched with one READ, straight to where the process
//! wants them, after a look whether the sender still lends them: so a sender that died breaks nothing. Whoever takes
//! a message tells the sender when that may have to wait for it.

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

/// A message that has come.
struct QueuedMsg {
    message: VqpMessage,
    /// Its bytes, if they came with it.
    bytes: KVec<u8>,
}

/// Those that no process has taken.
pub(super) struct RecvQueue {
    pub(super) recv_window: RecvWindow,
    messages: KVec<QueuedMsg>,
    /// A process is taking the first.
    popping: bool,
}

impl RecvQueue {
    /// Empty, with room for all that may come.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(super) fn new(gfp: Flags) -> Result<Self> {
        Ok(Self {
            recv_window: RecvWindow::default(),
            messages: KVec::with_capacity(RECV_WINDOW_MESSAGES as usize, gfp)?,
            popping: false,
        })
    }

    /// Whether there is nothing to take now.
    pub(super) fn is_empty(&self) -> bool {
        self.popping || self.messages.is_empty()
    }

    /// Whether a process is taking the first.
    pub(super) fn is_popping(&self) -> bool {
        self.popping
    }

    /// Forgets what no process will take.
    pub(super) fn clear(&mut self) {
        self.messages.clear();
    }
}

/// Where a process wants a message.
pub(crate) struct RecvBuffer {
    pub(crate) mr: Arc<UserMr>,
    pub(crate) addr: u64,
    pub(crate) len: u32,
}

/// What a process hears of a message.
#[derive(Clone, Copy)]
pub(crate) struct ReceivedMsg {
    pub(crate) len: u32,
    pub(crate) immediate: Option<u32>,
    /// The bytes were written before, to where the sender chose.
    pub(crate) is_written: bool,
}

impl Vqp {
    /// A message has come. Returns whether the sender is to be told how we are.
    pub(super) fn on_message(&self, message: VqpMessage, packet_bytes: &[u8]) -> bool {
        let bytes = packet_bytes.get(PACKET_HEADER_SIZE..).unwrap_or_default();
        let mut payload = KVec::new();
        let charged = self
            .memcg
            // The poller does not wait for a cgroup that is full.
            .with_active(|| payload.extend_from_slice(bytes, memcg::gfp_atomic_account()));
        let mut state = self.state.lock();
        if state.closed_with.is_some() {
            return true;
        }
        match state.recv_queue.recv_window.receive(message.sequence) {
            // It is lost, and so is what comes after it.
            SequenceCheck::InOrder if charged.is_err() => {
                state.closed_with = Some(errno::connreset())
            }
            SequenceCheck::InOrder => {
                let queued_msg = QueuedMsg {
                    message,
                    bytes: payload,
                };
                // There is room for as many as are let in.
                let _ = state.recv_queue.messages.push(queued_msg, GFP_ATOMIC);
            }
            // Who has not accepted it says nothing yet.
            SequenceCheck::Duplicate => return state.accepted,
            SequenceCheck::OutOfWindow => state.closed_with = Some(errno::connreset()),
        }
        let is_closed = state.closed_with.is_some();
        state.deliver_completions();
        drop(state);
        self.wake_waiters();
        is_closed
    }

    /// The other end, of this number, says how it is.
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

    /// Takes the first message, if there is one.
    ///
    /// # Errors
    ///
    /// As `struct kite_pop_message` in `include/uapi/kite.h` says.
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

    /// A message was taken, or not. Returns whether the sender is to be told something.
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
            // Who sent it has taken its memory back: it breaks off.
            Err(error) if *error == ENOENT => {
                state.closed_with = state.closed_with.or(Some(errno::connreset()));
                true
            }
            Err(_) => {
                // It is the first again.
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
            // There is more while somebody takes one.
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

    /// Brings the bytes of a message to where they are wanted.
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

    /// Reads memory that the sender lends, as far as that is left.
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
        // The sender's kernel has checked it for its process.
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
        // SAFETY: The memory is registered for as long as the caller has it, who waits for the end.
        unsafe {
            cluster
                .fabric
                .read_remote_into(peer, remote, remaining, has_valid_lease, deadline)
        }
    }
}
