// SPDX-License-Identifier: GPL-2.0

//! The protection domain, and with it the one global memory region of a node.

use super::{device::IbDevice, RESTRACK_OWNER};
use crate::bindings;
use core::ptr::NonNull;
use kernel::{error::from_err_ptr, prelude::*, sync::Arc};

/// A protection domain with a key to all memory that is mapped for DMA.
///
/// # Invariants
///
/// `ptr` is a live protection domain that we own.
pub(crate) struct Pd {
    ptr: NonNull<bindings::ib_pd>,
    device: IbDevice,
}

// SAFETY: The RDMA core's calls on a protection domain may be made from any thread.
unsafe impl Send for Pd {}
// SAFETY: As above.
unsafe impl Sync for Pd {}

impl Pd {
    /// Allocates a protection domain with a global remote key. The RDMA core warns of it in the log:
    /// whoever has the key reaches all memory that is mapped for DMA.
    pub(crate) fn new(device: IbDevice) -> Result<Arc<Self>> {
        let flags = bindings::ib_pd_flags_IB_PD_UNSAFE_GLOBAL_RKEY;
        // SAFETY: The device is valid and the name lives forever.
        let ptr = from_err_ptr(unsafe {
            bindings::__ib_alloc_pd(device.as_raw(), flags, RESTRACK_OWNER.as_char_ptr())
        })?;
        let ptr = NonNull::new(ptr).ok_or(ENOMEM)?;
        // INVARIANT: We just made it.
        Ok(Arc::new(Self { ptr, device }, GFP_KERNEL)?)
    }

    pub(crate) fn as_raw(&self) -> *mut bindings::ib_pd {
        self.ptr.as_ptr()
    }

    /// The device it belongs to.
    pub(crate) fn device(&self) -> IbDevice {
        self.device
    }

    /// The key by which our own work requests name local memory.
    pub(crate) fn local_dma_lkey(&self) -> u32 {
        // SAFETY: By the type invariants; set once, before `new` returned.
        unsafe { (*self.as_raw()).local_dma_lkey }
    }

    /// The key by which peers name our memory. It must reach trusted kernels only.
    pub(crate) fn global_rkey(&self) -> u32 {
        // SAFETY: By the type invariants; set once, before `new` returned.
        unsafe { (*self.as_raw()).unsafe_global_rkey }
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        // SAFETY: By the type invariants; whatever was made in it holds a reference to us.
        unsafe { bindings::ib_dealloc_pd_user(self.as_raw(), core::ptr::null_mut()) };
    }
}
