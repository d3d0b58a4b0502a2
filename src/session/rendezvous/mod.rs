// SPDX-License-Identifier: GPL-2.0

//! Data of calls that are too long for a ring (rendezvous).
//!
//! The caller's node makes a region for the data of a long call, and one for a reply if that may be long:
//! *relays*. The message has their numbers; the server's node reads the one and writes the other, straight
//! from and to the server's memory. When the call was answered both nodes keep what they have of them for the next.
//! Else they end with it, and by the rules of regions nobody reaches their memory after that, also if the caller
//! gives up while the server is at it.

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

/// How long a server waits for the caller's node to hear that it has done with a relay.
const UNMAP_TIMEOUT_MS: u32 = 1000;

/// Bytes that any node reads from or writes to another in a millisecond.
const MIN_BYTES_PER_MS: u64 = 4096;

/// For a transfer of `len` bytes that no user set a deadline for.
fn transfer_deadline(len: u64) -> Deadline {
    let ms = u32::try_from(len / MIN_BYTES_PER_MS).unwrap_or(u32::MAX);
    Deadline::after_ms(CONTROL_TIMEOUT_MS.saturating_add(ms))
}

/// Moves the first `len` bytes between a relay and `memory`.
///
/// # Errors
///
/// As for [`Access::run`].
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

/// A relay at the caller's node. It ends, in the background, when this is dropped.
pub(super) struct RendezvousBuffer {
    rnic: Arc<Rnic>,
    mapping: Arc<Mapping>,
    len: u64,
}

impl RendezvousBuffer {
    /// Bytes.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Whether it is still there.
    pub(super) fn is_valid(&self) -> bool {
        self.mapping.access().is_ok()
    }

    /// Makes one for `len` bytes.
    ///
    /// # Errors
    ///
    /// `ENODEV`, `ENOMEM`; `EHOSTDOWN` outside of a cluster.
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
        // If the RNIC is gone, so is all that was on it.
        if let Ok(rpc) = self.rnic.enter_rpc() {
            rpc.memory_service.release_anonymous(&self.mapping);
        }
    }
}

/// A relay as the server's node has it mapped, for one call.
struct MappedRendezvousBuffer<'a> {
    rnic: Arc<Rnic>,
    channel: &'a RpcChannel,
    /// Nothing once it has ended.
    mapping: Option<Arc<Mapping>>,
}

impl<'a> MappedRendezvousBuffer<'a> {
    /// Maps that of a caller, unless it was kept from an earlier call.
    ///
    /// # Errors
    ///
    /// `ENOENT` or `ESTALE` if the call has ended, `EHOSTDOWN` if the node of it died; `ENODEV`, `ENOMEM`;
    /// `EIO`, `ETIMEDOUT`.
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
        // It may be for data in one call and for a reply in the next.
        let rights = Rights::READ | Rights::WRITE;
        let mapped = rpc
            .memory_service
            .map_region(node, region, ROOT_UID, rights, events, deadline)?;
        buffer.mapping = Some(mapped);
        Ok(buffer)
    }

    /// As [`transfer`].
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

    /// Keeps it for the caller's next call, if the caller does. Else the caller's node is to know at once that this one
    /// has done with it, so that no more are left behind than can be cleared away.
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
            // Its home has ended it.
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

/// The relays of a call or message of this node.
#[derive(Default)]
pub(super) struct CallBuffers {
    data: Option<RendezvousBuffer>,
    reply: Option<RendezvousBuffer>,
}

impl CallBuffers {
    /// Their numbers.
    pub(super) fn region_ids(&self) -> RendezvousBufs {
        let region_id =
            |buffer: &Option<RendezvousBuffer>| buffer.as_ref().map(|buffer| buffer.mapping.region);
        RendezvousBufs {
            data: region_id(&self.data),
            reply: region_id(&self.reply),
        }
    }
}

/// A call under way, with its relays.
pub(super) struct PendingCall {
    pub(super) waiter: ReplyWaiter,
    pub(super) buffers: CallBuffers,
}

/// Why the data of a long call are not had.
pub(super) enum FetchError {
    /// The server's memory, or what there is of it, does not do. The call waits.
    Retryable(Error),
    /// They are not there any more, or cannot be reached.
    CallLost(Error),
}

impl FetchError {
    /// Of an error while they were moved.
    fn from_error(error: Error) -> Self {
        match error {
            EFAULT | EINTR | ENODEV | ENOMEM => Self::Retryable(error),
            error => Self::CallLost(error),
        }
    }
}

impl Session {
    /// Makes the relays of a call or message that has this line, if it needs any, and brings its data there.
    ///
    /// # Errors
    ///
    /// As for [`Relay::new`]; `EFAULT`, `EINTR`, `ETIMEDOUT`.
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

    /// A relay for `len` bytes, which was that of an earlier call if there is one.
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

    /// Gives the caller the data of a reply. Returns how many.
    ///
    /// # Errors
    ///
    /// `EFAULT`; `EIO` if they are where they cannot be; `ENODEV`, `ENOMEM`.
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
        // It was answered: nobody reaches for them any more.
        for buffer in [buffers.data, buffers.reply].into_iter().flatten() {
            self.buffer_pool.recycle(buffer);
        }
        Ok(len)
    }

    /// Brings the data of a long call to the server's memory. Returns nothing if they are not to be had.
    ///
    /// # Errors
    ///
    /// `EFAULT`, `EINTR`, `ENODEV`, `ENOMEM`; the call waits.
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
        // Signals end only what can begin anew without loss.
        let buffer = MappedRendezvousBuffer::new(self, &channel, region, deadline.interruptible());
        let buffer = buffer.map_err(FetchError::from_error)?;
        let transferred = buffer.transfer(self, (Direction::Read, len), memory, deadline);
        transferred.map_err(FetchError::from_error)?;
        call.on_fetched();
        buffer.cache_or_unmap();
        Ok(())
    }

    /// A reply did not get to its relay. If it is because of the server's memory, the call can still be answered, and
    /// then another may use the relay: so nothing may come late.
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

    /// Brings the data of a reply to the caller's node, if they go by a relay. Returns whether the caller still
    /// waits, as far as is known.
    ///
    /// # Errors
    ///
    /// - `EFAULT`, `EMSGSIZE`, `ENOMEM`: the call can still be answered.
    /// - `EHOSTUNREACH`, `EINTR`, `EIO`, `ENODEV`, `ETIMEDOUT`.
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

/// Whether so many bytes of data are too many for any call, message or reply.
pub(super) fn exceeds_max_data(len: u64) -> bool {
    len > bindings::KITE_DATA_MAX.into()
}
