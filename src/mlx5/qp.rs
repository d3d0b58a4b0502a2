// SPDX-License-Identifier: GPL-2.0

//! mlx5 QPs: DC initiators (DCIs), which send to any DCT, and an RC QP for atomics, which verbs do not offer
//! to the kernel.
//!
//! # Operation
//!
//! The hardware serves one DCT at a time per DCI, in the order of the requests.
//!
//! # Recovery
//!
//! An unresponsive DCT moves the DCI to ERR. All requests posted behind fail too. The owner then resets and
//! restarts the DCI.
//!
//! # Locking
//!
//! `modify_lock` (mutex) serializes state changes. Posting is locked in the shim.

use super::{
    cq::Mlx5Cq,
    wr::{AddressVector, Mlx5SendWr},
    Mlx5Device, PortConfig, ACCESS_FLAGS,
};
use crate::{
    bindings::{self, inline},
    verbs::{
        cq::CompletionHandler,
        log::rnic_warn,
        qp::{ACK_TIMEOUT, RETRY_COUNT},
    },
};
use core::ptr::NonNull;
use kernel::{
    error::{from_err_ptr, to_result},
    new_mutex,
    prelude::*,
    sync::{Arc, Mutex},
};

/// RNR retries. With the peer's timer, the total is half a second, since other requests wait behind.
const RNR_RETRIES: u8 = 6;

/// Queue pair.
///
/// # Invariants
///
/// `ptr` is a live QP that this object owns. It was created with `_cq`.
pub(crate) struct Mlx5Qp<N: CompletionHandler> {
    ptr: NonNull<bindings::kite_mlx5_qp>,
    /// Held during a state change.
    modify_lock: Pin<KBox<Mutex<()>>>,
    _cq: Arc<Mlx5Cq<N>>,
    hca: Arc<Mlx5Device>,
}

// SAFETY: Requests may be posted from any thread, since the shim locks internally. `modify_lock` serializes
// state changes.
unsafe impl<N: CompletionHandler> Send for Mlx5Qp<N> {}
// SAFETY: The argument for `Send` holds here too.
unsafe impl<N: CompletionHandler> Sync for Mlx5Qp<N> {}

impl<N: CompletionHandler> Mlx5Qp<N> {
    /// Creates a DCI for `depth` requests in flight, in state RESET.
    ///
    /// # Errors
    ///
    /// - `EINVAL`: `depth` exceeds the limit of the hardware.
    /// - `EIO`: the command failed.
    /// - `ENOMEM`: no memory.
    pub(crate) fn new_dci(hca: Arc<Mlx5Device>, cq: Arc<Mlx5Cq<N>>, depth: u32) -> Result<Self> {
        let kind = bindings::kite_mlx5_qp_type_KITE_MLX5_DCI;
        Self::new(kind, hca, cq, depth)
    }

    /// Creates an RC QP that receives nothing, in state RESET.
    ///
    /// # Errors
    ///
    /// See [`Self::new_dci`].
    pub(crate) fn new_rc(hca: Arc<Mlx5Device>, cq: Arc<Mlx5Cq<N>>, depth: u32) -> Result<Self> {
        let kind = bindings::kite_mlx5_qp_type_KITE_MLX5_RC;
        Self::new(kind, hca, cq, depth)
    }

    fn new(
        kind: bindings::kite_mlx5_qp_type,
        hca: Arc<Mlx5Device>,
        cq: Arc<Mlx5Cq<N>>,
        depth: u32,
    ) -> Result<Self> {
        let init = bindings::kite_mlx5_qp_init {
            type_: kind,
            wqebbs: depth * bindings::KITE_MLX5_MAX_WR_WQEBBS,
            send_cq: cq.as_raw(),
            ..Default::default()
        };
        let modify_lock = KBox::pin_init(new_mutex!((), "Mlx5Qp::modify_lock"), GFP_KERNEL)?;
        // SAFETY: The device is open. The device and the CQ outlive the QP, which holds references.
        let ptr = from_err_ptr(unsafe { bindings::kite_mlx5_qp_create(hca.as_raw(), &init) })?;
        // INVARIANT: The QP was just created with `cq`.
        Ok(Self {
            ptr: NonNull::new(ptr).ok_or(ENOMEM)?,
            modify_lock,
            _cq: cq,
            hca,
        })
    }

    /// Moves a DCI from RESET to RTS. After an error, the DCI must be reset before the next attempt.
    ///
    /// # Errors
    ///
    /// - `EIO`: the command failed.
    pub(crate) fn start_dci(&self, port_config: PortConfig) -> Result {
        self.modify_to_rts(self.base_attr(port_config))
    }

    /// Connects an RC QP to itself, with `own_av` as the address of the local port.
    ///
    /// # Errors
    ///
    /// - `EIO`: the command failed.
    pub(crate) fn connect_loopback(
        &self,
        port_config: PortConfig,
        own_av: &AddressVector,
    ) -> Result {
        self.modify_to_rts(bindings::kite_mlx5_qp_attr {
            // The capability applies to DC. The loopback QP has one operation in flight.
            max_rd_atomic: 1,
            max_dest_rd_atomic: 1,
            access: ACCESS_FLAGS,
            // SAFETY: The QP is live, by the type invariants.
            dest_qp_num: unsafe { bindings::kite_mlx5_qp_number(self.ptr.as_ptr()) },
            av: own_av.as_raw(),
            ..self.base_attr(port_config)
        })
    }

    /// Returns the attributes common to all QPs.
    fn base_attr(&self, port_config: PortConfig) -> bindings::kite_mlx5_qp_attr {
        bindings::kite_mlx5_qp_attr {
            // SAFETY: The function has no preconditions.
            mtu: unsafe { inline::ib_mtu_int_to_enum(port_config.mtu as c_int) },
            port: port_config.port as u8,
            sgid_index: port_config.gid_index,
            timeout: ACK_TIMEOUT,
            retry_cnt: RETRY_COUNT,
            rnr_retry: RNR_RETRIES,
            max_rd_atomic: self.hca.max_rd_atomic,
            ..Default::default()
        }
    }

    fn modify_to_rts(&self, attr: bindings::kite_mlx5_qp_attr) -> Result {
        let _guard = self.modify_lock.lock();
        // SAFETY: The QP is live, by the type invariants. `attr.av` is null or points to a live address
        // vector.
        to_result(unsafe { bindings::kite_mlx5_qp_to_rts(self.ptr.as_ptr(), &attr) })
    }

    /// Moves the QP to ERR: requests in flight complete as flushed.
    ///
    /// # Errors
    ///
    /// - `EIO`: the command failed.
    pub(crate) fn fail(&self) -> Result {
        let _guard = self.modify_lock.lock();
        // SAFETY: The QP is live, by the type invariants.
        to_result(unsafe { bindings::kite_mlx5_qp_to_err(self.ptr.as_ptr()) })
    }

    /// Moves the QP to RESET. Requests in flight and unpolled completions are dropped. No thread may post
    /// meanwhile. After success, the hardware accesses no memory of earlier requests.
    ///
    /// # Errors
    ///
    /// - `EIO`: the command failed.
    pub(crate) fn reset(&self) -> Result {
        let _guard = self.modify_lock.lock();
        // SAFETY: The QP is live, by the type invariants.
        to_result(unsafe { bindings::kite_mlx5_qp_to_reset(self.ptr.as_ptr()) })
    }

    /// Posts requests in order, with one doorbell. Returns the number of posted requests. Posting stops when
    /// the queue is full, or at a malformed request.
    ///
    /// # Safety
    ///
    /// The local memory of each request must stay mapped until the request completes, or the QP is reset or
    /// destroyed.
    pub(crate) unsafe fn post(&self, wrs: &[Mlx5SendWr<'_>]) -> usize {
        let (first, count) = (wrs.as_ptr().cast(), wrs.len() as c_int);
        let mut posted = 0;
        // SAFETY: The QP is live, by the type invariants. The memory of the requests stays mapped, by the
        // safety requirements. `Mlx5SendWr` is a transparent wrapper of the shim's request.
        unsafe { bindings::kite_mlx5_post_send(self.ptr.as_ptr(), first, count, &mut posted) };
        posted as usize
    }
}

impl<N: CompletionHandler> Drop for Mlx5Qp<N> {
    fn drop(&mut self) {
        // SAFETY: The QP is live, by the type invariants, and not used after this call.
        if unsafe { bindings::kite_mlx5_qp_destroy(self.ptr.as_ptr()) } != 0 {
            rnic_warn!(self.hca.device(), "QP cannot be destroyed: memory leaked\n");
        }
    }
}
