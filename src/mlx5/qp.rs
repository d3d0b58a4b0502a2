// SPDX-License-Identifier: GPL-2.0

//! Queue pairs of the hardware: initiators of DC, which send to any target; and RC for atomic operations, which verbs
//! do not have for the kernel.
//!
//! Of an initiator, the hardware talks to one target at a time, in the order of the requests. A target that does not
//! answer ends the initiator, with all that was posted behind; then it is reset and started again.

use super::{
    cq::Mlx5Cq,
    wr::{AddressVector, Mlx5SendWr},
    Mlx5Device, PortConfig, ACCESS_FLAGS,
};
use crate::{
    bindings::{self, inline},
    verbs::{
        cq::CompletionHandler,
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

/// Tries while a target has no buffer: half a second in all, since others wait behind.
const RNR_RETRIES: u8 = 6;

/// A queue pair.
///
/// # Invariants
///
/// `ptr` is a live queue pair that we own, made with `_cq`.
pub(crate) struct Mlx5Qp<N: CompletionHandler> {
    ptr: NonNull<bindings::kite_mlx5_qp>,
    /// Held while the state changes.
    modify_lock: Pin<KBox<Mutex<()>>>,
    _cq: Arc<Mlx5Cq<N>>,
    hca: Arc<Mlx5Device>,
}

// SAFETY: Queue pairs may be posted to from any thread; the shim locks inside. We lock state changes.
unsafe impl<N: CompletionHandler> Send for Mlx5Qp<N> {}
// SAFETY: As above.
unsafe impl<N: CompletionHandler> Sync for Mlx5Qp<N> {}

impl<N: CompletionHandler> Mlx5Qp<N> {
    /// Makes an initiator with room for so many requests, in reset.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the hardware has no room for so many; `EIO`, `ENOMEM`.
    pub(crate) fn new_dci(hca: Arc<Mlx5Device>, cq: Arc<Mlx5Cq<N>>, depth: u32) -> Result<Self> {
        let kind = bindings::kite_mlx5_qp_type_KITE_MLX5_DCI;
        Self::new(kind, hca, cq, depth)
    }

    /// Makes an RC queue pair that receives nothing, as [`Self::new_initiator`] does.
    ///
    /// # Errors
    ///
    /// As of that.
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
        let modify_lock = KBox::pin_init(new_mutex!(()), GFP_KERNEL)?;
        // SAFETY: The hardware is open; it and the queue outlive the queue pair, which holds them.
        let ptr = from_err_ptr(unsafe { bindings::kite_mlx5_qp_create(hca.as_raw(), &init) })?;
        // INVARIANT: We just made it.
        Ok(Self {
            ptr: NonNull::new(ptr).ok_or(ENOMEM)?,
            modify_lock,
            _cq: cq,
            hca,
        })
    }

    /// Brings an initiator from reset to where it sends. If that fails it has to be reset before the next try.
    ///
    /// # Errors
    ///
    /// `EIO`.
    pub(crate) fn start_dci(&self, port_config: PortConfig) -> Result {
        self.modify_to_rts(self.base_attr(port_config))
    }

    /// Connects an RC queue pair to itself, by the way `own` to our port, for one operation at a time.
    ///
    /// # Errors
    ///
    /// `EIO`.
    pub(crate) fn connect_loopback(
        &self,
        port_config: PortConfig,
        own_av: &AddressVector,
    ) -> Result {
        self.modify_to_rts(bindings::kite_mlx5_qp_attr {
            // What it has of these is for DC; here one is under way at a time.
            max_rd_atomic: 1,
            max_dest_rd_atomic: 1,
            access: ACCESS_FLAGS,
            // SAFETY: By the type invariants.
            dest_qp_num: unsafe { bindings::kite_mlx5_qp_number(self.ptr.as_ptr()) },
            av: own_av.as_raw(),
            ..self.base_attr(port_config)
        })
    }

    /// What all have.
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
        // SAFETY: By the type invariants; a way that is named is there.
        to_result(unsafe { bindings::kite_mlx5_qp_to_rts(self.ptr.as_ptr(), &attr) })
    }

    /// Has what is under way complete as flushed.
    ///
    /// # Errors
    ///
    /// `EIO`.
    pub(crate) fn fail(&self) -> Result {
        let _guard = self.modify_lock.lock();
        // SAFETY: By the type invariants.
        to_result(unsafe { bindings::kite_mlx5_qp_to_err(self.ptr.as_ptr()) })
    }

    /// Drops what is under way, and the completions that were not polled. Nobody may post meanwhile. When this
    /// returns it touches no memory of ours any more.
    ///
    /// # Errors
    ///
    /// `EIO`.
    pub(crate) fn reset(&self) -> Result {
        let _guard = self.modify_lock.lock();
        // SAFETY: By the type invariants.
        to_result(unsafe { bindings::kite_mlx5_qp_to_reset(self.ptr.as_ptr()) })
    }

    /// Posts requests, one after the other, with one doorbell. Returns how many there was room for, or were taken
    /// before one that is malformed.
    ///
    /// # Safety
    ///
    /// The local memory that they name must stay mapped until they complete, or the queue pair is reset or gone.
    pub(crate) unsafe fn post(&self, wrs: &[Mlx5SendWr<'_>]) -> usize {
        let (first, count) = (wrs.as_ptr().cast(), wrs.len() as c_int);
        let mut posted = 0;
        // SAFETY: By the type invariants and the safety requirements; a `Work` is what the shim has.
        unsafe { bindings::kite_mlx5_post_send(self.ptr.as_ptr(), first, count, &mut posted) };
        posted as usize
    }
}

impl<N: CompletionHandler> Drop for Mlx5Qp<N> {
    fn drop(&mut self) {
        // SAFETY: By the type invariants.
        if unsafe { bindings::kite_mlx5_qp_destroy(self.ptr.as_ptr()) } != 0 {
            pr_warn!("QP cannot be destroyed: memory leaked\n");
        }
    }
}
