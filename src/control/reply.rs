// SPDX-License-Identifier: GPL-2.0

//! Reply to a control request.

use crate::errno::TryResult;
use kernel::prelude::*;
use kite_core::wire::{self, ControlBody, ControlReply};

/// Encoded reply to a control request.
pub(crate) struct ReplyMessage(pub(super) KVec<u8>);

impl ReplyMessage {
    /// Decodes the reply.
    ///
    /// # Errors
    ///
    /// - `EIO`: the reply is malformed.
    /// - Other errors: the serving node failed the request with this error.
    pub(crate) fn decode(&self) -> Result<ControlReply<'_>> {
        match wire::decode_control(&self.0) {
            Ok((_, ControlBody::Reply(ControlReply::Failed { errno }))) => {
                Err(Error::from_errno(-(errno as c_int)))
            }
            Ok((_, ControlBody::Reply(reply))) => Ok(reply),
            _ => Err(EIO),
        }
    }

    /// Returns the result of the request without its value.
    ///
    /// # Errors
    ///
    /// See [`Self::decode`].
    pub(super) fn result(&self) -> TryResult {
        Ok(self.decode().map(drop)?)
    }

    /// Checks the reply to a request without result.
    ///
    /// # Errors
    ///
    /// See [`Self::decode`].
    pub(crate) fn expect_done(&self) -> Result {
        match self.decode()? {
            ControlReply::Done => Ok(()),
            _ => Err(EIO),
        }
    }

    /// Returns the old value from the reply to an atomic operation.
    ///
    /// # Errors
    ///
    /// See [`Self::decode`].
    pub(crate) fn old_value(&self) -> Result<u64> {
        match self.decode()? {
            ControlReply::OldValue { word } => Ok(word),
            _ => Err(EIO),
        }
    }

    /// Returns the address and the number of buckets of the directory replica that stored the address of this
    /// node.
    ///
    /// # Errors
    ///
    /// See [`Self::decode`].
    pub(crate) fn directory_addr(&self) -> Result<(u64, u32)> {
        match self.decode()? {
            ControlReply::DirectoryAddr {
                addr,
                bucket_count: buckets,
            } => Ok((addr, buckets)),
            _ => Err(EIO),
        }
    }
}
