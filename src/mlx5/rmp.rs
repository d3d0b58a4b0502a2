// SPDX-License-Identifier: GPL-2.0

//! What peers SEND to the targets of a node comes to buffers that all targets share.
//!
//! A buffer is posted again as soon as it was read, and who found none tries again: the RNIC of the sender
//! waits meanwhile, and with it whoever shares it. So it is for upper layers to see to it that there are enough.

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
    },
};
use core::ptr::NonNull;
use kernel::{
    error::{from_err_ptr, to_result},
    prelude::*,
    sync::Arc,
};
use kite_core::wire::packet::MAX_PACKET_BYTES;

/// Receive buffers of packets.
///
/// # Invariants
///
/// `rmp` is live, and we own it; its entries name `buffers` by index.
pub(crate) struct Rmp<N: CompletionHandler> {
    rmp: NonNull<bindings::kite_mlx5_rmp>,
    buffers: Arc<DmaPages>,
    cq: Arc<Mlx5Cq<N>>,
    hca: Arc<Mlx5Device>,
}

// SAFETY: The shim's calls may be made from any thread.
unsafe impl<N: CompletionHandler> Send for Rmp<N> {}
// SAFETY: As above.
unsafe impl<N: CompletionHandler> Sync for Rmp<N> {}

impl<N: CompletionHandler> Rmp<N> {
    /// Makes and posts so many buffers.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the hardware has no room for as many; `EIO`, `ENOMEM`.
    pub(crate) fn new(hca: Arc<Mlx5Device>, count: u32, notify: Arc<N>) -> Result<Arc<Self>> {
        let cq = Mlx5Cq::new(hca.clone(), count, 0, notify)?;
        let pages = ContiguousPages::new(count as usize * MAX_PACKET_BYTES, MemcgCharge::Kernel)?;
        let buffers = Arc::new(DmaPages::new(hca.device(), pages)?, GFP_KERNEL)?;
        // SAFETY: The hardware is open.
        let rmp = from_err_ptr(unsafe { bindings::kite_mlx5_rmp_create(hca.as_raw(), count, 1) })?;
        // INVARIANT: We just made it, and nothing is posted.
        let pool = Self {
            rmp: NonNull::new(rmp).ok_or(ENOMEM)?,
            buffers,
            cq,
            hca,
        };
        (0..count).try_for_each(|i| pool.post(i))?;
        Ok(Arc::new(pool, GFP_KERNEL)?)
    }

    pub(super) fn as_raw(&self) -> *mut bindings::kite_mlx5_rmp {
        self.rmp.as_ptr()
    }

    /// Tells what has come.
    pub(crate) fn cq(&self) -> &Arc<Mlx5Cq<N>> {
        &self.cq
    }

    fn post(&self, index: u32) -> Result {
        let offset = index as usize * MAX_PACKET_BYTES;
        let sge = self
            .buffers
            .sge(self.hca.global_mkey(), offset, MAX_PACKET_BYTES)
            .ok_or(EINVAL)?;
        let sge: *const _ = &sge;
        // SAFETY: By the type invariants; the buffer outlives the pool, and an `Sge` is what the shim has.
        to_result(unsafe {
            bindings::kite_mlx5_rmp_post_recv(self.as_raw(), index.into(), sge.cast(), 1)
        })
    }

    /// Takes what came with a completion, and posts its buffer again.
    pub(crate) fn receive_packet(&self, completion: &WorkCompletion) -> KVec<u8> {
        let (index, len) = (completion.wr_id as u32, completion.byte_len as usize);
        let offset = index as usize * MAX_PACKET_BYTES;
        let mut bytes = bytes::alloc_zeroed_nofail(len.min(MAX_PACKET_BYTES));
        self.buffers.sync_for_cpu(offset, bytes.len());
        // It is within the buffers.
        let _ = self.buffers.read(offset, &mut bytes);
        // Only hardware that failed takes no more of them.
        let _ = self.post(index);
        bytes
    }
}

impl<N: CompletionHandler> Drop for Rmp<N> {
    fn drop(&mut self) {
        // SAFETY: By the type invariants. Targets hold it, so there is none.
        if unsafe { bindings::kite_mlx5_rmp_destroy(self.as_raw()) } != 0 {
            // The hardware may go on writing there.
            core::mem::forget(self.buffers.clone());
            pr_warn!("RMP cannot be destroyed: memory leaked\n");
        }
    }
}
