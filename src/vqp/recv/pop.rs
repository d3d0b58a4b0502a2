// SPDX-License-Identifier: GPL-2.0

//! Transfer of received messages to a process.
//!
//! # Operation
//!
//! Short messages are copied from the queue. Long messages are fetched with one READ, directly into the
//! buffer of the process. Before the READ, the MR entry of the sender is validated, so a dead sender cannot
//! cause an error on the QP. After a message was taken, the receiver sends an update if the sender could
//! otherwise block.
//!
//! # Recovery
//!
//! - The fetch fails: the message returns to the front of the queue.
//! - The sender deregistered its memory: the VQP closes with `ECONNRESET`.
//!
//! # Locking
//!
//! `Vqp::state` is not held during the READ. Meanwhile `RecvQueue::popping` reserves the first message.

use super::QueuedMsg;
use crate::{
    cluster::Cluster,
    errno::{self, TryError, TryResult},
    fabric::{mr::table::UserMr, send::one_shot::OneShot},
    sys::deadline::{retry_until, Deadline},
    verbs::work::{RemoteAddr, Sge},
    vqp::{table::VqpTable, Vqp},
};
use kernel::{prelude::*, sync::Arc};
use kite_core::{rights::Rights, wire::packet::Payload};

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

/// Transfer of the first message of a VQP to a process.
pub(crate) struct MessagePop<'a> {
    pub(crate) vqp: &'a Arc<Vqp>,
    pub(crate) table: &'a Arc<VqpTable>,
    pub(crate) buffer: &'a RecvBuffer,
    /// Deadline of the fetch of the payload.
    pub(crate) deadline: Deadline,
}

impl MessagePop<'_> {
    fn cluster(&self) -> &Cluster {
        &self.table.memory_service.cluster
    }

    /// Takes the first message.
    ///
    /// # Errors
    ///
    /// See `struct kite_pop_message` in `include/uapi/kite.h`.
    pub(crate) fn execute(&self) -> TryResult<ReceivedMsg> {
        let msg = self.start()?;
        let received = self.receive_payload(&msg);
        let needs_update = self.finish(msg, &received);
        self.vqp.wake_waiters();
        if received.is_ok() {
            self.table.memory_service.stats.vqp_messages_received.add(1);
        }
        if needs_update {
            self.table.send_update_or_defer(self.vqp);
        }
        Ok(received.map_err(|error| match error == ENOENT {
            true => errno::connreset(),
            false => error,
        })?)
    }

    fn start(&self) -> TryResult<QueuedMsg> {
        let mut state = self.vqp.state.lock();
        if state.ids.local_vqpn == 0 {
            return Err(EINVAL.into());
        }
        if state.recv_queue.is_empty() {
            // Other messages can follow while one is popped, so do not report the close yet.
            let close_error = state.closed_with.filter(|_| !state.recv_queue.popping);
            return Err(close_error.map_or(TryError::WouldBlock, TryError::from));
        }
        state.recv_queue.start_pop(self.buffer.len)
    }

    /// Completes a pop: consumes the message, or requeues it. Returns `true` if the sender must receive an
    /// update.
    fn finish(&self, msg: QueuedMsg, received: &Result<ReceivedMsg>) -> bool {
        let mut state = self.vqp.state.lock();
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
                // Put the message back at the front. Cannot fail: the window still counts the message, so its
                // place is free.
                let _ = state.recv_queue.messages.insert_within_capacity(0, msg);
                false
            }
        }
    }

    /// Copies or fetches the payload of a message to its destination.
    ///
    /// # Errors
    ///
    /// See [`Self::execute`]. `ENOENT`: the memory of the sender is gone.
    fn receive_payload(&self, msg: &QueuedMsg) -> Result<ReceivedMsg> {
        let (message, buffer) = (&msg.message, self.buffer);
        match message.payload {
            Payload::Inline { .. } => buffer.mr.write(buffer.addr, &msg.bytes)?,
            Payload::Remote {
                mr_key: key,
                addr,
                len,
            } => {
                let mut remaining = Some(Sge::new(buffer.addr, len, buffer.mr.local_key()));
                retry_until(self.deadline, || {
                    self.fetch_payload((key, addr, len), &mut remaining)
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
    /// - See also [`OneShot::read_into`].
    fn fetch_payload(
        &self,
        (key, addr, len): (u32, u64, u32),
        remaining: &mut Option<Sge>,
    ) -> TryResult {
        let (cluster, deadline) = (self.cluster(), self.deadline);
        let cached = self.vqp.mr_cache.resolve(cluster, key, deadline)?;
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
        let peer = self.vqp.peer;
        let address = cluster.resolve_address(peer, deadline)?;
        let read = OneShot::new(&cluster.fabric, (peer, &*address), deadline);
        // SAFETY: The caller holds the registered memory and waits for the end of the READ.
        unsafe { read.read_into(remote, remaining, || cached.lease.is_valid()) }
    }
}
