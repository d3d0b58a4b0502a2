// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Translation of work requests to requests of kite.
//!
//! A request that verbs reject when it is posted is rejected. A request that verbs fail later is recorded, and fails in
//! its turn.

use std::ffi::c_int;
use std::sync::Arc;

use kite::{Mr, RemoteMemory, SendWr, WrOp};

use super::sge::{self, BounceBuffer, LocalBuffer};
use super::EmulatedQp;
use crate::header::*;

/// Request for kite.
pub(crate) struct PreparedWr {
    /// Completion of the request if it succeeds.
    pub(crate) completion: ibv_wc,
    /// The program requested a completion.
    pub(crate) signaled: bool,
    op: WrOp,
    local: Arc<Mr>,
    offset: usize,
    len: usize,
    remote: RemoteMemory,
    immediate: Option<u32>,
    fence: bool,
    /// Bounce buffer of a request with several segments.
    pub(crate) bounce: Option<BounceBuffer>,
}

/// Local memory of a request, the offset in it, and the bounce buffer if it is one.
type LocalSource = (Arc<Mr>, usize, Option<BounceBuffer>);

/// Reason why a work request is not pushed to kite.
pub(crate) enum WrRejection {
    /// Rejected when it is posted.
    AtPost(c_int),
    /// Fails when it completes.
    AtCompletion(ibv_wc_status),
}

type WrResult<T> = std::result::Result<T, WrRejection>;

/// Returns the operation of kite, and the opcode of its completion.
pub(crate) fn wr_op(wr: &ibv_send_wr) -> Option<(WrOp, ibv_wc_opcode)> {
    // SAFETY: the program sets the operands of an atomic operation, and any bits are valid numbers.
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

/// Returns the remote memory of a request.
fn remote_memory(wr: &ibv_send_wr, op: WrOp) -> RemoteMemory {
    let (addr, key) = match op {
        WrOp::Send => return RemoteMemory::default(),
        WrOp::Read | WrOp::Write => {
            // SAFETY: the program sets the field for these operations, and any bits are valid numbers.
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
            // Signaled in any case, so that the result of each request is known when it completes.
            signaled: true,
            fence: self.fence,
        }
    }
}

impl EmulatedQp {
    /// Translates a work request. `spare` has bounce buffers for reuse.
    ///
    /// # Safety
    /// The pointers of the request are valid.
    pub(crate) unsafe fn prepare_wr(
        &self,
        wr: &ibv_send_wr,
        tag: u64,
        spare: &mut Vec<Arc<Mr>>,
    ) -> WrResult<PreparedWr> {
        let has = |flag| wr.send_flags & flag != 0;
        let (op, opcode) = wr_op(wr).ok_or(WrRejection::AtPost(libc::EOPNOTSUPP))?;
        // SAFETY: there are `num_sge` entries, as the caller guarantees.
        let sges = unsafe { sge::sge_slice(wr.sg_list, wr.num_sge) };
        if sges.len() > self.cap.max_send_sge as usize || has(IBV_SEND_IP_CSUM) {
            return Err(WrRejection::AtPost(libc::EINVAL));
        }
        let (remote, len) = (remote_memory(wr, op), sge::total_len(sges));
        // Checked first: a request of length 0 needs no valid pointers.
        check_wr(op, len, &remote)?;
        let (local, offset, bounce) = match has(IBV_SEND_INLINE) {
            // SAFETY: guaranteed by the caller.
            true => unsafe { self.copy_inline(op, sges, tag) }?,
            false => self.local_source(op, sges, spare)?,
        };
        let mut completion = self.new_wc(wr.wr_id, opcode);
        completion.byte_len = len as u32;
        let has_imm = matches!(wr.opcode, IBV_WR_SEND_WITH_IMM | IBV_WR_RDMA_WRITE_WITH_IMM);
        // SAFETY: the program sets the field for these operations, and any bits are a valid number.
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

    /// Returns the local memory of a request.
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

    /// Copies the inline data of a request.
    ///
    /// # Safety
    /// The bytes of each SGE are readable.
    unsafe fn copy_inline(&self, op: WrOp, list: &[ibv_sge], tag: u64) -> WrResult<LocalSource> {
        let is_fitting = sge::total_len(list) <= u64::from(self.cap.max_inline_data);
        let inline_buffer = self.inline_buffer.as_ref().filter(|_| is_fitting);
        let (Some(inline_buffer), WrOp::Write | WrOp::Send) = (inline_buffer, op) else {
            return Err(WrRejection::AtPost(libc::EINVAL));
        };
        // The previous request of this slot has completed: there are as many slots as requests in flight.
        let offset =
            (tag % u64::from(self.cap.max_send_wr)) as usize * self.cap.max_inline_data as usize;
        let mut to = offset;
        for sge in list.iter().filter(|sge| sge.length != 0) {
            let (from, len) = (sge.addr as *const u8, sge.length as usize);
            // SAFETY: guaranteed by the caller; verbs forbid the program to write the bytes during the call.
            let bytes = unsafe { std::slice::from_raw_parts(from, len) };
            let stored = inline_buffer.buffer().store(to, bytes);
            stored.map_err(|error| WrRejection::AtPost(error.errno()))?;
            to += len;
        }
        Ok((inline_buffer.clone(), offset, None))
    }
}

/// Rejects a request that has no equivalent in kite, or that an RNIC rejects.
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
