// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Send side: requests and completions.

use std::ffi::c_int;

use kite_rs::{Error, Mr, RemoteMemory, Result, SendWr, WrOp, PUSH_BATCH_MAX, VQP_DEPTH};

use super::mr::{find_mr, mr_offset};
use super::{find_queue, with_timeout, FLAG_FENCE, FLAG_SIGNALED, FLAG_WITH_IMM};
use crate::arguments::{array_from_c, array_mut_from_c, to_status};
use crate::process;

const OP_READ: u16 = 1;
const OP_WRITE: u16 = 2;
const OP_COMPARE_SWAP: u16 = 3;
const OP_FETCH_ADD: u16 = 4;
const OP_SEND: u16 = 5;

/// `struct kr_request`.
#[repr(C)]
#[derive(Clone, Copy)]
struct KrRequest {
    tag: u64,
    addr: u64,
    remote_addr: u64,
    operand: u64,
    expected: u64,
    len: u32,
    key: u32,
    remote_key: u32,
    op: u16,
    flags: u16,
}

/// `struct kr_completion`.
#[repr(C)]
struct KrCompletion {
    tag: u64,
    status: c_int,
}

impl KrRequest {
    /// Returns the work request.
    ///
    /// # Errors
    /// - [`Error::Invalid`]: the operation or a flag is unknown, or a field is set that the operation does not use.
    fn as_send_wr<'a>(&self, local: &'a Mr) -> Result<SendWr<'a>> {
        let has = |flag| self.flags & flag != 0;
        if self.flags & !(FLAG_SIGNALED | FLAG_FENCE | FLAG_WITH_IMM) != 0 {
            return Err(Error::Invalid);
        }
        let imm_data = || u32::try_from(self.operand).map_err(|_| Error::Invalid);
        let (op, operands) = match self.op {
            OP_READ => (WrOp::Read, 0),
            OP_WRITE => (WrOp::Write, 1),
            OP_COMPARE_SWAP => {
                let (expected, new) = (self.expected, self.operand);
                (WrOp::CompareSwap { expected, new }, 2)
            }
            OP_FETCH_ADD => {
                let operand = self.operand;
                (WrOp::FetchAdd { operand }, 1)
            }
            OP_SEND => (WrOp::Send, 1),
            _ => return Err(Error::Invalid),
        };
        let has_imm = has(FLAG_WITH_IMM);
        let never_has_imm = matches!(self.op, OP_READ | OP_COMPARE_SWAP | OP_FETCH_ADD);
        let has_unused_field = operands < 2 && self.expected != 0
            || operands < 1 && self.operand != 0
            || !never_has_imm && !has_imm && self.operand != 0;
        if has_unused_field || never_has_imm && has_imm {
            return Err(Error::Invalid);
        }
        Ok(SendWr {
            tag: self.tag,
            op,
            local,
            local_offset: mr_offset(local, self.addr),
            len: self.len as usize,
            remote: RemoteMemory {
                addr: self.remote_addr,
                rkey: self.remote_key,
            },
            remote_offset: 0,
            immediate: has_imm.then(imm_data).transpose()?,
            signaled: has(FLAG_SIGNALED),
            fence: has(FLAG_FENCE),
        })
    }
}

/// # Safety
/// `requests` must be NULL or point to `count` requests that no other thread writes during the call.
#[no_mangle]
unsafe extern "C" fn kr_push(qd: c_int, requests: *const KrRequest, count: c_int) -> c_int {
    let push = || {
        // SAFETY: the array is valid by the safety requirements.
        let requests = unsafe { array_from_c(requests, count) }?;
        let queue = find_queue(qd)?;
        if requests.len() > PUSH_BATCH_MAX {
            return Err(Error::Invalid);
        }
        let mrs = requests.iter().map(|request| find_mr(request.key));
        let mrs = mrs.collect::<Result<Vec<_>>>()?;
        let wrs = requests.iter().zip(&mrs);
        let wrs = wrs.map(|(request, local)| request.as_send_wr(local));
        queue.vqp()?.push(&wrs.collect::<Result<Vec<_>>>()?)?;
        Ok(0)
    };
    to_status(push())
}

/// # Safety
/// `request` must be NULL or point to a request that no other thread writes during the call.
#[no_mangle]
unsafe extern "C" fn kr_push_async(qd: c_int, lt_queue: i64, request: *const KrRequest) -> c_int {
    let push = || {
        // SAFETY: the pointer is valid by the safety requirements.
        let request = unsafe { array_from_c(request, 1) }?[0];
        let (queue, local) = (find_queue(qd)?, find_mr(request.key)?);
        let (vqp, wr) = (queue.vqp()?, request.as_send_wr(&local)?);
        process::with_queue(lt_queue, |lt_queue| lt_queue.push(vqp, &wr))
    };
    to_status(push().map(|()| 0))
}

/// # Safety
/// `to` must be NULL or point to `count` writable completions that no other thread accesses during the call.
#[no_mangle]
unsafe extern "C" fn kr_pop(
    qd: c_int,
    to: *mut KrCompletion,
    count: c_int,
    timeout_ms: c_int,
) -> c_int {
    let pop = || {
        // SAFETY: the array is valid by the safety requirements, and any bytes are valid completions.
        let to = unsafe { array_mut_from_c(to, count) }?;
        let max = to.len().min(VQP_DEPTH);
        let queue = find_queue(qd)?;
        let vqp = queue.vqp()?;
        let popped = with_timeout(timeout_ms, |timeout| vqp.pop(max, timeout))?;
        for (to, completion) in to.iter_mut().zip(&popped) {
            *to = KrCompletion {
                tag: completion.tag,
                status: to_status(completion.result.map(|_| 0)),
            };
        }
        Ok(popped.len() as c_int)
    };
    to_status(pop())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::size_of;
    use std::ptr::{null, null_mut};

    #[test]
    fn structure_sizes_match_the_header() {
        assert_eq!(size_of::<KrRequest>(), 56);
        assert_eq!(size_of::<KrCompletion>(), 16);
    }

    #[test]
    fn null_pointers_and_negative_counts_are_rejected() {
        // SAFETY: all pointers are NULL.
        unsafe {
            assert_eq!(kr_push(99, null(), 1), -libc::EFAULT);
            assert_eq!(kr_push_async(99, 1, null()), -libc::EFAULT);
            assert_eq!(kr_pop(99, null_mut(), -1, 0), -libc::EINVAL);
        }
    }
}
