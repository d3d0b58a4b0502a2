// SPDX-License-Identifier: GPL-2.0

//! Queue pairs: reliably connected (RC) and datagram (UD), and the states they go through.

use super::{
    address::AddressHandle,
    cq::{CompletionHandler, Cq},
    device::PortNum,
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

/// Local acknowledgement timeout, 4.096 µs · 2^14 = 67 ms: far above any round trip, and short enough
/// that a lossy network stays usable. Seven tries bound the wait for a dead peer to half a second; a
/// host that is merely so busy costs a new queue pair and a replay. (Seven retries would mean "for
/// ever" to Soft-RoCE.)
pub(crate) const ACK_TIMEOUT: u8 = 14;
pub(crate) const RETRY_COUNT: u8 = 6;
/// Tries while the peer has no receive posted, 0.64 ms apart: for ever. Its poller is behind with messages
/// to its rings then, and this is what slows us down. One that has stopped for good is not waited for
/// (`fabric::sender`).
pub(crate) const RNR_RETRY_COUNT: u8 = 7;
const MIN_RNR_TIMER: u8 = 12;

/// Numbers of entries of a queue pair's queues.
#[derive(Clone, Copy)]
pub(crate) struct QpCaps {
    /// Send requests.
    pub(crate) max_send_wr: u32,
    /// Receive requests.
    pub(crate) max_recv_wr: u32,
    /// Scatter-gather entries of a send request.
    pub(crate) max_send_sge: u32,
    /// Bytes that a send request can carry itself.
    pub(crate) max_inline_data: u32,
}

/// What one side of a connection must know of the other.
#[derive(Clone, Copy)]
pub(crate) struct RemoteQp {
    /// Number of its queue pair.
    pub(crate) qpn: u32,
    /// The first packet sequence number that it sends.
    pub(crate) psn: u32,
    /// The largest packet, in bytes, that both can take.
    pub(crate) mtu: u32,
    /// RDMA reads in flight.
    pub(crate) max_rd_atomic: u8,
}

/// A queue pair.
///
/// # Invariants
///
/// `ptr` is a live queue pair that we own, made in `_pd` with the two completion queues.
pub(crate) struct Qp<S: CompletionHandler, R: CompletionHandler> {
    ptr: NonNull<bindings::ib_qp>,
    port: PortNum,
    max_inline_data: usize,
    /// Held while the state changes: some drivers check the present state and set the next without a lock,
    /// and a queue pair that was moved to ERR must not come back.
    modify_lock: Pin<KBox<Mutex<()>>>,
    _pd: Arc<Pd>,
    _send_cq: Arc<Cq<S>>,
    _recv_cq: Arc<Cq<R>>,
}

// SAFETY: Queue pairs may be posted to from any thread; drivers lock inside. We lock state changes.
unsafe impl<S: CompletionHandler, R: CompletionHandler> Send for Qp<S, R> {}
// SAFETY: As above.
unsafe impl<S: CompletionHandler, R: CompletionHandler> Sync for Qp<S, R> {}

impl<S: CompletionHandler, R: CompletionHandler> Qp<S, R> {
    /// Makes an RC queue pair, and brings it to INIT: receives may be posted.
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

    /// Makes a UD queue pair with queue key `qkey`, ready to send and receive.
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

    /// Brings a UD queue pair from RESET to RTS.
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
        let modify_lock = KBox::pin_init(new_mutex!(()), GFP_KERNEL)?;
        // Some drivers refuse to make, and others silently do not support, what others have room for.
        let ptr = Self::try_create(&pd, &mut attr).or_else(|_| {
            attr.cap.max_inline_data = 0;
            Self::try_create(&pd, &mut attr)
        })?;
        // INVARIANT: We just made it.
        Ok(Self {
            ptr,
            port,
            max_inline_data: attr.cap.max_inline_data.min(caps.max_inline_data) as usize,
            modify_lock,
            _pd: pd,
            _send_cq: send_cq,
            _recv_cq: recv_cq,
        })
    }

    fn try_create(
        pd: &Pd,
        attr: &mut bindings::ib_qp_init_attr,
    ) -> Result<NonNull<bindings::ib_qp>> {
        // SAFETY: The protection domain and the completion queues are valid, and outlive the queue pair,
        // since it holds them.
        let ptr = from_err_ptr(unsafe {
            bindings::ib_create_qp_kernel(pd.as_raw(), attr, RESTRACK_OWNER.as_char_ptr())
        })?;
        NonNull::new(ptr).ok_or(ENOMEM)
    }

    /// Bytes that a send request can carry itself.
    pub(crate) fn max_inline_data(&self) -> usize {
        self.max_inline_data
    }

    fn modify(&self, attr: &mut bindings::ib_qp_attr, mask: bindings::ib_qp_attr_mask) -> Result {
        let _guard = self.modify_lock.lock();
        // SAFETY: By the type invariants, and `attr` is ours.
        to_result(unsafe { bindings::ib_modify_qp(self.ptr.as_ptr(), attr, mask as c_int) })
    }

    /// Its number.
    pub(crate) fn qpn(&self) -> u32 {
        // SAFETY: By the type invariants; the number never changes.
        unsafe { (*self.ptr.as_ptr()).qp_num }
    }

    /// Connects an RC queue pair, from INIT to RTS; `psn` is the first sequence number that we send.
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

    /// From INIT to RTR: packets of the partner are taken from now on.
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

    /// Moves it to ERR: nothing more is sent or received, and what is queued completes as flushed.
    pub(crate) fn modify_to_err(&self) -> Result {
        let mut attr = bindings::ib_qp_attr {
            qp_state: bindings::ib_qp_state_IB_QPS_ERR,
            ..pin_init::zeroed()
        };
        self.modify(&mut attr, bindings::ib_qp_attr_mask_IB_QP_STATE)
    }

    /// Moves it to RESET. When this returns it touches no memory of ours any more.
    pub(crate) fn modify_to_reset(&self) -> Result {
        let mut attr = bindings::ib_qp_attr {
            qp_state: bindings::ib_qp_state_IB_QPS_RESET,
            ..pin_init::zeroed()
        };
        self.modify(&mut attr, bindings::ib_qp_attr_mask_IB_QP_STATE)
    }

    /// Posts a request.
    ///
    /// # Safety
    ///
    /// The local memory that the request names must stay mapped until the request completes or the
    /// queue pair is gone.
    pub(crate) unsafe fn post(&self, wr: &SendWr<'_>) -> Result {
        // SAFETY: By the type invariants and the safety requirements.
        unsafe { self.post_raw(wr.as_raw()) }
    }

    /// Posts requests, one after the other, with one doorbell. Returns how many the driver took.
    ///
    /// # Safety
    ///
    /// As for [`Self::post`], of each.
    pub(crate) unsafe fn post_list(&self, wrs: &mut [OwnedSendWr]) -> usize {
        let first = OwnedSendWr::link_chain(wrs);
        if first.is_null() {
            return 0;
        }
        let mut bad = core::ptr::null();
        // SAFETY: By the type invariants and the safety requirements; the list is valid during the call.
        let code = unsafe { inline::ib_post_send(self.ptr.as_ptr(), first, &mut bad) };
        if code == 0 {
            return wrs.len();
        }
        let failed_index = wrs.iter().position(|wr| core::ptr::eq(wr.as_raw(), bad));
        // A driver that does not say which may have taken any. What never completes is found out.
        failed_index.unwrap_or(wrs.len())
    }

    /// Posts a request that gives a memory region its key.
    ///
    /// # Errors
    ///
    /// What the driver says.
    pub(crate) fn post_reg_mr(&self, wr_id: u64, mr: &FastRegMr) -> Result {
        let mut reg_wr: bindings::ib_reg_wr = pin_init::zeroed();
        reg_wr.wr.__bindgen_anon_1.wr_id = wr_id;
        reg_wr.wr.opcode = bindings::ib_wr_opcode_IB_WR_REG_MR;
        reg_wr.wr.send_flags = bindings::ib_send_flags_IB_SEND_SIGNALED as c_int;
        reg_wr.mr = mr.as_raw();
        reg_wr.key = mr.rkey();
        reg_wr.access = self._pd.device().access_flags();
        // SAFETY: It is a request of an RC queue pair. What it makes ends with the region, whose pages stay mapped.
        unsafe { self.post_raw(&reg_wr.wr) }
    }

    /// Posts a datagram.
    ///
    /// # Safety
    ///
    /// As for [`Self::post`]; the address handle, too, must outlive the request.
    pub(crate) unsafe fn post_datagram(&self, wr: &UdSendWr<'_>) -> Result {
        // SAFETY: By the type invariants and the safety requirements.
        unsafe { self.post_raw(wr.as_raw()) }
    }

    /// # Safety
    ///
    /// `work` must be a valid request of the queue pair's type, and as for [`Self::post`].
    unsafe fn post_raw(&self, wr: *const bindings::ib_send_wr) -> Result {
        let mut bad = core::ptr::null();
        // SAFETY: By the type invariants and the safety requirements.
        to_result(unsafe { inline::ib_post_send(self.ptr.as_ptr(), wr, &mut bad) })
    }

    /// Posts a receive.
    ///
    /// # Safety
    ///
    /// The memory of `sge` must stay mapped until the request completes or the queue pair is gone.
    pub(crate) unsafe fn post_recv(&self, wr_id: u64, sge: &Sge) -> Result {
        let mut recv_wr: bindings::ib_recv_wr = pin_init::zeroed();
        recv_wr.__bindgen_anon_1.wr_id = wr_id;
        recv_wr.sg_list = core::ptr::from_ref(sge).cast_mut().cast();
        recv_wr.num_sge = 1;
        let mut bad = core::ptr::null();
        // SAFETY: By the type invariants and the safety requirements.
        to_result(unsafe { inline::ib_post_recv(self.ptr.as_ptr(), &recv_wr, &mut bad) })
    }
}

impl<S: CompletionHandler, R: CompletionHandler> Drop for Qp<S, R> {
    fn drop(&mut self) {
        // SAFETY: By the type invariants; we may sleep.
        unsafe { bindings::ib_destroy_qp_user(self.ptr.as_ptr(), core::ptr::null_mut()) };
    }
}
