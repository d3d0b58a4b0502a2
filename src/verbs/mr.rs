// SPDX-License-Identifier: GPL-2.0

//! Memory of a process by a key of its own, which a work request gives it (fast registration), as storage drivers do.

use super::{dma::LongTermDmaMap, pd::Pd};
use crate::bindings::{self, inline};
use core::ptr::NonNull;
use kernel::{
    error::{from_err_ptr, to_result},
    prelude::*,
    sync::Arc,
};

/// A memory region that has no key until [`super::qp::Qp::post_register`] has given it one.
///
/// # Invariants
///
/// `ptr` is a live memory region that we own, of the pages of `memory`, which stay mapped for as long as it lives.
pub(crate) struct FastRegMr {
    ptr: NonNull<bindings::ib_mr>,
    dma: Arc<LongTermDmaMap>,
    _pd: Arc<Pd>,
}

// SAFETY: The RDMA core's calls on a memory region may be made from any thread.
unsafe impl Send for FastRegMr {}
// SAFETY: As above.
unsafe impl Sync for FastRegMr {}

impl FastRegMr {
    /// One of `len` bytes that requests name by addresses from `addr` on, which is in the first page.
    ///
    /// # Errors
    ///
    /// `ENXIO` if the RNIC has no regions of so many pages; `ENOMEM`, and what its driver says.
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
        // SAFETY: The protection domain is valid, and outlives the region, which holds it.
        let ptr = from_err_ptr(unsafe { bindings::ib_alloc_mr(pd.as_raw(), mr_type, count) })?;
        // INVARIANT: We just made it.
        let this = Self {
            ptr: NonNull::new(ptr).ok_or(ENOMEM)?,
            dma,
            _pd: pd,
        };
        // SAFETY: By the type invariants; so many addresses are there, and they are mapped.
        to_result(unsafe { inline::kite_map_mr(ptr, pages.as_ptr(), count, addr, len) })?;
        Ok(this)
    }

    pub(super) fn as_raw(&self) -> *mut bindings::ib_mr {
        self.ptr.as_ptr()
    }

    /// The key by which our requests name it.
    pub(crate) fn lkey(&self) -> u32 {
        // SAFETY: By the type invariants; it does not change once the region was registered.
        unsafe { (*self.as_raw()).lkey }
    }

    /// The key by which peers' requests do.
    pub(crate) fn rkey(&self) -> u32 {
        // SAFETY: As above.
        unsafe { (*self.as_raw()).rkey }
    }
}

impl Drop for FastRegMr {
    fn drop(&mut self) {
        // SAFETY: By the type invariants; the memory is unmapped after that.
        if unsafe { bindings::ib_dereg_mr_user(self.as_raw(), core::ptr::null_mut()) } != 0 {
            // The RNIC may go on using the memory.
            core::mem::forget(self.dma.clone());
            pr_warn!("MR cannot be destroyed: memory leaked\n");
        }
    }
}
