// SPDX-License-Identifier: GPL-2.0

//! Memory of a process with a key of its own, assigned by a work request (fast registration, as in storage
//! drivers).

use super::{dma::LongTermDmaMap, log::rnic_warn, pd::Pd};
use crate::bindings::{self, inline};
use core::ptr::NonNull;
use kernel::{
    error::{from_err_ptr, to_result},
    prelude::*,
    sync::Arc,
};

/// Memory region that has no valid key before [`super::qp::Qp::post_reg_mr`].
///
/// # Invariants
///
/// `ptr` is a live memory region that this object owns. Its pages are those of `dma`, which stay mapped while
/// the region exists.
pub(crate) struct FastRegMr {
    ptr: NonNull<bindings::ib_mr>,
    dma: Arc<LongTermDmaMap>,
    pd: Arc<Pd>,
}

// SAFETY: The functions of the RDMA core on a memory region may be called from any thread.
unsafe impl Send for FastRegMr {}
// SAFETY: The argument for `Send` holds here too.
unsafe impl Sync for FastRegMr {}

impl FastRegMr {
    /// Creates a region of `len` bytes. Requests use addresses from `addr`, which lies in the first page.
    ///
    /// # Errors
    ///
    /// - `ENXIO`: the RNIC cannot register so large a region.
    /// - `ENOMEM`: no memory.
    /// - Errors of the driver.
    pub(crate) fn new(pd: Arc<Pd>, dma: Arc<LongTermDmaMap>, addr: u64, len: u64) -> Result<Self> {
        let mut pages = KVVec::new();
        for page in dma.dma_addrs() {
            pages.push(page, GFP_KERNEL)?;
        }
        let count = pages.len() as u32;
        if count > pd.device().limits().max_reg_pages {
            return Err(ENXIO);
        }
        let mr_type = bindings::ib_mr_type_IB_MR_TYPE_MEM_REG;
        // SAFETY: The protection domain is valid. It outlives the region, which holds a reference.
        let ptr = from_err_ptr(unsafe { bindings::ib_alloc_mr(pd.as_raw(), mr_type, count) })?;
        // INVARIANT: The region was just created. The pages stay mapped, since the region holds `dma`.
        let this = Self {
            ptr: NonNull::new(ptr).ok_or(ENOMEM)?,
            dma,
            pd,
        };
        // SAFETY: The region is live, by the type invariants. `pages` holds `count` addresses of mapped
        // pages.
        to_result(unsafe { inline::kite_map_mr(ptr, pages.as_ptr(), count, addr, len) })?;
        Ok(this)
    }

    pub(super) fn as_raw(&self) -> *mut bindings::ib_mr {
        self.ptr.as_ptr()
    }

    /// Returns the key for local work requests.
    pub(crate) fn lkey(&self) -> u32 {
        // SAFETY: The region is live, by the type invariants. Its key does not change after registration.
        unsafe { (*self.as_raw()).lkey }
    }

    /// Returns the key for requests of peers.
    pub(crate) fn rkey(&self) -> u32 {
        // SAFETY: The region is live, by the type invariants. Its key does not change after registration.
        unsafe { (*self.as_raw()).rkey }
    }
}

impl Drop for FastRegMr {
    fn drop(&mut self) {
        // SAFETY: The region is live, by the type invariants, and not used after this call. Its memory is
        // unmapped later.
        if unsafe { bindings::ib_dereg_mr_user(self.as_raw(), core::ptr::null_mut()) } != 0 {
            // The RNIC may still access the memory: leak it.
            core::mem::forget(self.dma.clone());
            rnic_warn!(self.pd.device(), "MR cannot be destroyed: memory leaked\n");
        }
    }
}
