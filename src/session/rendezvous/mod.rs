// SPDX-License-Identifier: GPL-2.0

//! Rendezvous transfers: data of calls and replies that do not fit into a ring.
//!
//! # Operation
//!
//! The caller's node allocates a region for long data, and another region if the reply may be long: the
//! rendezvous buffers. The message carries their region IDs. The server's node reads the data from one buffer
//! and writes the reply to the other, directly to and from the server's memory. After the reply both nodes
//! keep their side for the next call. The caller's node uses the [`pool`], and the server's node the mapping
//! cache of the channel.
//!
//! # Recovery
//!
//! If a call ends without a reply, the buffers are freed as regions are. The memory is unreachable
//! afterwards, even if the caller gives up while the server is transferring.
//!
//! # Locking
//!
//! Transfers may block, and run without session locks held. The lock of the pool is described in [`pool`].

pub(crate) mod pool;

use self::pool::{size_class, MAX_POOLED_BUFFER_BYTES};
use super::{call::RpcRequest, serve::is_caller_gone, Session};
use crate::{
    bindings,
    fabric::send::inflight::Direction,
    region::{
        alloc::AllocRequest,
        map::{io::AccessRequest, Mapping},
        CONTROL_TIMEOUT_MS,
    },
    rnic::Rnic,
    rpc::{
        channel::RpcChannel,
        client::call::{ReplyData, ReplyWaiter},
        rendezvous::queue::RendezvousCall,
        server::{reply::PendingReply, ReceivedCall},
        ROOT_UID,
    },
    sys::{buffer::Buffer, deadline::Deadline},
};
use kernel::{prelude::*, sync::Arc};
use kite_core::{
    rights::Rights,
    wire::ring::{MsgHeader, RendezvousBufs},
};

/// Maximum time in milliseconds that a server waits until the caller's node has processed an unmap of a
/// buffer.
const UNMAP_TIMEOUT_MS: u32 = 1000;

/// Lowest assumed transfer rate between two nodes, in bytes per millisecond.
const MIN_BYTES_PER_MS: u64 = 4096;

/// Returns the deadline of a transfer of `len` bytes without a deadline of a user.
fn transfer_deadline(len: u64) -> Deadline {
    let ms = u32::try_from(len / MIN_BYTES_PER_MS).unwrap_or(u32::MAX);
    Deadline::after_ms(CONTROL_TIMEOUT_MS.saturating_add(ms))
}

/// Transfers the first `len` bytes between a rendezvous buffer and `memory`.
///
/// # Errors
///
/// See [`AccessRequest::transfer`].
fn transfer(
    session: &Session,
    mapping: &Mapping,
    (direction, len): (Direction, u64),
    memory: &Buffer,
    deadline: Deadline,
) -> Result {
    let request = AccessRequest {
        direction,
        offset: 0,
        len,
        deadline,
    };
    request.transfer(
        || session.enter_memory_service(),
        mapping,
        memory,
        session.tenant()?,
    )
}

/// Rendezvous buffer at the caller's node. The drop frees the region in the background.
pub(super) struct RendezvousBuffer {
    rnic: Arc<Rnic>,
    mapping: Arc<Mapping>,
    len: u64,
}

impl RendezvousBuffer {
    /// Returns the length in bytes.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Returns `true` if the region still exists.
    pub(super) fn is_valid(&self) -> bool {
        self.mapping.access().is_ok()
    }

    /// Allocates a buffer of `len` bytes.
    ///
    /// # Errors
    ///
    /// - `EHOSTDOWN`: this node left the cluster meanwhile.
    /// - `EHOSTUNREACH`: this node is in no cluster.
    /// - `ENODEV`: the RNIC was removed.
    /// - `ENOMEM`: out of memory.
    fn new(session: &Session, len: u64) -> Result<Self> {
        let request = AllocRequest {
            len,
            nodes: &[],
            name: None,
            owner: ROOT_UID,
            other_rights: Rights::NONE,
        };
        let rpc = session.enter_rpc()?;
        Ok(Self {
            rnic: session.rnic()?.clone(),
            mapping: rpc
                .memory_service
                .alloc(&request, rpc.ignored_events.clone())?,
            len,
        })
    }
}

impl Drop for RendezvousBuffer {
    fn drop(&mut self) {
        // RNIC removal has already freed the region otherwise.
        if let Ok(rpc) = self.rnic.enter_rpc() {
            rpc.memory_service.release_anonymous(&self.mapping);
        }
    }
}

/// Rendezvous buffer of a caller, mapped at the server's node for one call.
struct MappedRendezvousBuffer<'a> {
    rnic: Arc<Rnic>,
    channel: &'a RpcChannel,
    /// `None` once the mapping is cached or unmapped.
    mapping: Option<Arc<Mapping>>,
}

impl<'a> MappedRendezvousBuffer<'a> {
    /// Maps the buffer of a caller, unless the mapping is cached from an earlier call.
    ///
    /// # Errors
    ///
    /// - `ENOENT`, `ESTALE`: the call has ended.
    /// - `EHOSTDOWN`: the caller's node died.
    /// - `EIO`: invalid reply of the caller's node.
    /// - `ENODEV`: the RNIC was removed.
    /// - `ENOMEM`: out of memory.
    /// - `ETIMEDOUT`: the caller's node did not reply before the deadline.
    fn new(
        session: &Session,
        channel: &'a RpcChannel,
        region: u64,
        deadline: Deadline,
    ) -> Result<Self> {
        let mut buffer = Self {
            rnic: session.rnic()?.clone(),
            channel,
            mapping: channel.mapping_cache.remove(region),
        };
        if buffer
            .mapping
            .as_ref()
            .is_some_and(|cached| cached.access().is_ok())
        {
            return Ok(buffer);
        }
        let rpc = session.enter_rpc()?;
        if let Some(stale) = buffer.mapping.take() {
            rpc.memory_service.unmap(&stale);
        }
        let (node, events) = (channel.peer.node, rpc.ignored_events.clone());
        // A buffer can hold data in one call and a reply in the next.
        let rights = Rights::READ | Rights::WRITE;
        let mapped = rpc
            .memory_service
            .map_region(node, region, ROOT_UID, rights, events, deadline)?;
        buffer.mapping = Some(mapped);
        Ok(buffer)
    }

    /// Transfers data between the buffer and `memory`. See [`transfer`].
    fn transfer(
        &self,
        session: &Session,
        direction_and_len: (Direction, u64),
        memory: &Buffer,
        deadline: Deadline,
    ) -> Result {
        let mapping = self.mapping.as_ref().ok_or(EIO)?;
        transfer(session, mapping, direction_and_len, memory, deadline)
    }

    /// Caches the mapping for the caller's next call, if the caller may pool the buffer. Otherwise unmaps at
    /// once, and waits for the caller's node. Without this wait unmap requests could accumulate faster than
    /// the background processes them.
    fn cache_or_unmap(mut self) {
        let (Ok(rpc), Some(mapping)) = (self.rnic.enter_rpc(), self.mapping.take()) else {
            return;
        };
        let is_cacheable = mapping
            .layout()
            .is_ok_and(|layout| layout.len() <= MAX_POOLED_BUFFER_BYTES);
        let uncached = match is_cacheable {
            true => self.channel.mapping_cache.insert(mapping),
            false => Some(mapping),
        };
        match uncached {
            // The home has freed the region.
            Some(uncached) if uncached.access().is_err() => rpc.memory_service.unmap(&uncached),
            Some(uncached) => rpc
                .memory_service
                .unmap_within(&uncached, Deadline::after_ms(UNMAP_TIMEOUT_MS)),
            None => {}
        }
    }
}

impl Drop for MappedRendezvousBuffer<'_> {
    fn drop(&mut self) {
        if let (Ok(rpc), Some(mapping)) = (self.rnic.enter_rpc(), self.mapping.take()) {
            rpc.memory_service.unmap(&mapping);
        }
    }
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
                .is_ok_and(|lmr| lmr.is_drained(mapping))
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

/// Returns `true` if `len` exceeds the maximum length of data.
pub(super) fn exceeds_max_data(len: u64) -> bool {
    len > bindings::KITE_DATA_MAX.into()
}
