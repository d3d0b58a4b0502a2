// SPDX-License-Identifier: GPL-2.0

//! Atomic operations on registered memory that RNICs are asked for, and do not have for kernels.
//!
//! mlx5 has them for peers by DC alone, so a node without DC asks the kernel of the other node, and is asked. That one
//! has its RNIC do them, or its processor if that cannot. As with words of regions ([`super::map::atomic`]) none is done
//! twice.

use super::MemoryService;
use crate::{fabric::mr::table::mr_access_errno, sys::deadline::Deadline};
use kernel::{prelude::*, sync::Arc};
use kite_core::{
    atomic::{AtomicOp, WORD_BYTES},
    rights::Rights,
    view::NodeInstance,
    wire::ControlRequest,
};

/// A word of registered memory, and who is to change it.
#[derive(Clone, Copy)]
pub(crate) struct MrWord {
    pub(crate) mr_key: u32,
    pub(crate) uid: u32,
    pub(crate) addr: u64,
}

impl MemoryService {
    /// Has a node change a word. Returns what it was.
    ///
    /// # Errors
    ///
    /// - `ENOENT` if there is no such memory; `EACCES`, `ERANGE`.
    /// - `ENXIO` if its RNIC has atomic operations, but not for ours.
    /// - `ETIMEDOUT`, `EINTR`, when it may have been done; `EHOSTDOWN`; `EHOSTUNREACH`; `ENOMEM`.
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

    /// Changes a word of memory that a process here has registered, for a peer. Returns what it was.
    ///
    /// # Errors
    ///
    /// As for [`Self::change`].
    pub(super) fn serve_mr_atomic(
        &self,
        node: u32,
        sequence: u64,
        word: MrWord,
        op: AtomicOp,
    ) -> Result<u64> {
        let peer = self.fabric().peer(node)?;
        peer.execute_once_unordered(sequence, || self.update_mr_word(word, op))
    }

    fn update_mr_word(&self, MrWord { mr_key, uid, addr }: MrWord, op: AtomicOp) -> Result<u64> {
        let fabric = self.fabric();
        let mr = fabric.mr_table.get(mr_key).map_err(|_| ENOENT)?;
        let needed = Rights::READ | Rights::WRITE;
        let allowed = mr.entry.check_access(uid, needed, addr, WORD_BYTES);
        allowed.map_err(mr_access_errno)?;
        fabric.execute_atomic(&mr, addr, op)
    }
}
