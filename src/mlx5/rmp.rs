// SPDX-License-Identifier: GPL-2.0

//! Receive memory pool (RMP): buffers for the messages that peers send to the DCTs of a node. All DCTs share
//! the pool.
//!
//! A buffer is posted again as soon as it is read. A sender that finds no buffer retries. Its RNIC waits
//! meanwhile, and delays all other requests on the same DCI. So the upper layers must ensure that there are
//! enough buffers.

use super::{cq::Mlx5Cq, Mlx5Device};
use crate::{
    bindings,
    sys::{
        bytes,
        pages::{ContiguousPages, MemcgCharge},
    },
    verbs::{
        cq::{CompletionHandler, WorkCompletion},
        dma::DmaPages,
        log::rnic_warn,
    },
};
use core::ptr::NonNull;
use kernel::{
    error::{from_err_ptr, to_result},
    prelude::*,
    sync::Arc,
};

/// Shared receive buffers for packets.
///
/// # Invariants
///
/// `rmp` is a live pool that this object owns. Its entries refer to `buffers` by index.
pub(crate) struct Rmp<N: CompletionHandler> {
    rmp: NonNull<bindings::kite_mlx5_rmp>,
    buffers: Arc<DmaPages>,
    /// Bytes of each buffer.
    buffer_bytes: usize,
    cq: Arc<Mlx5Cq<N>>,
    hca: Arc<Mlx5Device>,
}

// SAFETY: The functions of the shim may be called from any thread.
unsafe impl<N: CompletionHandler> Send for Rmp<N> {}
// SAFETY: The argument for `Send` holds here too.
unsafe impl<N: CompletionHandler> Sync for Rmp<N> {}

impl<N: CompletionHandler> Rmp<N> {
    /// Creates a pool and posts `count` buffers of `buffer_bytes` bytes.
    ///
    /// # Errors
    ///
    /// - `EINVAL`: `count` exceeds the limit of the hardware.
    /// - `EIO`: the command failed.
    /// - `ENOMEM`: no memory.
    pub(crate) fn new(
        hca: Arc<Mlx5Device>,
        count: u32,
        buffer_bytes: usize,
        notify: Arc<N>,
    ) -> Result<Arc<Self>> {
        let cq = Mlx5Cq::new(hca.clone(), count, 0, notify)?;
        let pages = ContiguousPages::new(count as usize * buffer_bytes, MemcgCharge::Kernel)?;
        let buffers = Arc::new(DmaPages::new(hca.device(), pages)?, GFP_KERNEL)?;
        // SAFETY: The device is open.
        let rmp = from_err_ptr(unsafe { bindings::kite_mlx5_rmp_create(hca.as_raw(), count, 1) })?;
        // INVARIANT: The pool was just created, and nothing is posted.
        let pool = Self {
            rmp: NonNull::new(rmp).ok_or(ENOMEM)?,
            buffers,
            buffer_bytes,
            cq,
            hca,
        };
        (0..count).try_for_each(|i| pool.post(i))?;
        Ok(Arc::new(pool, GFP_KERNEL)?)
    }

    pub(super) fn as_raw(&self) -> *mut bindings::kite_mlx5_rmp {
        self.rmp.as_ptr()
    }

    /// Returns the CQ of the received messages.
    pub(crate) fn cq(&self) -> &Arc<Mlx5Cq<N>> {
        &self.cq
    }

    fn post(&self, index: u32) -> Result {
        let offset = index as usize * self.buffer_bytes;
        let sge = self
            .buffers
            .sge(self.hca.local_dma_lkey(), offset, self.buffer_bytes)
            .ok_or(EINVAL)?;
        let sge: *const _ = &sge;
        // SAFETY: The pool is live, by the type invariants. The buffers stay mapped while the pool is live.
        // `Sge` is a transparent wrapper of the shim's entry.
        to_result(unsafe {
            bindings::kite_mlx5_rmp_post_recv(self.as_raw(), index.into(), sge.cast(), 1)
        })
    }

    /// Copies the packet of a completion, and posts its buffer again.
    pub(crate) fn receive_packet(&self, completion: &WorkCompletion) -> KVec<u8> {
        let (index, len) = (completion.wr_id as u32, completion.byte_len as usize);
        let offset = index as usize * self.buffer_bytes;
        let mut bytes = bytes::alloc_zeroed_nofail(len.min(self.buffer_bytes));
        self.buffers.sync_for_cpu(offset, bytes.len());
        // Cannot fail: the range lies within the buffers.
        let _ = self.buffers.read(offset, &mut bytes);
        // Fails only if the device has failed.
        let _ = self.post(index);
        bytes
    }
}

impl<N: CompletionHandler> Drop for Rmp<N> {
    fn drop(&mut self) {
        // SAFETY: The pool is live, by the type invariants. Every DCT that uses the pool holds a reference,
        // so none is left.
        if unsafe { bindings::kite_mlx5_rmp_destroy(self.as_raw()) } != 0 {
            // The hardware may still write to the buffers: leak them.
            core::mem::forget(self.buffers.clone());
            rnic_warn!(
                self.hca.device(),
                "RMP cannot be destroyed: memory leaked\n"
            );
        }
    }
}
