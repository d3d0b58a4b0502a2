// SPDX-License-Identifier: GPL-2.0

//! mlx5 completion queues for the QPs and the DCT of this module. CQs of the verbs API serve only QPs that
//! were created through verbs.
//!
//! # Operation
//!
//! A thread arms the CQ and polls once more before it sleeps ([`Mlx5Cq::arm`]). The shim calls
//! [`CompletionHandler::notify`] from a tasklet.
//!
//! # Recovery
//!
//! After a device failure, the shim completes posted sends as flushed, since the hardware writes no
//! completions. If the CQ cannot be destroyed, its memory and its handler are leaked.
//!
//! # Locking
//!
//! `kite_mlx5_cq::lock` in the shim (spin lock, `irqsave`) serializes polling, arming, and the removal of
//! completions. `kite_mlx5_rmp::lock` nests inside.

use super::Mlx5Device;
use crate::{
    bindings,
    sys::compat::forbid_unload,
    verbs::cq::{CompletionHandler, WcStatus, WorkCompletion},
    verbs::log::rnic_warn,
};
use core::{mem::MaybeUninit, ptr::NonNull};
use kernel::{error::from_err_ptr, prelude::*, sync::Arc};

/// Maximum entries taken by one poll.
const POLL_BATCH: usize = 16;

/// Completion queue.
///
/// # Invariants
///
/// `ptr` is a live completion queue that this object owns. The context of its completion handler is the `N`
/// of `_notify`.
pub(crate) struct Mlx5Cq<N: CompletionHandler> {
    ptr: NonNull<bindings::kite_mlx5_cq>,
    _notify: Arc<N>,
    hca: Arc<Mlx5Device>,
}

// SAFETY: CQs may be polled and armed from any thread, since the shim locks internally.
unsafe impl<N: CompletionHandler> Send for Mlx5Cq<N> {}
// SAFETY: The argument for `Send` holds here too.
unsafe impl<N: CompletionHandler> Sync for Mlx5Cq<N> {}

impl<N: CompletionHandler> Mlx5Cq<N> {
    /// Creates a CQ of at least `entries` entries on completion vector `vector`.
    ///
    /// # Errors
    ///
    /// - `EINVAL`: `entries` exceeds the limit of the hardware.
    /// - `EIO`: the command failed.
    /// - `ENOMEM`: no memory.
    pub(crate) fn new(
        hca: Arc<Mlx5Device>,
        entries: u32,
        vector: u32,
        notify: Arc<N>,
    ) -> Result<Arc<Self>> {
        let context = Arc::as_ptr(&notify).cast_mut().cast();
        // SAFETY: The device is open. `notify` outlives the CQ, since the CQ holds a reference.
        let ptr = from_err_ptr(unsafe {
            bindings::kite_mlx5_cq_create(
                hca.as_raw(),
                entries,
                vector,
                Some(Self::on_completion),
                context,
            )
        })?;
        // INVARIANT: The CQ was just created with `notify` as its context.
        let cq = Self {
            ptr: NonNull::new(ptr).ok_or(ENOMEM)?,
            _notify: notify,
            hca,
        };
        Ok(Arc::new(cq, GFP_KERNEL)?)
    }

    pub(super) fn as_raw(&self) -> *mut bindings::kite_mlx5_cq {
        self.ptr.as_ptr()
    }

    /// Takes at most [`POLL_BATCH`] completions and passes each to `f`. Returns their number.
    pub(crate) fn poll(&self, mut f: impl FnMut(WorkCompletion)) -> usize {
        let mut wcs = [const { MaybeUninit::<bindings::kite_mlx5_wc>::uninit() }; POLL_BATCH];
        // SAFETY: The CQ is live, by the type invariants. The shim writes at most `POLL_BATCH` entries, for
        // which `wcs` has space.
        let n = unsafe {
            bindings::kite_mlx5_poll_cq(self.as_raw(), wcs.as_mut_ptr().cast(), POLL_BATCH as c_int)
        };
        // An error means that no further completions arrive: the device failed, or the CQ overflowed. The
        // number of slots excludes an overflow.
        let n = usize::try_from(n).unwrap_or(0).min(POLL_BATCH);
        for wc in &wcs[..n] {
            // SAFETY: The shim has initialized the first `n` entries.
            let wc = unsafe { wc.assume_init_ref() };
            f(WorkCompletion {
                wr_id: wc.wr_id,
                status: WcStatus::new(wc.status),
                byte_len: wc.byte_len,
                imm_data: wc.with_imm.then(|| u32::from_be(wc.imm)),
            });
        }
        n
    }

    /// Arms the CQ for one notification. A completion is notified unless a poll after this call returns it.
    /// So the caller must poll once more, and may sleep if that poll returns nothing.
    pub(crate) fn arm(&self) {
        // SAFETY: The CQ is live, by the type invariants.
        unsafe { bindings::kite_mlx5_cq_arm(self.as_raw()) };
    }

    /// # Safety
    ///
    /// Only the shim may call this function, with the context that `new` has registered.
    unsafe extern "C" fn on_completion(context: *mut c_void) {
        // SAFETY: By the safety requirements, `context` is the one registered in `new`. By the type
        // invariants, it is the `N` of `_notify`, which outlives the CQ.
        unsafe { &*context.cast::<N>() }.notify();
    }
}

impl<N: CompletionHandler> Drop for Mlx5Cq<N> {
    fn drop(&mut self) {
        // SAFETY: The CQ is live, by the type invariants, and not used after this call. If the call succeeds,
        // no notification follows.
        if unsafe { bindings::kite_mlx5_cq_destroy(self.as_raw()) } != 0 {
            rnic_warn!(self.hca.device(), "CQ cannot be destroyed: memory leaked\n");
            // The CQ may still raise interrupts: leak the handler.
            core::mem::forget(self._notify.clone());
            forbid_unload();
        }
    }
}
