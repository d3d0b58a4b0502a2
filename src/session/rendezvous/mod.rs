// SPDX-License-Identifier: GPL-2.0

//! Rendezvous transfers: data of calls and replies that do not fit into a ring.
//!
//! # Operation
//!
//! The caller's node allocates a region for long data, and another region if the reply may be long: the
//! rendezvous buffers. The message carries their region IDs. The server's node reads the data from one buffer
//! and writes the reply to the other, directly to and from the server's memory. After the reply both nodes
//! keep their side for the next call. The caller's node uses the [`pool`] of [buffers](buffer), and the
//! server's node the mapping cache of the channel ([`mapped`]).
//!
//! # Recovery
//!
//! If a call ends without a reply, the buffers are freed as regions are. The memory is unreachable
//! afterwards, even if the caller gives up while the server is transferring.
//!
//! # Locking
//!
//! Transfers may block, and run without session locks held. The lock of the pool is described in [`pool`].

mod buffer;
mod mapped;
pub(super) mod pool;

use self::{
    buffer::{transfer, RendezvousBuffer},
    mapped::MappedRendezvousBuffer,
    pool::size_class,
};
use super::{call_args::RpcRequest, Session};
use crate::{
    control::retry::CONTROL_TIMEOUT_MS,
    errno,
    fabric::send::inflight::Direction,
    rpc::{
        client::{ReplyData, ReplyWaiter},
        rendezvous::call::RendezvousCall,
        server::{reply::PendingReply, ReceivedCall},
    },
    sys::{buffer::Buffer, deadline::Deadline},
};
use kernel::prelude::*;
use kite_core::wire::ring::{MsgHeader, RendezvousBufs};

/// Lowest assumed transfer rate between two nodes, in bytes per millisecond.
const MIN_BYTES_PER_MS: u64 = 4096;

/// Returns the deadline of a transfer of `len` bytes without a deadline of a user.
fn transfer_deadline(len: u64) -> Deadline {
    let ms = u32::try_from(len / MIN_BYTES_PER_MS).unwrap_or(u32::MAX);
    Deadline::after_ms(CONTROL_TIMEOUT_MS.saturating_add(ms))
}

/// Returns `true` if a reply failed because the caller is gone, which counts as success.
pub(super) fn is_caller_gone(error: Error) -> bool {
    error == errno::hostdown() || error == errno::stale()
}

/// Rendezvous buffers of a call or message of this node.
#[derive(Default)]
pub(super) struct CallBuffers {
    data: Option<RendezvousBuffer>,
    reply: Option<RendezvousBuffer>,
}

impl CallBuffers {
    /// Returns the region IDs.
    pub(super) fn region_ids(&self) -> RendezvousBufs {
        let region_id =
            |buffer: &Option<RendezvousBuffer>| buffer.as_ref().map(|buffer| buffer.mapping.region);
        RendezvousBufs {
            data: region_id(&self.data),
            reply: region_id(&self.reply),
        }
    }
}

/// Call in flight, with its rendezvous buffers.
pub(super) struct PendingCall {
    pub(super) waiter: ReplyWaiter,
    pub(super) buffers: CallBuffers,
}

/// Reason why the data of a rendezvous call could not be fetched.
pub(super) enum FetchError {
    /// A failure on the server's side, such as invalid memory. The call stays queued.
    Retryable(Error),
    /// The data are gone or unreachable.
    CallLost(Error),
}

impl FetchError {
    /// Classifies an error of a transfer.
    fn from_error(error: Error) -> Self {
        match error {
            EFAULT | EINTR | ENODEV | ENOMEM => Self::Retryable(error),
            error => Self::CallLost(error),
        }
    }
}

impl Session {
    /// Allocates the rendezvous buffers that a header requires, if any, and writes the data to their buffer.
    ///
    /// # Errors
    ///
    /// - `EFAULT`: the data cannot be read.
    /// - `EINTR`: a signal ended the transfer.
    /// - `ETIMEDOUT`: the deadline passed.
    /// - Otherwise see [`RendezvousBuffer::new`].
    pub(super) fn prepare_buffers(
        &self,
        request: &RpcRequest,
        header: &MsgHeader,
    ) -> Result<CallBuffers> {
        let alloc_buffer =
            |needed: bool, len| needed.then(|| self.take_or_alloc_buffer(len)).transpose();
        let buffers = CallBuffers {
            data: alloc_buffer(header.has_data_buffer(), header.len)?,
            reply: alloc_buffer(header.has_reply_buffer(), header.max_reply_len)?,
        };
        if let Some(buffer) = &buffers.data {
            let direction_and_len = (Direction::Write, header.len);
            transfer(
                self,
                &buffer.mapping,
                direction_and_len,
                &request.data,
                request.deadline,
            )?;
        }
        Ok(buffers)
    }

    /// Returns a buffer of at least `len` bytes, from the pool if possible.
    fn take_or_alloc_buffer(&self, len: u64) -> Result<RendezvousBuffer> {
        if let Some(pooled) = self.buffer_pool.pop_valid(len) {
            return Ok(pooled);
        }
        match RendezvousBuffer::new(self, size_class(len)) {
            Err(error) if error == ENOMEM => {
                self.buffer_pool.clear();
                RendezvousBuffer::new(self, len)
            }
            result => result,
        }
    }

    /// Stores the data of a reply in the caller's memory. Returns their length.
    ///
    /// # Errors
    ///
    /// - `EFAULT`: the memory is not writable.
    /// - `EIO`: the reply is not inline, and the call has no reply buffer.
    /// - `ENODEV`: the RNIC was removed.
    /// - `ENOMEM`: out of memory.
    pub(super) fn store_reply(
        &self,
        reply: &ReplyData,
        buffers: CallBuffers,
        memory: &Buffer,
    ) -> Result<u64> {
        let len = reply.len();
        match (reply.inline_bytes(), &buffers.reply) {
            (Some(bytes), _) => memory.write_slice(0, bytes)?,
            (None, Some(buffer)) => {
                let direction_and_len = (Direction::Read, len);
                transfer(
                    self,
                    &buffer.mapping,
                    direction_and_len,
                    memory,
                    transfer_deadline(len),
                )?;
            }
            _ => return Err(EIO),
        }
        // After the reply the server no longer accesses the buffers.
        for buffer in [buffers.data, buffers.reply].into_iter().flatten() {
            self.buffer_pool.recycle(buffer);
        }
        Ok(len)
    }

    /// Fetches the data of a rendezvous call to the server's memory. Returns `None` if the call is lost.
    ///
    /// # Errors
    ///
    /// The call stays queued after an error.
    ///
    /// - `EFAULT`: the memory is not writable.
    /// - `EINTR`: a signal is pending.
    /// - `ENODEV`: the RNIC was removed.
    /// - `ENOMEM`: out of memory.
    pub(super) fn fetch_data(
        &self,
        mut call: RendezvousCall,
        memory: &Buffer,
    ) -> Result<Option<ReceivedCall>> {
        let result = self.do_fetch_data(&mut call, memory);
        let rpc = self.enter_rpc()?;
        match result {
            Ok(()) => return Ok(Some(call.complete(&rpc))),
            Err(FetchError::CallLost(error)) => call.reject(&rpc, error),
            Err(FetchError::Retryable(error)) => return Err(error),
        }
        Ok(None)
    }

    fn do_fetch_data(&self, call: &mut RendezvousCall, memory: &Buffer) -> Result<(), FetchError> {
        let (len, deadline) = (call.len(), transfer_deadline(call.len()));
        let (channel, region) = (
            call.channel(),
            call.data_region().map_err(FetchError::CallLost)?,
        );
        // Signals interrupt only the mapping, which can be repeated without loss.
        let buffer = MappedRendezvousBuffer::new(self, &channel, region, deadline.interruptible());
        let buffer = buffer.map_err(FetchError::from_error)?;
        let transferred = buffer.transfer(self, (Direction::Read, len), memory, deadline);
        transferred.map_err(FetchError::from_error)?;
        call.on_fetched();
        buffer.cache_or_unmap();
        Ok(())
    }

    /// Decides whether a reply can be repeated after a failed transfer to its buffer: after `EFAULT` and
    /// `ENOMEM`, which concern the server's memory. After another reply the caller may reuse the buffer. The
    /// failed transfer must therefore be drained: no write may still be in flight, else the result is `EIO`.
    fn check_reply_retryable(&self, buffer: &MappedRendezvousBuffer<'_>, error: Error) -> Result {
        let is_drained = |mapping| {
            self.enter_memory_service()
                .is_ok_and(|memory_service| memory_service.is_drained(mapping))
        };
        let is_retryable = error == EFAULT || error == ENOMEM;
        if is_retryable && !buffer.mapping.as_deref().is_some_and(is_drained) {
            return Err(EIO);
        }
        Err(error)
    }

    /// Writes the data of a reply to the caller's node, if the reply uses a rendezvous buffer. Returns
    /// `false` if the caller is known to have stopped waiting.
    ///
    /// # Errors
    ///
    /// - `EFAULT`, `EMSGSIZE`, `ENOMEM`: the server can reply again.
    /// - `EHOSTUNREACH`: this node is in no cluster.
    /// - `EINTR`: a signal ended the transfer.
    /// - `EIO`: the transfer failed, or a write may still be in flight.
    /// - `ENODEV`: the RNIC was removed.
    /// - `ETIMEDOUT`: the deadline passed.
    pub(super) fn write_reply(
        &self,
        pending_reply: &PendingReply,
        len: u64,
        memory: &Buffer,
        deadline: Deadline,
    ) -> Result<bool> {
        let Some(region) = pending_reply.reply_region(len)? else {
            return Ok(true);
        };
        let write = || {
            let buffer =
                MappedRendezvousBuffer::new(self, pending_reply.channel(), region, deadline)?;
            let transferred = buffer.transfer(self, (Direction::Write, len), memory, deadline);
            transferred.or_else(|error| self.check_reply_retryable(&buffer, error))?;
            buffer.cache_or_unmap();
            Ok(())
        };
        match write() {
            Err(error) if error == ENOENT || is_caller_gone(error) => Ok(false),
            result => result.map(|()| true),
        }
    }
}
