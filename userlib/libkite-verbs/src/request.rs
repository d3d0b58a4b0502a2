// SPDX-License-Identifier: GPL-2.0 OR MIT
//! What a request that a program posts is for kite, if it is one.
//!
//! What verbs would refuse is refused. What it would only find out later is a request that fails in its turn.

use std::ffi::c_int;
use std::sync::Arc;

use kite::{Registered, RemoteMemory, Verb, Work};

use crate::header::*;
use crate::pair::Pair;
use crate::pieces::{self, Place, Through};

/// A request for kite.
pub(crate) struct Request {
    /// What it is when it is done.
    pub(crate) completion: ibv_wc,
    /// Whether the program wants to know.
    pub(crate) signalled: bool,
    verb: Verb,
    local: Arc<Registered>,
    at: usize,
    len: usize,
    remote: RemoteMemory,
    immediate: Option<u32>,
    fenced: bool,
    /// What its bytes go through, if they are in pieces.
    pub(crate) through: Option<Through>,
}

/// Local memory of a request: what kite has, from where on, and what that is instead of.
type Local = (Arc<Registered>, usize, Option<Through>);

/// Why a request is none for kite.
pub(crate) enum Refusal {
    /// It is refused.
    Now(c_int),
    /// It fails in its turn.
    Later(ibv_wc_status),
}

type Result<T> = std::result::Result<T, Refusal>;

/// What an operation is with kite, and what its completion is called.
pub(crate) fn operation(wr: &ibv_send_wr) -> Option<(Verb, ibv_wc_opcode)> {
    // SAFETY: of an atomic operation the program has said it, and any bits are numbers.
    let words = || unsafe { (wr.wr.atomic.compare_add, wr.wr.atomic.swap) };
    Some(match wr.opcode {
        IBV_WR_RDMA_WRITE | IBV_WR_RDMA_WRITE_WITH_IMM => (Verb::Write, IBV_WC_RDMA_WRITE),
        IBV_WR_SEND | IBV_WR_SEND_WITH_IMM => (Verb::Send, IBV_WC_SEND),
        IBV_WR_RDMA_READ => (Verb::Read, IBV_WC_RDMA_READ),
        IBV_WR_ATOMIC_CMP_AND_SWP => {
            let (expected, new) = words();
            (Verb::CompareSwap { expected, new }, IBV_WC_COMP_SWAP)
        }
        IBV_WR_ATOMIC_FETCH_AND_ADD => {
            let (operand, _) = words();
            (Verb::FetchAdd { operand }, IBV_WC_FETCH_ADD)
        }
        _ => return None,
    })
}

/// The remote memory of a request.
fn remote(wr: &ibv_send_wr, verb: Verb) -> RemoteMemory {
    let (addr, key) = match verb {
        Verb::Send => return RemoteMemory::default(),
        Verb::Read | Verb::Write => {
            // SAFETY: the program has said it of such requests, and any bits are numbers.
            let rdma = unsafe { wr.wr.rdma };
            (rdma.remote_addr, rdma.rkey)
        }
        Verb::CompareSwap { .. } | Verb::FetchAdd { .. } => {
            // SAFETY: likewise.
            let atomic = unsafe { wr.wr.atomic };
            (atomic.remote_addr, atomic.rkey)
        }
    };
    RemoteMemory { addr, key }
}

impl Request {
    pub(crate) fn work(&self, tag: u64) -> Work<'_> {
        Work {
            tag,
            verb: self.verb,
            local: &self.local,
            at: self.at,
            len: self.len,
            remote: self.remote,
            offset: 0,
            immediate: self.immediate,
            // So that it is known of each what became of it, and when.
            signalled: true,
            fenced: self.fenced,
        }
    }
}

impl Pair {
    /// What a request is for kite. There may be memory to spare for it.
    ///
    /// # Safety
    /// Its pointers are valid.
    pub(crate) unsafe fn request(
        &self,
        wr: &ibv_send_wr,
        tag: u64,
        spare: &mut Vec<Arc<Registered>>,
    ) -> Result<Request> {
        let has = |flag| wr.send_flags & flag != 0;
        let (verb, opcode) = operation(wr).ok_or(Refusal::Now(libc::EOPNOTSUPP))?;
        // SAFETY: there are so many, as the caller vouches.
        let list = unsafe { pieces::list(wr.sg_list, wr.num_sge) };
        if list.len() > self.cap.max_send_sge as usize || has(IBV_SEND_IP_CSUM) {
            return Err(Refusal::Now(libc::EINVAL));
        }
        let (remote, len) = (remote(wr, verb), pieces::total(list));
        // Of no bytes there need not be a pointer either.
        check(verb, len, &remote)?;
        let (local, at, through) = match has(IBV_SEND_INLINE) {
            // SAFETY: the caller vouches for it.
            true => unsafe { self.copy(verb, list, tag) }?,
            false => self.place(verb, list, spare)?,
        };
        let mut completion = self.completion(wr.wr_id, opcode);
        completion.byte_len = len as u32;
        let says = matches!(wr.opcode, IBV_WR_SEND_WITH_IMM | IBV_WR_RDMA_WRITE_WITH_IMM);
        // SAFETY: then the program has said it, and any bits are a number.
        let said = || u32::from_be(unsafe { wr.__bindgen_anon_1.imm_data });
        Ok(Request {
            completion,
            signalled: self.all_signalled || has(IBV_SEND_SIGNALED),
            verb,
            local,
            at,
            len: len as usize,
            remote,
            immediate: says.then(said),
            fenced: has(IBV_SEND_FENCE),
            through,
        })
    }

    /// Local memory of a request.
    fn place(
        &self,
        verb: Verb,
        list: &[ibv_sge],
        spare: &mut Vec<Arc<Registered>>,
    ) -> Result<Local> {
        let comes = !matches!(verb, Verb::Write | Verb::Send);
        match Place::find(self, list, comes) {
            Some(Place::One(piece)) => Ok((piece.registered().clone(), piece.at, None)),
            Some(Place::Many(pieces)) => {
                let through = Through::new(self, pieces, comes, spare);
                let through = through.map_err(|errno| Refusal::Now(errno.0))?;
                Ok((through.memory.clone(), 0, Some(through)))
            }
            None => Err(Refusal::Later(IBV_WC_LOC_PROT_ERR)),
        }
    }

    /// A copy of what a request is to send.
    ///
    /// # Safety
    /// The bytes of each piece are there.
    unsafe fn copy(&self, verb: Verb, list: &[ibv_sge], tag: u64) -> Result<Local> {
        let fits = pieces::total(list) <= u64::from(self.cap.max_inline_data);
        let copies = self.copies.as_ref().filter(|_| fits);
        let (Some(copies), Verb::Write | Verb::Send) = (copies, verb) else {
            return Err(Refusal::Now(libc::EINVAL));
        };
        // Whoever had the place before has ended: no more requests are under way than there are places.
        let at =
            (tag % u64::from(self.cap.max_send_wr)) as usize * self.cap.max_inline_data as usize;
        let mut to = at;
        for sge in list.iter().filter(|sge| sge.length != 0) {
            let (from, len) = (sge.addr as *const u8, sge.length as usize);
            // SAFETY: the caller vouches for it, and nobody writes them meanwhile who knows verbs.
            let bytes = unsafe { std::slice::from_raw_parts(from, len) };
            let stored = copies.memory().store(to, bytes);
            stored.map_err(|error| Refusal::Now(error.errno()))?;
            to += len;
        }
        Ok((copies.clone(), at, None))
    }
}

/// Refuses what kite has no request for, and what an RNIC does.
fn check(verb: Verb, len: u64, remote: &RemoteMemory) -> Result<()> {
    let atomic = matches!(verb, Verb::CompareSwap { .. } | Verb::FetchAdd { .. });
    match len {
        0 => Err(Refusal::Now(libc::EINVAL)),
        len if len > u64::from(u32::MAX) => Err(Refusal::Later(IBV_WC_LOC_LEN_ERR)),
        len if atomic && len != 8 => Err(Refusal::Later(IBV_WC_LOC_LEN_ERR)),
        _ if atomic && remote.addr % 8 != 0 => Err(Refusal::Later(IBV_WC_REM_INV_REQ_ERR)),
        _ => Ok(()),
    }
}
