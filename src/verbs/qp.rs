// SPDX-License-Identifier: GPL-2.0

//! Queue pairs: RC and UD, and their state transitions.
//!
//! # Locking
//!
//! `Qp::modify_lock` (mutex) serializes the transitions of one QP. The holder sleeps in the driver, and takes
//! no other lock of kite. Callers may hold a mutex, for example `Vqp::state` while the QP of a batch is
//! recovered. Posting is locked in the driver.

use super::{
    address::AddressHandle,
    cq::{CompletionHandler, Cq},
    device::{IbDevice, PortNum},
    mr::FastRegMr,
    pd::Pd,
    work::{OwnedSendWr, SendWr, Sge, UdSendWr},
    RESTRACK_OWNER,
};
use crate::bindings::{self, inline};
use core::ptr::NonNull;
use kernel::{
    error::{from_err_ptr, to_result},
    new_mutex,
    prelude::*,
    sync::{Arc, Mutex},
};

/// Local ACK timeout code: 4.096 µs · 2^14 = 67 ms. It is far above any round trip, and short enough for a
/// lossy network. Seven attempts bound the wait for a dead peer to half a second. If the peer is only busy,
/// the timeout costs a new QP and a retry. [`RETRY_COUNT`] must stay below 7, which Soft-RoCE treats as
/// infinite.
pub(crate) const ACK_TIMEOUT: u8 = 14;
pub(crate) const RETRY_COUNT: u8 = 6;
/// RNR retry count 7: infinite retries, 0.64 ms apart, while the peer has no receive buffer posted. The
/// peer's poller is then behind with messages to its rings, and the retries throttle this sender. If the peer
/// has stopped for good, the timeout of the send slot ends the wait (`fabric::send::slots`).
pub(crate) const RNR_RETRY_COUNT: u8 = 7;
const MIN_RNR_TIMER: u8 = 12;

/// Capacities of a QP.
#[derive(Clone, Copy)]
pub(crate) struct QpCaps {
    /// Maximum send requests.
    pub(crate) max_send_wr: u32,
    /// Maximum receive requests.
    pub(crate) max_recv_wr: u32,
    /// Maximum scatter-gather entries of a send request.
    pub(crate) max_send_sge: u32,
    /// Maximum inline data, in bytes, of a send request.
    pub(crate) max_inline_data: u32,
}

/// Parameters of the remote QP of a connection.
#[derive(Clone, Copy)]
pub(crate) struct RemoteQp {
    /// Number of the remote QP.
    pub(crate) qpn: u32,
    /// First packet sequence number of the remote QP.
    pub(crate) psn: u32,
    /// Path MTU, in bytes: the smaller one of both ends.
    pub(crate) mtu: u32,
    /// Maximum RDMA READs and atomics in flight.
    pub(crate) max_rd_atomic: u8,
}

/// Queue pair.
///
/// # Invariants
///
/// `ptr` is a live QP that this object owns. It was created in `pd` with `_send_cq` and `_recv_cq`.
pub(crate) struct Qp<S: CompletionHandler, R: CompletionHandler> {
    ptr: NonNull<bindings::ib_qp>,
    port: PortNum,
    max_inline_data: usize,
    /// Held during a state change. Some drivers check the current state and set the next one without a lock.
    /// A QP that was moved to ERR must stay there.
    modify_lock: Pin<KBox<Mutex<()>>>,
    pd: Arc<Pd>,
    _send_cq: Arc<Cq<S>>,
    _recv_cq: Arc<Cq<R>>,
}

// SAFETY: Requests may be posted from any thread, since drivers lock internally. `modify_lock` serializes
// state changes.
unsafe impl<S: CompletionHandler, R: CompletionHandler> Send for Qp<S, R> {}
// SAFETY: The argument for `Send` holds here too.
unsafe impl<S: CompletionHandler, R: CompletionHandler> Sync for Qp<S, R> {}

impl<S: CompletionHandler, R: CompletionHandler> Qp<S, R> {
    /// Creates an RC QP and moves it to INIT. Receives may then be posted.
    pub(crate) fn new_rc(
        pd: Arc<Pd>,
        send_cq: Arc<Cq<S>>,
        recv_cq: Arc<Cq<R>>,
        port: PortNum,
        caps: QpCaps,
    ) -> Result<Self> {
        let access_flags = pd.device().access_flags();
        let qp = Self::create(
            pd,
            send_cq,
            recv_cq,
            port,
            caps,
            bindings::ib_qp_type_IB_QPT_RC,
        )?;
        let mut attr = bindings::ib_qp_attr {
            qp_state: bindings::ib_qp_state_IB_QPS_INIT,
            port_num: port,
            qp_access_flags: access_flags,
            ..pin_init::zeroed()
        };
        qp.modify(
            &mut attr,
            bindings::ib_qp_attr_mask_IB_QP_STATE
                | bindings::ib_qp_attr_mask_IB_QP_PKEY_INDEX
                | bindings::ib_qp_attr_mask_IB_QP_PORT
                | bindings::ib_qp_attr_mask_IB_QP_ACCESS_FLAGS,
        )?;
        Ok(qp)
    }

    /// Creates a UD QP with queue key `qkey`, in state RTS.
    pub(crate) fn new_ud(
        pd: Arc<Pd>,
        send_cq: Arc<Cq<S>>,
        recv_cq: Arc<Cq<R>>,
        port: PortNum,
        caps: QpCaps,
        qkey: u32,
    ) -> Result<Self> {
        let qp = Self::create(
            pd,
            send_cq,
            recv_cq,
            port,
            caps,
            bindings::ib_qp_type_IB_QPT_UD,
        )?;
        qp.modify_ud_to_rts(qkey)?;
        Ok(qp)
    }

    /// Moves a UD QP from RESET to RTS.
    pub(crate) fn modify_ud_to_rts(&self, qkey: u32) -> Result {
        let mut attr = bindings::ib_qp_attr {
            qp_state: bindings::ib_qp_state_IB_QPS_INIT,
            port_num: self.port,
            qkey,
            ..pin_init::zeroed()
        };
        let state_mask = bindings::ib_qp_attr_mask_IB_QP_STATE;
        self.modify(
            &mut attr,
            state_mask
                | bindings::ib_qp_attr_mask_IB_QP_PKEY_INDEX
                | bindings::ib_qp_attr_mask_IB_QP_PORT
                | bindings::ib_qp_attr_mask_IB_QP_QKEY,
        )?;
        attr.qp_state = bindings::ib_qp_state_IB_QPS_RTR;
        self.modify(&mut attr, state_mask)?;
        attr.qp_state = bindings::ib_qp_state_IB_QPS_RTS;
        self.modify(
            &mut attr,
            state_mask | bindings::ib_qp_attr_mask_IB_QP_SQ_PSN,
        )
    }

    fn create(
        pd: Arc<Pd>,
        send_cq: Arc<Cq<S>>,
        recv_cq: Arc<Cq<R>>,
        port: PortNum,
        caps: QpCaps,
        qp_type: bindings::ib_qp_type,
    ) -> Result<Self> {
        let mut attr = bindings::ib_qp_init_attr {
            send_cq: send_cq.as_raw(),
            recv_cq: recv_cq.as_raw(),
            cap: bindings::ib_qp_cap {
                max_send_wr: caps.max_send_wr,
                max_recv_wr: caps.max_recv_wr,
                max_send_sge: caps.max_send_sge,
                max_recv_sge: 1,
                max_inline_data: caps.max_inline_data,
                ..pin_init::zeroed()
            },
            sq_sig_type: bindings::ib_sig_type_IB_SIGNAL_REQ_WR,
            qp_type,
            port_num: port,
            ..pin_init::zeroed()
        };
        let modify_lock = KBox::pin_init(new_mutex!((), "Qp::modify_lock"), GFP_KERNEL)?;
        // Without enough inline space, some drivers fail the creation, and others silently provide less. So
        // retry without inline data, and use the reported size.
        let ptr = Self::try_create(&pd, &mut attr).or_else(|_| {
            attr.cap.max_inline_data = 0;
            Self::try_create(&pd, &mut attr)
        })?;
        // INVARIANT: The QP was just created in `pd` with the two CQs.
        Ok(Self {
            ptr,
            port,
            max_inline_data: attr.cap.max_inline_data.min(caps.max_inline_data) as usize,
            modify_lock,
            pd,
            _send_cq: send_cq,
            _recv_cq: recv_cq,
        })
    }

    fn try_create(
        pd: &Pd,
        attr: &mut bindings::ib_qp_init_attr,
    ) -> Result<NonNull<bindings::ib_qp>> {
        // SAFETY: The protection domain and the CQs are valid. They outlive the QP, which holds references.
        let ptr = from_err_ptr(unsafe {
            bindings::ib_create_qp_kernel(pd.as_raw(), attr, RESTRACK_OWNER.as_char_ptr())
        })?;
        NonNull::new(ptr).ok_or(ENOMEM)
    }

    /// Returns the maximum inline data, in bytes, of a send request.
    pub(crate) fn max_inline_data(&self) -> usize {
        self.max_inline_data
    }

    fn modify(&self, attr: &mut bindings::ib_qp_attr, mask: bindings::ib_qp_attr_mask) -> Result {
        let _guard = self.modify_lock.lock();
        // SAFETY: The QP is live, by the type invariants. `attr` is valid, since it is a mutable reference.
        to_result(unsafe { bindings::ib_modify_qp(self.ptr.as_ptr(), attr, mask as c_int) })
    }

    /// Returns the RNIC.
    pub(crate) fn device(&self) -> IbDevice {
        self.pd.device()
    }

    /// Returns the QP number.
    pub(crate) fn qpn(&self) -> u32 {
        // SAFETY: The QP is live, by the type invariants. The number never changes.
        unsafe { (*self.ptr.as_ptr()).qp_num }
    }

    /// Connects an RC QP: moves it from INIT to RTS. `psn` is the first sequence number that it sends.
    pub(crate) fn connect(&self, ah: &AddressHandle, remote: RemoteQp, psn: u32) -> Result {
        self.modify_to_rtr(ah, remote)?;
        let mut attr = bindings::ib_qp_attr {
            qp_state: bindings::ib_qp_state_IB_QPS_RTS,
            sq_psn: psn,
            timeout: ACK_TIMEOUT,
            retry_cnt: RETRY_COUNT,
            rnr_retry: RNR_RETRY_COUNT,
            max_rd_atomic: remote.max_rd_atomic,
            ..pin_init::zeroed()
        };
        self.modify(
            &mut attr,
            bindings::ib_qp_attr_mask_IB_QP_STATE
                | bindings::ib_qp_attr_mask_IB_QP_SQ_PSN
                | bindings::ib_qp_attr_mask_IB_QP_TIMEOUT
                | bindings::ib_qp_attr_mask_IB_QP_RETRY_CNT
                | bindings::ib_qp_attr_mask_IB_QP_RNR_RETRY
                | bindings::ib_qp_attr_mask_IB_QP_MAX_QP_RD_ATOMIC,
        )
    }

    /// Moves an RC QP from INIT to RTR. From now on it accepts packets of the remote QP.
    fn modify_to_rtr(&self, ah: &AddressHandle, remote: RemoteQp) -> Result {
        let mut attr = bindings::ib_qp_attr {
            qp_state: bindings::ib_qp_state_IB_QPS_RTR,
            // SAFETY: The function has no preconditions.
            path_mtu: unsafe { inline::ib_mtu_int_to_enum(remote.mtu as c_int) },
            dest_qp_num: remote.qpn,
            rq_psn: remote.psn,
            ah_attr: ah.raw_attr(),
            max_dest_rd_atomic: remote.max_rd_atomic,
            min_rnr_timer: MIN_RNR_TIMER,
            port_num: self.port,
            ..pin_init::zeroed()
        };
        self.modify(
            &mut attr,
            bindings::ib_qp_attr_mask_IB_QP_STATE
                | bindings::ib_qp_attr_mask_IB_QP_AV
                | bindings::ib_qp_attr_mask_IB_QP_PATH_MTU
                | bindings::ib_qp_attr_mask_IB_QP_DEST_QPN
                | bindings::ib_qp_attr_mask_IB_QP_RQ_PSN
                | bindings::ib_qp_attr_mask_IB_QP_MAX_DEST_RD_ATOMIC
                | bindings::ib_qp_attr_mask_IB_QP_MIN_RNR_TIMER,
        )
    }

    /// Moves the QP to ERR: sends and receives stop, and posted requests complete as flushed.
    pub(crate) fn modify_to_err(&self) -> Result {
        let mut attr = bindings::ib_qp_attr {
            qp_state: bindings::ib_qp_state_IB_QPS_ERR,
            ..pin_init::zeroed()
        };
        self.modify(&mut attr, bindings::ib_qp_attr_mask_IB_QP_STATE)
    }

    /// Moves the QP to RESET. After success, the RNIC accesses no memory of earlier requests.
    pub(crate) fn modify_to_reset(&self) -> Result {
        let mut attr = bindings::ib_qp_attr {
            qp_state: bindings::ib_qp_state_IB_QPS_RESET,
            ..pin_init::zeroed()
        };
        self.modify(&mut attr, bindings::ib_qp_attr_mask_IB_QP_STATE)
    }

    /// Posts a send request.
    ///
    /// # Safety
    ///
    /// The local memory of the request must stay mapped until the request completes or the QP is destroyed.
    pub(crate) unsafe fn post(&self, wr: &SendWr<'_>) -> Result {
        // SAFETY: The request is valid, and its memory stays mapped by the safety requirements.
        unsafe { self.post_raw(wr.as_raw()) }
    }

    /// Posts send requests in order, with one doorbell. Returns the number that the driver has taken.
    ///
    /// # Safety
    ///
    /// The safety requirements of [`Self::post`] must hold for each request.
    pub(crate) unsafe fn post_list(&self, wrs: &mut [OwnedSendWr]) -> usize {
        let first = OwnedSendWr::link_chain(wrs);
        if first.is_null() {
            return 0;
        }
        let mut bad = core::ptr::null();
        // SAFETY: The QP is live, by the type invariants. The memory of the requests stays mapped, by the
        // safety requirements. The chain is valid during the call.
        let code = unsafe { inline::ib_post_send(self.ptr.as_ptr(), first, &mut bad) };
        if code == 0 {
            return wrs.len();
        }
        let failed_index = wrs.iter().position(|wr| core::ptr::eq(wr.as_raw(), bad));
        // A driver that does not report the failed request may have taken any of them. Requests that never
        // complete time out.
        failed_index.unwrap_or(wrs.len())
    }

    /// Posts a work request that registers a memory region.
    ///
    /// # Errors
    ///
    /// Errors of the driver.
    pub(crate) fn post_reg_mr(&self, wr_id: u64, mr: &FastRegMr) -> Result {
        let mut reg_wr: bindings::ib_reg_wr = pin_init::zeroed();
        reg_wr.wr.__bindgen_anon_1.wr_id = wr_id;
        reg_wr.wr.opcode = bindings::ib_wr_opcode_IB_WR_REG_MR;
        reg_wr.wr.send_flags = bindings::ib_send_flags_IB_SEND_SIGNALED as c_int;
        reg_wr.mr = mr.as_raw();
        reg_wr.key = mr.rkey();
        reg_wr.access = self.pd.device().access_flags();
        // SAFETY: The request has a type of RC QPs. The registration ends with the region. The pages of the
        // region stay mapped until then.
        unsafe { self.post_raw(&reg_wr.wr) }
    }

    /// Posts a datagram.
    ///
    /// # Safety
    ///
    /// The safety requirements of [`Self::post`] must hold. The address handle, too, must outlive the
    /// request.
    pub(crate) unsafe fn post_datagram(&self, wr: &UdSendWr<'_>) -> Result {
        // SAFETY: The request is a datagram. Its memory stays mapped and its address handle live, by the
        // safety requirements.
        unsafe { self.post_raw(wr.as_raw()) }
    }

    /// Posts a raw request.
    ///
    /// # Safety
    ///
    /// `wr` must be a valid request of the QP's type. The safety requirements of [`Self::post`] must hold.
    unsafe fn post_raw(&self, wr: *const bindings::ib_send_wr) -> Result {
        let mut bad = core::ptr::null();
        // SAFETY: The QP is live, by the type invariants. The request is valid, by the safety requirements.
        to_result(unsafe { inline::ib_post_send(self.ptr.as_ptr(), wr, &mut bad) })
    }

    /// Posts a receive request.
    ///
    /// # Safety
    ///
    /// The memory of `sge` must stay mapped until the request completes or the QP is destroyed.
    pub(crate) unsafe fn post_recv(&self, wr_id: u64, sge: &Sge) -> Result {
        let mut recv_wr: bindings::ib_recv_wr = pin_init::zeroed();
        recv_wr.__bindgen_anon_1.wr_id = wr_id;
        recv_wr.sg_list = core::ptr::from_ref(sge).cast_mut().cast();
        recv_wr.num_sge = 1;
        let mut bad = core::ptr::null();
        // SAFETY: The QP is live, by the type invariants. The memory of `sge` stays mapped, by the safety
        // requirements.
        to_result(unsafe { inline::ib_post_recv(self.ptr.as_ptr(), &recv_wr, &mut bad) })
    }
}

impl<S: CompletionHandler, R: CompletionHandler> Drop for Qp<S, R> {
    fn drop(&mut self) {
        // SAFETY: The QP is live, by the type invariants, and not used after this call. The caller may sleep.
        unsafe { bindings::ib_destroy_qp_user(self.ptr.as_ptr(), core::ptr::null_mut()) };
    }
}
