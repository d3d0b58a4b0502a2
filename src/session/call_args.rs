// SPDX-License-Identifier: GPL-2.0

//! Arguments of a call or one-way message, as parsed from a system call, a submission, or a call of a kernel
//! module.

use crate::{
    bindings, errno,
    sys::{buffer::Buffer, deadline::Deadline},
};
use kernel::prelude::*;
use kite_core::wire::ring::{MsgHeader, MsgType};

/// RPC or one-way message to send.
pub(super) struct RpcRequest {
    pub(super) function: u32,
    pub(super) uid: u32,
    pub(super) data: Buffer,
    pub(super) len: u64,
    pub(super) reply_buffer: Buffer,
    pub(super) max_reply_len: u64,
    pub(super) wants_reply: bool,
    pub(super) deadline: Deadline,
}

impl RpcRequest {
    /// Returns the header of the message.
    ///
    /// # Errors
    ///
    /// - `EMSGSIZE`: the data exceed `KITE_DATA_MAX`.
    pub(super) fn header(&self) -> Result<MsgHeader> {
        if exceeds_max_data(self.len) {
            return Err(errno::msgsize());
        }
        let msg_type = if self.wants_reply {
            MsgType::Call
        } else {
            MsgType::Oneway
        };
        Ok(MsgHeader {
            msg_type,
            code: self.function,
            uid: self.uid,
            len: self.len,
            max_reply_len: self.max_reply_len.min(bindings::KITE_DATA_MAX.into()),
            ..MsgHeader::default()
        })
    }
}

/// Returns `true` if `len` exceeds the maximum length of data.
pub(super) fn exceeds_max_data(len: u64) -> bool {
    len > bindings::KITE_DATA_MAX.into()
}
