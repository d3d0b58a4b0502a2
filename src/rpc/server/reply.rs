// SPDX-License-Identifier: GPL-2.0

//! Replies to callers: the reply of a server, or a status in its place.
//!
//! # Operation
//!
//! A server sends its reply, and may wait for space in the ring of the caller. A status of the kernel never
//! waits for space. If the ring is full, a worker sends the status later. So no teardown waits for a caller.
//!
//! # Recovery
//!
//! A reply that cannot be sent is followed by the status `ECONNRESET`.

use crate::{
    control::priority::WorkPriority,
    errno,
    rpc::{
        channel::{deferred_replies::DeferredReply, RpcChannel},
        Rpc, RpcMessage,
    },
    sys::deadline::Deadline,
    verbs::log::rnic_debug,
};
use kernel::{
    prelude::*,
    sync::Arc,
    time::{delay::fsleep, Delta},
};
use kite_core::wire::ring::{MsgHeader, MsgType, RendezvousBufs};

/// Delay, in ms, before the worker retries while a caller's ring is full.
const REPLY_RETRY_MS: i64 = 10;

/// Delivered call without a reply.
#[derive(Clone)]
pub(crate) struct PendingReply {
    channel: Arc<RpcChannel>,
    call_id: u64,
    max_reply_len: u64,
    /// Region, at the caller's node, for the data of a long reply.
    reply_region: Option<u64>,
}

impl PendingReply {
    /// Returns the pending reply of a message, or `None` if the message is not a call.
    pub(in crate::rpc) fn new(
        channel: &Arc<RpcChannel>,
        header: &MsgHeader,
        bufs: RendezvousBufs,
    ) -> Option<Self> {
        (header.msg_type == MsgType::Call).then(|| Self {
            channel: channel.clone(),
            call_id: header.call_id,
            max_reply_len: header.max_reply_len,
            reply_region: bufs.reply,
        })
    }

    /// Builds a reply of `len` bytes. `fill` writes the inline data, which are empty if the reply uses the
    /// rendezvous buffer. `high_priority` is the priority of the server.
    ///
    /// # Errors
    ///
    /// - `EMSGSIZE`: the reply is longer than the caller allows.
    /// - `ENOMEM`: no memory.
    /// - Errors of `fill`.
    pub(crate) fn build_reply(
        &self,
        len: u64,
        high_priority: bool,
        fill: impl FnOnce(&mut [u8]) -> Result,
    ) -> Result<RpcMessage> {
        if len > self.max_reply_len {
            return Err(errno::msgsize());
        }
        let message = RpcMessage::new(reply_header(self.call_id, 0, len), fill)?;
        Ok(RpcMessage {
            high_priority,
            ..message
        })
    }

    /// Returns the channel of the call.
    pub(crate) fn channel(&self) -> &RpcChannel {
        &self.channel
    }

    /// Returns the region, at the caller's node, for a reply of `len` bytes. Returns `None` if the reply is
    /// inline.
    ///
    /// # Errors
    ///
    /// - `EMSGSIZE`: the reply is longer than the caller allows.
    /// - `EIO`: the call names no such region.
    pub(crate) fn reply_region(&self, len: u64) -> Result<Option<u64>> {
        if len > self.max_reply_len {
            return Err(errno::msgsize());
        }
        if !reply_header(self.call_id, 0, len).is_rendezvous() {
            return Ok(None);
        }
        self.reply_region.ok_or(EIO).map(Some)
    }

    /// Sends a reply from [`Self::build_reply`]. On failure also sends `ECONNRESET` in the background. The
    /// caller ignores that status if the reply arrives first.
    ///
    /// # Errors
    ///
    /// See [`RpcChannel::send`].
    pub(crate) fn send(&self, rpc: &Arc<Rpc>, message: RpcMessage, deadline: Deadline) -> Result {
        let sent = self.channel.send(rpc, message, deadline);
        sent.inspect_err(|_| self.fail_deferred(rpc))
    }

    /// Sends `ECONNRESET` to the caller in the background: no server will reply.
    pub(crate) fn fail_deferred(&self, rpc: &Arc<Rpc>) {
        send_status_deferred(rpc, &self.channel, self.call_id, Err(errno::connreset()));
    }
}

fn reply_header(call_id: u64, code: u32, len: u64) -> MsgHeader {
    MsgHeader {
        msg_type: MsgType::Reply,
        call_id,
        code,
        len,
        ..MsgHeader::default()
    }
}

/// Sends the status of a call to which no server replies: now if the ring has space, else in the background.
pub(in crate::rpc) fn send_status(
    rpc: &Arc<Rpc>,
    channel: &Arc<RpcChannel>,
    call_id: u64,
    result: Result,
) {
    let code = result_to_errno(result);
    let message = RpcMessage::new(reply_header(call_id, code, 0), |_| Ok(()));
    let sent = message.and_then(|message| Ok(channel.try_send(rpc, message)?));
    if sent.is_err() {
        send_status_deferred(rpc, channel, call_id, result);
    }
}

/// Returns the errno of a result as a positive number, or 0.
fn result_to_errno(result: Result) -> u32 {
    result.map_or_else(|error| error.to_errno().unsigned_abs(), |()| 0)
}

/// Sends the status of a call to which no server replies, in the background. Without memory to queue the
/// status, drops it: the caller then waits until its deadline.
pub(in crate::rpc) fn send_status_deferred(
    rpc: &Arc<Rpc>,
    channel: &Arc<RpcChannel>,
    call_id: u64,
    result: Result,
) {
    let code = result_to_errno(result);
    match channel.deferred_replies.push(DeferredReply {
        call_id,
        errno: code,
    }) {
        Ok(true) => flush_replies_deferred(rpc.clone(), channel.clone()),
        Ok(false) => {}
        Err(error) => rnic_debug!(
            rpc.fabric().device(),
            "node {}: status of call {call_id} dropped: {error:?} (caller waits until its deadline)\n",
            channel.peer.node
        ),
    }
}

/// Sends the queued statuses of a channel on a workqueue. While the caller's ring is full, requeues itself,
/// so that other work for that node can run.
fn flush_replies_deferred(rpc: Arc<Rpc>, channel: Arc<RpcChannel>) {
    rpc.clone()
        .defer(channel.peer.node, WorkPriority::Background, move || {
            while let Some(DeferredReply {
                call_id: call,
                errno: code,
            }) = channel.deferred_replies.first()
            {
                let message = RpcMessage::new(reply_header(call, code, 0), |_| Ok(()));
                let sent = message.and_then(|message| Ok(channel.try_send(&rpc, message)?));
                if sent.is_ok() || channel.check_open().is_err() {
                    channel.deferred_replies.pop();
                } else {
                    fsleep(Delta::from_millis(REPLY_RETRY_MS));
                    return flush_replies_deferred(rpc, channel);
                }
            }
        });
}
