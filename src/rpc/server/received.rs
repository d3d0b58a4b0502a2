// SPDX-License-Identifier: GPL-2.0

//! Calls and one-way messages whose data a server has.

use super::reply::PendingReply;
use crate::rpc::channel::RpcChannel;
use kernel::sync::Arc;
use kite_core::wire::ring::{MsgHeader, RendezvousBufs};

/// Call or message delivered to a server.
pub(crate) struct ReceivedCall {
    pub(crate) header: MsgHeader,
    pub(crate) node: u32,
    /// `None` if the message has no reply.
    pub(crate) pending_reply: Option<PendingReply>,
}

impl ReceivedCall {
    /// Creates a delivered call. Its data have been copied.
    pub(in crate::rpc) fn new(
        channel: &Arc<RpcChannel>,
        header: MsgHeader,
        bufs: RendezvousBufs,
    ) -> Self {
        Self {
            header,
            node: channel.peer.node,
            pending_reply: PendingReply::new(channel, &header, bufs),
        }
    }
}
