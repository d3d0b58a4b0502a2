// SPDX-License-Identifier: GPL-2.0 OR MIT
//! QPs of identifiers, and the attributes to connect QPs of programs.

use std::ffi::{c_int, c_void};
use std::ptr;

use super::cm_id::CmId;
use crate::channel::{ibv_create_comp_channel, ibv_destroy_comp_channel};
use crate::cq::{ibv_create_cq, ibv_destroy_cq};
use crate::device::query;
use crate::errno::{zero_or_minus_one, Errno, Result};
use crate::header::*;
use crate::limits::PORT_NUM;
use crate::object;
use crate::qp::verbs::{ibv_create_qp, ibv_destroy_qp, ibv_modify_qp};
use crate::qp::QPN_RANGE;

/// Returns a pointer, or for NULL the errno of the function that returned it.
fn check_not_null<T>(ptr: *mut T) -> Result<*mut T> {
    match ptr.is_null() {
        true => Err(crate::errno::last_errno()),
        false => Ok(ptr),
    }
}

/// Returns the number of the QP of an identifier, if it has one.
///
/// # Safety
/// The identifier is live.
pub(super) unsafe fn qpn(raw: *mut rdma_cm_id) -> Option<u32> {
    // SAFETY: guaranteed by the caller.
    unsafe { (*raw).qp.as_ref() }.map(|qp| qp.qp_num)
}

/// Returns the attributes of a QP for the transition to a state, and their mask.
///
/// # Errors
/// `EINVAL` if the remote end is unknown, or has sent no valid QP number.
fn attr_for_state(id: &CmId, to: ibv_qp_state) -> Result<(ibv_qp_attr, u32)> {
    let mut attr = ibv_qp_attr {
        qp_state: to,
        port_num: PORT_NUM,
        qp_access_flags: IBV_ACCESS_REMOTE_READ
            | IBV_ACCESS_REMOTE_WRITE
            | IBV_ACCESS_REMOTE_ATOMIC,
        ..Default::default()
    };
    let mask = match to {
        IBV_QPS_INIT => IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
        IBV_QPS_RTR => {
            set_remote_attr(id, &mut attr)?;
            IBV_QP_AV
                | IBV_QP_PATH_MTU
                | IBV_QP_DEST_QPN
                | IBV_QP_RQ_PSN
                | IBV_QP_MAX_DEST_RD_ATOMIC
                | IBV_QP_MIN_RNR_TIMER
        }
        IBV_QPS_RTS => {
            set_remote_attr(id, &mut attr)?;
            IBV_QP_TIMEOUT
                | IBV_QP_RETRY_CNT
                | IBV_QP_RNR_RETRY
                | IBV_QP_SQ_PSN
                | IBV_QP_MAX_QP_RD_ATOMIC
        }
        IBV_QPS_ERR => 0,
        _ => return Err(Errno(libc::EINVAL)),
    };
    Ok((attr, IBV_QP_STATE | mask))
}

/// Sets the attributes that depend on the remote end.
fn set_remote_attr(id: &CmId, attr: &mut ibv_qp_attr) -> Result<()> {
    let (node, remote) =
        id.with_locked(|state| (state.remote_node, state.remote_param.as_peer_sees()));
    // Other ports are not those of QPs, and the remote end may send any number.
    if !QPN_RANGE.contains(&remote.qp_num) {
        return Err(Errno(libc::EINVAL));
    }
    let view = id.manager.cluster.view()?;
    let found = view.members.iter().find(|member| member.node == node);
    let address = found.ok_or(Errno(libc::EHOSTUNREACH))?.address;
    attr.dest_qp_num = remote.qp_num;
    attr.max_dest_rd_atomic = remote.responder_resources;
    attr.max_rd_atomic = remote.initiator_depth;
    attr.retry_cnt = remote.retry_count;
    attr.rnr_retry = remote.rnr_retry_count;
    attr.path_mtu = query::mtu_to_ibv(address.mtu);
    attr.ah_attr.dlid = address.lid;
    attr.ah_attr.port_num = PORT_NUM;
    attr.ah_attr.is_global = 1;
    attr.ah_attr.grh.dgid.raw = address.gid.octets();
    Ok(())
}

/// Moves the QP of an identifier to a state.
///
/// # Safety
/// The identifier and its QP are live.
unsafe fn modify_to(raw: *mut rdma_cm_id, to: ibv_qp_state) -> Result<()> {
    // SAFETY: guaranteed by the caller.
    let (mut attr, mask) = attr_for_state(&unsafe { object::inner(raw) }.id, to)?;
    // SAFETY: likewise.
    match unsafe { ibv_modify_qp((*raw).qp, &mut attr, mask as c_int) } {
        0 => Ok(()),
        errno => Err(Errno(errno)),
    }
}

/// Lets the user that has requested the connection own the remote QP.
///
/// # Safety
/// See [`connect`].
unsafe fn allow_requester(raw: *mut rdma_cm_id) {
    // SAFETY: guaranteed by the caller.
    let (id, qp) = unsafe { (&object::inner(raw).id, object::inner((*raw).qp)) };
    if let Some(uid) = id.with_locked(|state| state.requester_uid) {
        qp.with_locked(|state| state.peer_user = state.peer_user.for_requester(uid));
    }
}

/// Connects the QP of an identifier to the remote QP.
///
/// # Safety
/// The identifier is live, and has a QP.
pub(super) unsafe fn connect(raw: *mut rdma_cm_id) -> Result<()> {
    // SAFETY: guaranteed by the caller.
    unsafe { allow_requester(raw) };
    // SAFETY: likewise.
    unsafe { modify_to(raw, IBV_QPS_RTR).and_then(|()| modify_to(raw, IBV_QPS_RTS)) }
}

/// Flushes the requests of the QP of an identifier.
///
/// # Safety
/// See [`connect`].
pub(super) unsafe fn fail(raw: *mut rdma_cm_id) -> Result<()> {
    // SAFETY: guaranteed by the caller.
    unsafe { modify_to(raw, IBV_QPS_ERR) }
}

/// # Safety
/// The identifier is live, and both results may be written. The attributes contain the state.
#[no_mangle]
unsafe extern "C" fn rdma_init_qp_attr(
    raw: *mut rdma_cm_id,
    attr: *mut ibv_qp_attr,
    mask: *mut c_int,
) -> c_int {
    // SAFETY: guaranteed by the caller.
    let found = attr_for_state(unsafe { &object::inner(raw).id }, unsafe {
        (*attr).qp_state
    });
    zero_or_minus_one(found.map(|(found, which)| {
        // SAFETY: likewise.
        unsafe {
            attr.write(found);
            mask.write(which as c_int);
        }
    }))
}

/// Creates a CQ and its channel, which the identifier owns.
///
/// # Safety
/// The context is open, and the slots belong to a live identifier.
unsafe fn create_cq(
    verbs: *mut ibv_context,
    context: *mut c_void,
    depth: u32,
    (channel, cq): (&mut *mut ibv_comp_channel, &mut *mut ibv_cq),
) -> Result<*mut ibv_cq> {
    // SAFETY: guaranteed by the caller.
    unsafe {
        *channel = check_not_null(ibv_create_comp_channel(verbs))?;
        let depth = depth.max(1) as c_int;
        *cq = check_not_null(ibv_create_cq(verbs, depth, context, *channel, 0))?;
    }
    Ok(*cq)
}

/// Creates CQs of the identifier, where the program has given none.
///
/// # Safety
/// The identifier is live.
unsafe fn create_missing_cqs(id: &mut rdma_cm_id, attr: &mut ibv_qp_init_attr) -> Result<()> {
    let context = ptr::from_mut(id).cast();
    if attr.send_cq.is_null() {
        let slots = (&mut id.send_cq_channel, &mut id.send_cq);
        // SAFETY: guaranteed by the caller.
        attr.send_cq = unsafe { create_cq(id.verbs, context, attr.cap.max_send_wr, slots)? };
    }
    if attr.recv_cq.is_null() {
        let slots = (&mut id.recv_cq_channel, &mut id.recv_cq);
        // SAFETY: likewise.
        attr.recv_cq = unsafe { create_cq(id.verbs, context, attr.cap.max_recv_wr, slots)? };
    }
    Ok(())
}

/// Destroys the CQs of [`create_missing_cqs`].
///
/// # Safety
/// The identifier is live, and no QP uses the CQs.
unsafe fn destroy_own_cqs(id: &mut rdma_cm_id) {
    for cq in [&mut id.send_cq, &mut id.recv_cq] {
        if !cq.is_null() {
            // SAFETY: guaranteed by the caller.
            unsafe { ibv_destroy_cq(std::mem::replace(cq, ptr::null_mut())) };
        }
    }
    for channel in [&mut id.send_cq_channel, &mut id.recv_cq_channel] {
        if !channel.is_null() {
            // SAFETY: likewise.
            unsafe { ibv_destroy_comp_channel(std::mem::replace(channel, ptr::null_mut())) };
        }
    }
}

/// # Safety
/// The identifier is live, the domain is live or NULL, and the attributes name live CQs or none.
#[no_mangle]
pub(super) unsafe extern "C" fn rdma_create_qp(
    raw: *mut rdma_cm_id,
    pd: *mut ibv_pd,
    attr: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: guaranteed by the caller.
    zero_or_minus_one(unsafe { create_qp(raw, pd, &mut *attr) })
}

/// # Safety
/// See [`rdma_create_qp`].
unsafe fn create_qp(
    raw: *mut rdma_cm_id,
    pd: *mut ibv_pd,
    attr: &mut ibv_qp_init_attr,
) -> Result<()> {
    // SAFETY: guaranteed by the caller.
    let id = unsafe { &mut *raw };
    if !id.qp.is_null() || id.verbs.is_null() {
        return Err(Errno(libc::EINVAL));
    }
    if !pd.is_null() {
        id.pd = pd;
    }
    let program_cqs = (attr.send_cq, attr.recv_cq);
    // SAFETY: likewise.
    let mut try_create = || unsafe {
        // All objects of a QP must belong to the same open device.
        if (*id.pd).context != id.verbs {
            return Err(Errno(libc::EINVAL));
        }
        create_missing_cqs(id, attr)?;
        id.qp = check_not_null(ibv_create_qp(id.pd, attr))?;
        modify_to(raw, IBV_QPS_INIT)
    };
    let result = try_create();
    if result.is_err() {
        // SAFETY: likewise.
        unsafe { rdma_destroy_qp(raw) };
        (attr.send_cq, attr.recv_cq) = program_cqs;
    }
    result
}

/// # Safety
/// The identifier is live.
#[no_mangle]
pub(super) unsafe extern "C" fn rdma_destroy_qp(raw: *mut rdma_cm_id) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let qp = std::mem::replace(&mut (*raw).qp, ptr::null_mut());
        if !qp.is_null() {
            ibv_destroy_qp(qp);
        }
        destroy_own_cqs(&mut *raw);
    }
}
