// SPDX-License-Identifier: GPL-2.0

//! Completion queues of DC: those of verbs serve only queue pairs that verbs made.

use super::Mlx5Device;
use crate::{
    bindings,
    verbs::cq::{CompletionHandler, WcStatus, WorkCompletion},
};
use core::{mem::MaybeUninit, ptr::NonNull};
use kernel::{error::from_err_ptr, prelude::*, sync::Arc};

/// Most entries taken from a queue at a time.
const POLL_BATCH: usize = 16;

/// A completion queue.
///
/// # Invariants
///
/// `ptr` is a live completion queue that we own, whose context is the `N` of `_notify`.
pub(crate) struct Mlx5Cq<N: CompletionHandler> {
    ptr: NonNull<bindings::kite_mlx5_cq>,
    _notify: Arc<N>,
    _hca: Arc<Mlx5Device>,
}

// SAFETY: Completion queues may be polled and armed from any thread; the shim locks inside.
unsafe impl<N: CompletionHandler> Send for Mlx5Cq<N> {}
// SAFETY: As above.
unsafe impl<N: CompletionHandler> Sync for Mlx5Cq<N> {}

impl<N: CompletionHandler> Mlx5Cq<N> {
    /// Makes a queue of at least `entries` on completion vector `vector`.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the hardware has no queues of so many; `EIO`, `ENOMEM`.
    pub(crate) fn new(
        hca: Arc<Mlx5Device>,
        entries: u32,
        vector: u32,
        notify: Arc<N>,
    ) -> Result<Arc<Self>> {
        let context = Arc::as_ptr(&notify).cast_mut().cast();
        // SAFETY: The hardware is open, and `notify` outlives the queue, as the queue holds it.
        let ptr = from_err_ptr(unsafe {
            bindings::kite_mlx5_cq_create(
                hca.as_raw(),
                entries,
                vector,
                Some(Self::on_completion),
                context,
            )
        })?;
        // INVARIANT: We just made it.
        let cq = Self {
            ptr: NonNull::new(ptr).ok_or(ENOMEM)?,
            _notify: notify,
            _hca: hca,
        };
        Ok(Arc::new(cq, GFP_KERNEL)?)
    }

    pub(super) fn as_raw(&self) -> *mut bindings::kite_mlx5_cq {
        self.ptr.as_ptr()
    }

    /// Takes a batch of completions and passes each to `f`. Returns how many there were.
    pub(crate) fn poll(&self, mut f: impl FnMut(WorkCompletion)) -> usize {
        let mut wcs = [const { MaybeUninit::<bindings::kite_mlx5_wc>::uninit() }; POLL_BATCH];
        // SAFETY: By the type invariants; at most `BATCH` entries are written.
        let n = unsafe {
            bindings::kite_mlx5_poll_cq(self.as_raw(), wcs.as_mut_ptr().cast(), POLL_BATCH as c_int)
        };
        // A queue that overflowed, which the slots exclude, or hardware that failed brings nothing more.
        let n = usize::try_from(n).unwrap_or(0).min(POLL_BATCH);
        for wc in &wcs[..n] {
            // SAFETY: The shim has written this entry.
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

    /// Asks for one notification, on which who polls once more and finds nothing may rely.
    pub(crate) fn arm(&self) {
        // SAFETY: By the type invariants.
        unsafe { bindings::kite_mlx5_cq_arm(self.as_raw()) };
    }

    /// # Safety
    ///
    /// Called by the shim alone, with the context given to it in `new`.
    unsafe extern "C" fn on_completion(context: *mut c_void) {
        // SAFETY: By the safety requirements and the type invariants.
        unsafe { &*context.cast::<N>() }.notify();
    }
}

impl<N: CompletionHandler> Drop for Mlx5Cq<N> {
    fn drop(&mut self) {
        // SAFETY: By the type invariants; no notification comes after this has succeeded.
        if unsafe { bindings::kite_mlx5_cq_destroy(self.as_raw()) } != 0 {
            pr_warn!("CQ cannot be destroyed: memory leaked\n");
            // An interrupt may still be dealt with.
            core::mem::forget(self._notify.clone());
        }
    }
}
