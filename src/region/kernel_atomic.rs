// SPDX-License-Identifier: GPL-2.0

//! Kernel-executed atomic operations on registered memory (MRs), for RNICs that do not offer RDMA atomics to
//! kernels.
//!
//! mlx5 offers atomics to peers over DC only, so a node without DC requests the operation from the peer's
//! kernel. The peer lets its RNIC execute the operation, or its CPU if the RNIC cannot. As for words of
//! regions ([`super::map::atomic`]), no operation is executed twice.

use super::MemoryService;
use crate::{
    control::client::ControlClient,
    fabric::{mr::table::mr_access_errno, Fabric},
    sys::deadline::Deadline,
};
use kernel::{prelude::*, sync::Arc};
use kite_core::{
    atomic::{AtomicOp, WORD_BYTES},
    rights::Rights,
    view::NodeInstance,
    wire::ControlRequest,
};

/// Word of an MR, and the user for which the word is changed.
#[derive(Clone, Copy)]
pub(crate) struct MrWord {
    pub(crate) mr_key: u32,
    pub(crate) uid: u32,
    pub(crate) addr: u64,
}

impl MrWord {
    /// Requests an atomic operation from the node that owns the MR. Returns the old value.
    ///
    /// # Errors
    ///
    /// - `ENOENT`: the MR does not exist.
    /// - `EACCES`: the user may not change the word.
    /// - `ERANGE`: the word is not in the MR.
    /// - `ENXIO`: the owner's RNIC has atomics, but not for this RNIC.
    /// - `ETIMEDOUT`, `EINTR`: the outcome is unknown.
    /// - `EHOSTDOWN`: the owner left the view.
    /// - `EHOSTUNREACH`: the owner cannot be reached.
    /// - `ENOMEM`: out of memory.
    pub(crate) fn request_atomic(
        self,
        service: &Arc<MemoryService>,
        owner: NodeInstance,
        op: AtomicOp,
        deadline: Deadline,
    ) -> Result<u64> {
        let request = |sequence| ControlRequest::MrAtomic {
            sequence,
            mr_key: self.mr_key,
            uid: self.uid,
            addr: self.addr,
            op,
        };
        let reply = service.request_once((), (owner, 0), deadline, request)?;
        reply.old_value()
    }

    /// Executes an atomic operation on an MR of a local process. Returns the old value.
    ///
    /// # Errors
    ///
    /// See [`Self::request_atomic`].
    pub(super) fn update(self, fabric: &Fabric, op: AtomicOp) -> Result<u64> {
        let mr = fabric.mr_table.get(self.mr_key).map_err(|_| ENOENT)?;
        let needed = Rights::READ | Rights::WRITE;
        let allowed = mr
            .entry
            .check_access(self.uid, needed, self.addr, WORD_BYTES);
        allowed.map_err(mr_access_errno)?;
        Ok(fabric.atomic_engine.execute(&mr, self.addr, op)?)
    }
}
