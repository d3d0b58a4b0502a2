// SPDX-License-Identifier: GPL-2.0

//! Telling callers what came of their calls: the answer of a server, or in its stead that there is none.
//!
//! Where there is no room in a caller's ring, what the kernel itself has to say waits in the background, so that
//! nothing that ends waits for a caller.

use crate::{
    errno,
    region::home::reclaim::WorkPriority,
    rpc::{
        channel::{DeferredReply, RpcChannel},
        Rpc, RpcMessage,
    },
    sys::deadline::Deadline,
};
use kernel::{
    prelude::*,
    sync::Arc,
    time::{delay::fsleep, Delta},
};
use kite_core::wire::ring::{MsgHeader, MsgType, RendezvousBufs};

/// Time between looks whether there is room for what is told in the background.
const REPLY_RETRY_MS: i64 = 10;

/// A call that a server has taken and not answered.
#[derive(Clone)]
pub(crate) struct PendingReply {
    channel: Arc<RpcChannel>,
    call_id: u64,
    max_reply_len: u64,
    /// The region, at the caller's node, for the data of a long reply.
    reply_region: Option<u64>,
}

impl PendingReply {
    /// What a server is to answer, if it is a call that has come by this link.
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

    /// An answer, of `len` bytes that `fill` writes, unless they are in the relay, from a server of high priority
    /// or not.
    ///
    /// # Errors
    ///
    /// `EMSGSIZE` if the caller has no room for so many; those of `fill`.
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

    /// By which it came.
    pub(crate) fn channel(&self) -> &RpcChannel {
        &self.channel
    }

    /// The region at the caller's node for an answer of `len` bytes, if that goes by one.
    ///
    /// # Errors
    ///
    /// `EMSGSIZE` if the caller has no room for so many.
    pub(crate) fn reply_region(&self, len: u64) -> Result<Option<u64>> {
        if len > self.max_reply_len {
            return Err(errno::msgsize());
        }
        if !reply_header(self.call_id, 0, len).is_rendezvous() {
            return Ok(None);
        }
        self.reply_region.ok_or(EIO).map(Some)
    }

    /// Sends what [`Self::answer`] made. If that fails the caller is told, unless the answer comes after all.
    ///
    /// # Errors
    ///
    /// Those of [`Link::send`].
    pub(crate) fn send(
        &self,
        rpc: &Arc<Rpc>,
        mut message: RpcMessage,
        deadline: Deadline,
    ) -> Result {
        let sent = self.channel.send(rpc, &mut message, deadline);
        sent.inspect_err(|_| self.fail_deferred(rpc))
    }

    /// Tells the caller, in the background, that nobody will answer.
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

/// Tells a caller what came of a call of which no server tells it: at once, if there is room.
pub(in crate::rpc) fn send_status(
    rpc: &Arc<Rpc>,
    channel: &Arc<RpcChannel>,
    call_id: u64,
    result: Result,
) {
    let code = result_to_errno(result);
    let message = RpcMessage::new(reply_header(call_id, code, 0), |_| Ok(()));
    let sent = message.and_then(|mut message| channel.try_send(rpc, &mut message));
    if sent.is_err() {
        send_status_deferred(rpc, channel, call_id, result);
    }
}

/// The errno of a result, or 0.
fn result_to_errno(result: Result) -> u32 {
    result.map_or_else(|error| error.to_errno().unsigned_abs(), |()| 0)
}

/// Tells a caller, in the background, what came of a call of which no server tells it.
pub(in crate::rpc) fn send_status_deferred(
    rpc: &Arc<Rpc>,
    channel: &Arc<RpcChannel>,
    call_id: u64,
    result: Result,
) {
    let code = result_to_errno(result);
    match channel.queue_deferred_reply(DeferredReply {
        call_id,
        errno: code,
    }) {
        Ok(true) => flush_replies_deferred(rpc.clone(), channel.clone()),
        Ok(false) => {}
        Err(error) => pr_debug!("a caller is not told what came of its call: {error:?}\n"),
    }
}

/// Tells of all calls of a link that were settled. Where there is no room in the caller's ring, others for that
/// node do not wait for it.
fn flush_replies_deferred(rpc: Arc<Rpc>, channel: Arc<RpcChannel>) {
    rpc.clone()
        .defer(channel.peer.node, WorkPriority::Background, move || {
            while let Some(DeferredReply {
                call_id: call,
                errno: code,
            }) = channel.first_deferred_reply()
            {
                let message = RpcMessage::new(reply_header(call, code, 0), |_| Ok(()));
                let sent = message.and_then(|mut message| channel.try_send(&rpc, &mut message));
                if sent.is_ok() || channel.check_open().is_err() {
                    channel.pop_deferred_reply();
                } else {
                    fsleep(Delta::from_millis(REPLY_RETRY_MS));
                    return flush_replies_deferred(rpc, channel);
                }
            }
        });
}
