// SPDX-License-Identifier: GPL-2.0 OR MIT
//! C functions that create queue pairs and change their states.

use std::ffi::c_int;
use std::sync::Arc;

use kite::VQP_DEPTH;

use super::{EmulatedQp, EmulatedQpState};
use crate::device::context;
use crate::errno::{errno_or_zero, ptr_or_null, Errno, Result};
use crate::header::*;
use crate::limits::{MAX_RECV_WR, MAX_SGE};
use crate::object::{self, CStruct};
use crate::poller::PolledQp;

impl CStruct for ibv_qp {
    type Inner = Arc<EmulatedQp>;
}

/// Maximum inline data of a request in bytes.
const MAX_INLINE_BYTES: u32 = 1024;

/// Minimum send queue depth. Some programs request less, and rely on an RNIC that grants more.
const MIN_SEND_WR: u32 = 16;

/// Rejects unsupported attributes.
fn check_init_attr(attr: &ibv_qp_init_attr) -> Result<()> {
    if attr.qp_type != IBV_QPT_RC || !attr.srq.is_null() {
        return Err(Errno(libc::EOPNOTSUPP));
    }
    let cap = &attr.cap;
    let fits = cap.max_send_wr <= VQP_DEPTH as u32
        && cap.max_recv_wr <= MAX_RECV_WR as u32
        && cap.max_send_sge <= MAX_SGE
        && cap.max_recv_sge <= MAX_SGE
        && cap.max_inline_data <= MAX_INLINE_BYTES;
    match fits && !attr.send_cq.is_null() && !attr.recv_cq.is_null() {
        true => Ok(()),
        false => Err(Errno(libc::EINVAL)),
    }
}

/// # Safety
/// The domain is live, and the attributes name live CQs or none.
#[no_mangle]
pub(crate) unsafe extern "C" fn ibv_create_qp(
    pd: *mut ibv_pd,
    attr: *mut ibv_qp_init_attr,
) -> *mut ibv_qp {
    // SAFETY: guaranteed by the caller.
    ptr_or_null(unsafe { create_qp(pd, &mut *attr) })
}

/// # Safety
/// See [`ibv_create_qp`].
unsafe fn create_qp(pd: *mut ibv_pd, attr: &mut ibv_qp_init_attr) -> Result<*mut ibv_qp> {
    check_init_attr(attr)?;
    let cap = &mut attr.cap;
    cap.max_send_wr = cap.max_send_wr.max(MIN_SEND_WR);
    cap.max_send_sge = cap.max_send_sge.max(1);
    cap.max_recv_sge = cap.max_recv_sge.max(1);
    // SAFETY: guaranteed by the caller for all of them.
    let (session, inner_pd, cqs) = unsafe {
        let cqs = [object::inner(attr.send_cq), object::inner(attr.recv_cq)];
        (context::session((*pd).context), object::inner(pd), cqs)
    };
    let options = (attr.cap, attr.sq_sig_all != 0);
    let inner = EmulatedQp::new(session, inner_pd, cqs, options)?;
    let polled_qp: Arc<dyn PolledQp> = inner.clone();
    for cq in cqs {
        cq.attach_qp(&polled_qp);
    }
    inner_pd.add_user();
    let qp = ibv_qp {
        // SAFETY: as above.
        context: unsafe { (*pd).context },
        qp_context: attr.qp_context,
        pd,
        send_cq: attr.send_cq,
        recv_cq: attr.recv_cq,
        handle: inner.qpn,
        qp_num: inner.qpn,
        state: IBV_QPS_RESET,
        qp_type: attr.qp_type,
        ..Default::default()
    };
    Ok(object::into_raw(qp, inner))
}

/// Returns the attributes that a transition requires (InfiniBand Architecture, volume 1, 11.2.5.2).
fn required_attr_mask(from: ibv_qp_state, to: ibv_qp_state) -> Result<u32> {
    match (from, to) {
        (_, IBV_QPS_RESET | IBV_QPS_ERR) | (IBV_QPS_RTS, IBV_QPS_RTS) => Ok(0),
        (IBV_QPS_RESET, IBV_QPS_INIT) => Ok(IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
        (IBV_QPS_INIT, IBV_QPS_INIT) => Ok(0),
        (IBV_QPS_INIT, IBV_QPS_RTR) => Ok(IBV_QP_AV
            | IBV_QP_PATH_MTU
            | IBV_QP_DEST_QPN
            | IBV_QP_RQ_PSN
            | IBV_QP_MAX_DEST_RD_ATOMIC
            | IBV_QP_MIN_RNR_TIMER),
        (IBV_QPS_RTR, IBV_QPS_RTS) => Ok(IBV_QP_TIMEOUT
            | IBV_QP_RETRY_CNT
            | IBV_QP_RNR_RETRY
            | IBV_QP_SQ_PSN
            | IBV_QP_MAX_QP_RD_ATOMIC),
        _ => Err(Errno(libc::EINVAL)),
    }
}

/// Copies the attributes of a mask.
fn merge_attr(to: &mut ibv_qp_attr, from: &ibv_qp_attr, mask: u32) {
    macro_rules! copy_fields {
        ($($flag:ident: $($field:ident)*;)*) => {
            $(if mask & $flag != 0 { $(to.$field = from.$field;)* })*
        };
    }
    copy_fields! {
        IBV_QP_STATE: qp_state;
        IBV_QP_ACCESS_FLAGS: qp_access_flags;
        IBV_QP_PKEY_INDEX: pkey_index;
        IBV_QP_PORT: port_num;
        IBV_QP_AV: ah_attr;
        IBV_QP_PATH_MTU: path_mtu;
        IBV_QP_DEST_QPN: dest_qp_num;
        IBV_QP_RQ_PSN: rq_psn;
        IBV_QP_SQ_PSN: sq_psn;
        IBV_QP_MAX_QP_RD_ATOMIC: max_rd_atomic;
        IBV_QP_MAX_DEST_RD_ATOMIC: max_dest_rd_atomic;
        IBV_QP_MIN_RNR_TIMER: min_rnr_timer;
        IBV_QP_TIMEOUT: timeout;
        IBV_QP_RETRY_CNT: retry_cnt;
        IBV_QP_RNR_RETRY: rnr_retry;
    }
}

/// Changes the state or the attributes of a QP. Returns its state.
fn modify_qp(qp: &EmulatedQp, attr: &ibv_qp_attr, mask: u32) -> Result<ibv_qp_state> {
    let to_reset = mask & IBV_QP_STATE != 0 && attr.qp_state == IBV_QPS_RESET;
    if to_reset {
        qp.reset()?;
        return Ok(IBV_QPS_RESET);
    }
    qp.with_locked(|state| apply_transition(qp, state, attr, mask))
}

fn apply_transition(
    qp: &EmulatedQp,
    state: &mut EmulatedQpState,
    attr: &ibv_qp_attr,
    mask: u32,
) -> Result<ibv_qp_state> {
    let from = state.attr.qp_state;
    let to = match mask & IBV_QP_STATE {
        0 => from,
        _ => attr.qp_state,
    };
    let required = required_attr_mask(from, to)?;
    if mask & required != required {
        return Err(Errno(libc::EINVAL));
    }
    if (from, to) == (IBV_QPS_INIT, IBV_QPS_RTR) {
        let node = qp.session.node_at(&attr.ah_attr)?;
        state.connect(qp, node, attr.dest_qp_num)?;
    }
    if to == IBV_QPS_ERR {
        state.fail(qp);
    }
    merge_attr(&mut state.attr, attr, mask);
    Ok(to)
}

/// # Safety
/// The queue pair is live, and the attributes are readable.
#[no_mangle]
pub(crate) unsafe extern "C" fn ibv_modify_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    mask: c_int,
) -> c_int {
    // SAFETY: guaranteed by the caller.
    let (inner, attr) = unsafe { (object::inner(qp), &*attr) };
    errno_or_zero(modify_qp(inner, attr, mask as u32).map(|state| {
        // SAFETY: likewise.
        unsafe { (*qp).state = state };
    }))
}

/// # Safety
/// The queue pair is live, and there is room for the attributes.
#[no_mangle]
unsafe extern "C" fn ibv_query_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    _mask: c_int,
    init_attr: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: guaranteed by the caller.
    let (inner, c_qp) = unsafe { (object::inner(qp), &*qp) };
    let mut found = inner.with_locked(|state| state.attr);
    found.cur_qp_state = found.qp_state;
    found.cap = inner.cap;
    let init = ibv_qp_init_attr {
        qp_context: c_qp.qp_context,
        send_cq: c_qp.send_cq,
        recv_cq: c_qp.recv_cq,
        cap: inner.cap,
        qp_type: c_qp.qp_type,
        sq_sig_all: inner.all_signaled.into(),
        ..Default::default()
    };
    // SAFETY: likewise.
    unsafe {
        (*qp).state = found.qp_state;
        attr.write(found);
        init_attr.write(init);
    }
    0
}

/// # Safety
/// The argument comes from [`ibv_create_qp`].
#[no_mangle]
pub(crate) unsafe extern "C" fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int {
    // SAFETY: guaranteed by the caller.
    let inner = unsafe { object::from_raw(qp) };
    // Waits for a thread that polls the QP, since the program may free memory that such a poll accesses.
    inner.with_locked(EmulatedQpState::clear);
    let polled_qp: Arc<dyn PolledQp> = inner.clone();
    inner.session.remove_qp(&polled_qp);
    for cq in [&inner.send_cq, &inner.recv_cq] {
        cq.detach_qp(&polled_qp);
    }
    inner.pd.remove_user();
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transitions_outside_the_ib_state_diagram_are_rejected() {
        let rejected = Err(Errno(libc::EINVAL));
        for from in IBV_QPS_RESET..=IBV_QPS_ERR {
            for to in IBV_QPS_RESET..=IBV_QPS_ERR {
                let is_allowed = to == IBV_QPS_RESET
                    || to == IBV_QPS_ERR
                    || to == from + 1 && from < IBV_QPS_RTS
                    || to == from && [IBV_QPS_INIT, IBV_QPS_RTS].contains(&from);
                assert_eq!(
                    required_attr_mask(from, to) != rejected,
                    is_allowed,
                    "{from} to {to}"
                );
            }
        }
    }

    #[test]
    fn merge_attr_copies_only_masked_attributes() {
        let mut attr = ibv_qp_attr::default();
        let new_attr = ibv_qp_attr {
            dest_qp_num: 7,
            timeout: 14,
            ..Default::default()
        };
        merge_attr(&mut attr, &new_attr, IBV_QP_DEST_QPN);
        assert_eq!((attr.dest_qp_num, attr.timeout), (7, 0));
    }
}
