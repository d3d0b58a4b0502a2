// SPDX-License-Identifier: GPL-2.0

//! Kernel-executed atomic operations on registered memory (MRs), for RNICs that do not offer RDMA atomics to
//! kernels.
//!
//! mlx5 offers atomics to peers over DC only, so a node without DC requests the operation from the peer's
//! kernel. The peer lets its RNIC execute the operation, or its CPU if the RNIC cannot. As for words of
//! regions ([`super::map::atomic`]), no operation is executed twice.

use super::MemoryService;
use crate::{
    control::client::ControlClient, fabric::mr::table::mr_access_errno, sys::deadline::Deadline,
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

impl MemoryService {
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
    pub(crate) fn atomic_via_owner(
        self: &Arc<Self>,
        instance: NodeInstance,
        word: MrWord,
        op: AtomicOp,
        deadline: Deadline,
    ) -> Result<u64> {
        let MrWord { mr_key, uid, addr } = word;
        let answer = self.request_exactly_once((), (instance, 0), deadline, |sequence| {
            ControlRequest::MrAtomic {
                sequence,
                mr_key,
                uid,
                addr,
                op,
            }
        })?;
        answer.old_value()
    }

    /// Executes an atomic operation on an MR of a local process for a peer. Returns the old value.
    ///
    /// # Errors
    ///
    /// See [`Self::atomic_via_owner`].
    pub(super) fn serve_mr_atomic(
        &self,
        node: u32,
        sequence: u64,
        word: MrWord,
        op: AtomicOp,
    ) -> Result<u64> {
        let peer = self.fabric().peer(node)?;
        Ok(peer.execute_once_unordered(sequence, || self.update_mr_word(word, op))?)
    }

    fn update_mr_word(&self, MrWord { mr_key, uid, addr }: MrWord, op: AtomicOp) -> Result<u64> {
        let fabric = self.fabric();
        let mr = fabric.mr_table.get(mr_key).map_err(|_| ENOENT)?;
        let needed = Rights::READ | Rights::WRITE;
        let allowed = mr.entry.check_access(uid, needed, addr, WORD_BYTES);
        allowed.map_err(mr_access_errno)?;
        Ok(fabric.atomic_engine.execute(&mr, addr, op)?)
    }
}
