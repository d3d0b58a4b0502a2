// SPDX-License-Identifier: GPL-2.0

//! Protection domain, with the node's global memory region.

use super::{device::IbDevice, RESTRACK_OWNER};
use crate::bindings;
use core::ptr::NonNull;
use kernel::{error::from_err_ptr, prelude::*, sync::Arc};

/// Protection domain with a key for all DMA-mapped memory.
///
/// # Invariants
///
/// `ptr` is a live protection domain that this object owns.
pub(crate) struct Pd {
    ptr: NonNull<bindings::ib_pd>,
    device: IbDevice,
}

// SAFETY: The functions of the RDMA core on a protection domain may be called from any thread.
unsafe impl Send for Pd {}
// SAFETY: The argument for `Send` holds here too.
unsafe impl Sync for Pd {}

impl Pd {
    /// Allocates a protection domain with a global remote key. The RDMA core logs a warning, since the key
    /// gives access to all DMA-mapped memory.
    pub(crate) fn new(device: IbDevice) -> Result<Arc<Self>> {
        let flags = bindings::ib_pd_flags_IB_PD_UNSAFE_GLOBAL_RKEY;
        // SAFETY: The device is valid, and the name has static lifetime.
        let ptr = from_err_ptr(unsafe {
            bindings::__ib_alloc_pd(device.as_raw(), flags, RESTRACK_OWNER.as_char_ptr())
        })?;
        let ptr = NonNull::new(ptr).ok_or(ENOMEM)?;
        // INVARIANT: The protection domain was just allocated.
        Ok(Arc::new(Self { ptr, device }, GFP_KERNEL)?)
    }

    pub(crate) fn as_raw(&self) -> *mut bindings::ib_pd {
        self.ptr.as_ptr()
    }

    /// Returns the device.
    pub(crate) fn device(&self) -> IbDevice {
        self.device
    }

    /// Returns the key for local memory in local work requests.
    pub(crate) fn local_dma_lkey(&self) -> u32 {
        // SAFETY: The protection domain is live, by the type invariants. The key was set before `new`
        // returned, and does not change.
        unsafe { (*self.as_raw()).local_dma_lkey }
    }

    /// Returns the key with which peers access local memory. Only trusted kernels may receive it.
    pub(crate) fn global_rkey(&self) -> u32 {
        // SAFETY: The protection domain is live, by the type invariants. The key was set before `new`
        // returned, and does not change.
        unsafe { (*self.as_raw()).unsafe_global_rkey }
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        // SAFETY: The protection domain is live, by the type invariants. Every object in it holds a
        // reference, so none is left.
        unsafe { bindings::ib_dealloc_pd_user(self.as_raw(), core::ptr::null_mut()) };
    }
}
