// SPDX-License-Identifier: GPL-2.0

//! Rendezvous buffer of a caller, mapped at the server's node.
//!
//! # Operation
//!
//! The mapping of a short buffer can be cached in the channel for the caller's next call, because the caller
//! keeps such a buffer in its [`pool`](super::pool). Other mappings end with their call.
//!
//! # Recovery
//!
//! If the transfer fails, the drop unmaps the buffer in the background. A cached mapping whose region was
//! freed is replaced by a new mapping.

use super::{buffer::transfer, pool::MAX_POOLED_BUFFER_BYTES};
use crate::{
    fabric::send::inflight::Direction,
    region::map::{open::OpenRequest, MapTerms, Mapping},
    rnic::Rnic,
    rpc::{channel::RpcChannel, ROOT_UID},
    session::Session,
    sys::{buffer::Buffer, deadline::Deadline},
};
use kernel::{prelude::*, sync::Arc};
use kite_core::rights::Rights;

/// Maximum time in milliseconds that a server waits until the caller's node has processed an unmap of a
/// buffer.
const UNMAP_TIMEOUT_MS: u32 = 1000;

/// Rendezvous buffer of a caller, mapped at the server's node for one call.
pub(super) struct MappedRendezvousBuffer<'a> {
    rnic: Arc<Rnic>,
    channel: &'a RpcChannel,
    /// `None` once the mapping is cached or unmapped.
    pub(super) mapping: Option<Arc<Mapping>>,
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
    pub(super) fn new(
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
        let request = OpenRequest {
            home: node,
            region,
            terms: MapTerms {
                uid: ROOT_UID,
                rights,
                outlives_fence: false,
            },
            deadline,
        };
        let mapped = request.run(&rpc.memory_service, events)?;
        buffer.mapping = Some(mapped);
        Ok(buffer)
    }

    /// Transfers data between the buffer and `memory`. See [`transfer`].
    pub(super) fn transfer(
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
    pub(super) fn cache_or_unmap(mut self) {
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
