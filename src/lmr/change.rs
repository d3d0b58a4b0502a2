// SPDX-License-Identifier: GPL-2.0

//! Atomic operations on registered memory that RNICs are asked for, and do not have for kernels.
//!
//! mlx5 has them for peers by DC alone, so a node without DC asks the kernel of the other node, and is asked. That one
//! has its RNIC do them, or its processor if that cannot. As with words of regions ([`super::atomic`]) none is done
//! twice.

use super::Lmr;
use crate::{fabric::memory::refused, sys::deadline::Deadline};
use kernel::{prelude::*, sync::Arc};
use kite_core::{
    atomic::{Atomic, WORD},
    rights::Rights,
    view::Life,
    wire::Request,
};

/// A word of registered memory, and who is to change it.
#[derive(Clone, Copy)]
pub(crate) struct Word {
    pub(crate) key: u32,
    pub(crate) uid: u32,
    pub(crate) addr: u64,
}

impl Lmr {
    /// Has a node change a word. Returns what it was.
    ///
    /// # Errors
    ///
    /// - `ENOENT` if there is no such memory; `EACCES`, `ERANGE`.
    /// - `ENXIO` if its RNIC has atomic operations, but not for ours.
    /// - `ETIMEDOUT`, `EINTR`, when it may have been done; `EHOSTDOWN`; `EHOSTUNREACH`; `ENOMEM`.
    pub(crate) fn change(
        self: &Arc<Self>,
        life: Life,
        word: Word,
        atomic: Atomic,
        deadline: Deadline,
    ) -> Result<u64> {
        let Word { key, uid, addr } = word;
        let answer = self.ask_numbered((), (life, 0), deadline, |number| Request::Change {
            number,
            key,
            uid,
            addr,
            atomic,
        })?;
        answer.was()
    }

    /// Changes a word of memory that a process here has registered, for a peer. Returns what it was.
    ///
    /// # Errors
    ///
    /// As for [`Self::change`].
    pub(super) fn serve_change(
        &self,
        node: u32,
        number: u64,
        word: Word,
        atomic: Atomic,
    ) -> Result<u64> {
        let peer = self.fabric().peer(node)?;
        peer.once_apart(number, || self.change_registered(word, atomic))
    }

    fn change_registered(&self, Word { key, uid, addr }: Word, atomic: Atomic) -> Result<u64> {
        let fabric = self.fabric();
        let memory = fabric.memories.get(key).map_err(|_| ENOENT)?;
        let needed = Rights::READ | Rights::WRITE;
        let allowed = memory.record.check(uid, needed, addr, WORD);
        allowed.map_err(refused)?;
        fabric.change_registered(&memory, addr, atomic)
    }
}
