// SPDX-License-Identifier: GPL-2.0

//! Atomic operations on registered memory that RNICs are asked for, and do not have for kernels.
//!
//! mlx5 has them by DC alone, so a node without DC asks the kernel of the other node, and is asked. Where there is DC
//! that one has its RNIC do them, and else nobody's does: then its processor may. As with words of regions
//! ([`super::atomic`]) none is done twice.

use super::Lmr;
use crate::{
    dc::work::Way,
    errno,
    fabric::memory::refused,
    sys::deadline::Deadline,
    verbs::work::{Remote, Verb},
};
use kernel::{prelude::*, sync::Arc};
use kite_core::{
    atomic::{Atomic, WORD},
    rights::Rights,
    view::Life,
    wire::Request,
};

/// How long a place among the requests to our RNIC may be waited for, before who asks does so again.
const RNIC_MS: u32 = 50;

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
        if fabric.dynamic().is_some() {
            let key = memory.record.rkey;
            return self.change_by_rnic(Remote { addr, key }, atomic);
        }
        if fabric.device().has_atomics() {
            return Err(ENXIO);
        }
        memory.change(addr, atomic)
    }

    /// Has our RNIC do it: it is atomic with what that does for others.
    fn change_by_rnic(&self, remote: Remote, atomic: Atomic) -> Result<u64> {
        let verb = match atomic {
            Atomic::FetchAdd { operand } => Verb::FetchAdd { operand },
            Atomic::CompareSwap { expected, operand } => Verb::CompareSwap {
                expected,
                new: operand,
            },
            Atomic::Swap { .. } => return Err(EINVAL),
        };
        let (fabric, own) = (self.fabric(), self.cluster.life_of(self.cluster.node()?)?);
        let dynamic = fabric.dynamic().ok_or(EINVAL)?;
        // Between two targets nothing is begun: a change of view waits for us.
        let name = dynamic.try_name().ok_or_else(errno::inprogress)?;
        let route = fabric.route(&*fabric.node_in(own)?)?;
        let way = Way::new(dynamic.hca(), &route, name)?;
        let deadline = Deadline::after_ms(RNIC_MS);
        fabric.fetch_atomic((own, &way), verb, remote, deadline)
    }
}
