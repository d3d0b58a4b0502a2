// SPDX-License-Identifier: GPL-2.0 OR MIT
//! What a request that a program posts is for kite, if it is one.
//!
//! What verbs would refuse is refused. What it would only find out later is a request that fails in its turn.

use std::ffi::c_int;
use std::sync::Arc;

use kite::{Mr, RemoteMemory, SendWr, WrOp};

use crate::header::*;
use crate::pair::EmulatedQp;
use crate::pieces::{self, BounceBuffer, LocalBuffer};

/// A request for kite.
pub(crate) struct PreparedWr {
    /// What it is when it is done.
    pub(crate) completion: ibv_wc,
    /// Whether the program wants to know.
    pub(crate) signaled: bool,
    op: WrOp,
    local: Arc<Mr>,
    offset: usize,
    len: usize,
    remote: RemoteMemory,
    immediate: Option<u32>,
    fence: bool,
    /// What its bytes go through, if they are in pieces.
    pub(crate) bounce: Option<BounceBuffer>,
}

/// Local memory of a request: what kite has, from where on, and what that is instead of.
type LocalSource = (Arc<Mr>, usize, Option<BounceBuffer>);

/// Why a request is none for kite.
pub(crate) enum WrRejection {
    /// It is refused.
    AtPost(c_int),
    /// It fails in its turn.
    AtCompletion(ibv_wc_status),
}

type WrResult<T> = std::result::Result<T, WrRejection>;

/// What an operation is with kite, and what its completion is called.
pub(crate) fn wr_op(wr: &ibv_send_wr) -> Option<(WrOp, ibv_wc_opcode)> {
    // SAFETY: of an atomic operation the program has said it, and any bits are numbers.
    let operands = || unsafe { (wr.wr.atomic.compare_add, wr.wr.atomic.swap) };
    Some(match wr.opcode {
        IBV_WR_RDMA_WRITE | IBV_WR_RDMA_WRITE_WITH_IMM => (WrOp::Write, IBV_WC_RDMA_WRITE),
        IBV_WR_SEND | IBV_WR_SEND_WITH_IMM => (WrOp::Send, IBV_WC_SEND),
        IBV_WR_RDMA_READ => (WrOp::Read, IBV_WC_RDMA_READ),
        IBV_WR_ATOMIC_CMP_AND_SWP => {
            let (expected, new) = operands();
            (WrOp::CompareSwap { expected, new }, IBV_WC_COMP_SWAP)
        }
        IBV_WR_ATOMIC_FETCH_AND_ADD => {
            let (operand, _) = operands();
            (WrOp::FetchAdd { operand }, IBV_WC_FETCH_ADD)
        }
        _ => return None,
    })
}

/// The remote memory of a request.
fn remote_memory(wr: &ibv_send_wr, op: WrOp) -> RemoteMemory {
    let (addr, key) = match op {
        WrOp::Send => return RemoteMemory::default(),
        WrOp::Read | WrOp::Write => {
            // SAFETY: the program has said it of such requests, and any bits are numbers.
            let rdma = unsafe { wr.wr.rdma };
            (rdma.remote_addr, rdma.rkey)
        }
        WrOp::CompareSwap { .. } | WrOp::FetchAdd { .. } => {
            // SAFETY: likewise.
            let atomic = unsafe { wr.wr.atomic };
            (atomic.remote_addr, atomic.rkey)
        }
    };
    RemoteMemory { addr, rkey: key }
}

impl PreparedWr {
    pub(crate) fn to_send_wr(&self, tag: u64) -> SendWr<'_> {
        SendWr {
            tag,
            op: self.op,
            local: &self.local,
            local_offset: self.offset,
            len: self.len,
            remote: self.remote,
            remote_offset: 0,
            immediate: self.immediate,
            // So that it is known of each what became of it, and when.
            signaled: true,
            fence: self.fence,
        }
    }
}

impl EmulatedQp {
    /// What a request is for kite. There may be memory to spare for it.
    ///
    /// # Safety
    /// Its pointers are valid.
    pub(crate) unsafe fn prepare_wr(
        &self,
        wr: &ibv_send_wr,
        tag: u64,
        spare: &mut Vec<Arc<Mr>>,
    ) -> WrResult<PreparedWr> {
        let has = |flag| wr.send_flags & flag != 0;
        let (op, opcode) = wr_op(wr).ok_or(WrRejection::AtPost(libc::EOPNOTSUPP))?;
        // SAFETY: there are so many, as the caller vouches.
        let sges = unsafe { pieces::sge_slice(wr.sg_list, wr.num_sge) };
        if sges.len() > self.cap.max_send_sge as usize || has(IBV_SEND_IP_CSUM) {
            return Err(WrRejection::AtPost(libc::EINVAL));
        }
        let (remote, len) = (remote_memory(wr, op), pieces::total_len(sges));
        // Of no bytes there need not be a pointer either.
        check_wr(op, len, &remote)?;
        let (local, offset, bounce) = match has(IBV_SEND_INLINE) {
            // SAFETY: the caller vouches for it.
            true => unsafe { self.copy_inline(op, sges, tag) }?,
            false => self.local_source(op, sges, spare)?,
        };
        let mut completion = self.new_wc(wr.wr_id, opcode);
        completion.byte_len = len as u32;
        let has_imm = matches!(wr.opcode, IBV_WR_SEND_WITH_IMM | IBV_WR_RDMA_WRITE_WITH_IMM);
        // SAFETY: then the program has said it, and any bits are a number.
        let imm_data = || u32::from_be(unsafe { wr.__bindgen_anon_1.imm_data });
        Ok(PreparedWr {
            completion,
            signaled: self.all_signaled || has(IBV_SEND_SIGNALED),
            op,
            local,
            offset,
            len: len as usize,
            remote,
            immediate: has_imm.then(imm_data),
            fence: has(IBV_SEND_FENCE),
            bounce,
        })
    }

    /// Local memory of a request.
    fn local_source(
        &self,
        op: WrOp,
        list: &[ibv_sge],
        spare: &mut Vec<Arc<Mr>>,
    ) -> WrResult<LocalSource> {
        let is_inbound = !matches!(op, WrOp::Write | WrOp::Send);
        match LocalBuffer::lookup(self, list, is_inbound) {
            Some(LocalBuffer::Contiguous(segment)) => {
                Ok((segment.kite_mr().clone(), segment.offset, None))
            }
            Some(LocalBuffer::Scattered(segments)) => {
                let bounce = BounceBuffer::new(self, segments, is_inbound, spare);
                let bounce = bounce.map_err(|errno| WrRejection::AtPost(errno.0))?;
                Ok((bounce.mr.clone(), 0, Some(bounce)))
            }
            None => Err(WrRejection::AtCompletion(IBV_WC_LOC_PROT_ERR)),
        }
    }

    /// A copy of what a request is to send.
    ///
    /// # Safety
    /// The bytes of each piece are there.
    unsafe fn copy_inline(&self, op: WrOp, list: &[ibv_sge], tag: u64) -> WrResult<LocalSource> {
        let is_fitting = pieces::total_len(list) <= u64::from(self.cap.max_inline_data);
        let inline_buffer = self.inline_buffer.as_ref().filter(|_| is_fitting);
        let (Some(inline_buffer), WrOp::Write | WrOp::Send) = (inline_buffer, op) else {
            return Err(WrRejection::AtPost(libc::EINVAL));
        };
        // Whoever had the place before has ended: no more requests are under way than there are places.
        let offset =
            (tag % u64::from(self.cap.max_send_wr)) as usize * self.cap.max_inline_data as usize;
        let mut to = offset;
        for sge in list.iter().filter(|sge| sge.length != 0) {
            let (from, len) = (sge.addr as *const u8, sge.length as usize);
            // SAFETY: the caller vouches for it, and nobody writes them meanwhile who knows verbs.
            let bytes = unsafe { std::slice::from_raw_parts(from, len) };
            let stored = inline_buffer.buffer().store(to, bytes);
            stored.map_err(|error| WrRejection::AtPost(error.errno()))?;
            to += len;
        }
        Ok((inline_buffer.clone(), offset, None))
    }
}

/// Refuses what kite has no request for, and what an RNIC does.
fn check_wr(op: WrOp, len: u64, remote: &RemoteMemory) -> WrResult<()> {
    let atomic = matches!(op, WrOp::CompareSwap { .. } | WrOp::FetchAdd { .. });
    match len {
        0 => Err(WrRejection::AtPost(libc::EINVAL)),
        len if len > u64::from(u32::MAX) => Err(WrRejection::AtCompletion(IBV_WC_LOC_LEN_ERR)),
        len if atomic && len != 8 => Err(WrRejection::AtCompletion(IBV_WC_LOC_LEN_ERR)),
        _ if atomic && remote.addr % 8 != 0 => {
            Err(WrRejection::AtCompletion(IBV_WC_REM_INV_REQ_ERR))
        }
        _ => Ok(()),
    }
}
