// SPDX-License-Identifier: GPL-2.0

//! Rendezvous buffer at the caller's node: an anonymous region that holds the data of a call or its reply.
//!
//! # Recovery
//!
//! The drop frees the region in the background. The server's node can no longer reach the memory afterwards.

use crate::{
    fabric::send::inflight::Direction,
    region::{
        alloc::AllocRequest,
        map::{access::AccessRequest, Mapping},
    },
    rnic::Rnic,
    rpc::ROOT_UID,
    session::Session,
    sys::{buffer::Buffer, deadline::Deadline},
};
use kernel::{prelude::*, sync::Arc};
use kite_core::rights::Rights;

/// Transfers the first `len` bytes between a rendezvous buffer and `memory`.
///
/// # Errors
///
/// See [`AccessRequest::transfer`].
pub(super) fn transfer(
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
pub(in crate::session) struct RendezvousBuffer {
    rnic: Arc<Rnic>,
    pub(super) mapping: Arc<Mapping>,
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
    pub(super) fn new(session: &Session, len: u64) -> Result<Self> {
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
