// SPDX-License-Identifier: GPL-2.0

//! Safe wrappers of `c-shim/mlx5.h`: dynamically connected (DC) QPs, and atomics, which verbs do not offer to
//! the kernel.
//!
//! A request on a DC initiator (DCI) names its DC target (DCT) at any port. So a few DCIs reach every node
//! (KRCORE, section 3).
//!
//! Objects hold references to the objects from which they were created, as in [`crate::verbs`]. They belong
//! to a protection domain of that module. Its rule for device removal holds here too: all objects must be
//! dropped before [`crate::verbs::client::IbClient::remove`] returns.

pub(crate) mod cq;
pub(crate) mod dct;
pub(crate) mod mkey;
pub(crate) mod qp;
pub(crate) mod rmp;
pub(crate) mod wr;

use crate::{
    bindings, errno,
    verbs::{
        device::{IbDevice, PortNum},
        log::{rnic_err, rnic_warn},
        pd::Pd,
    },
};
use core::ptr::NonNull;
use kernel::{
    error::{from_err_ptr, to_result},
    prelude::*,
    sync::{
        atomic::{Atomic, Relaxed},
        Arc,
    },
};

/// Access rights of peers to local memory.
const ACCESS_FLAGS: c_int = (bindings::ib_access_flags_IB_ACCESS_LOCAL_WRITE
    | bindings::ib_access_flags_IB_ACCESS_REMOTE_READ
    | bindings::ib_access_flags_IB_ACCESS_REMOTE_WRITE
    | bindings::ib_access_flags_IB_ACCESS_REMOTE_ATOMIC) as c_int;

/// Local port for sends and receives.
#[derive(Clone, Copy)]
pub(crate) struct PortConfig {
    pub(crate) port: PortNum,
    /// Index of the local GID in the port's GID table.
    pub(crate) gid_index: u8,
    /// MTU in bytes.
    pub(crate) mtu: u32,
}

/// mlx5 device of an RNIC.
///
/// # Invariants
///
/// `ptr` is an open device that this object owns. `global_mkey` is one of its memory keys.
pub(crate) struct Mlx5Device {
    ptr: NonNull<bindings::kite_mlx5_dev>,
    global_mkey: Atomic<u32>,
    has_dc: bool,
    max_rd_atomic: u8,
    pd: Arc<Pd>,
}

// SAFETY: The functions of the shim may be called from any thread.
unsafe impl Send for Mlx5Device {}
// SAFETY: The argument for `Send` holds here too.
unsafe impl Sync for Mlx5Device {}

impl Mlx5Device {
    /// Opens the mlx5 device of a protection domain. Returns `None` if no mlx5 driver manages the device, or
    /// if a required capability is missing. Any other error is logged and returns `None` too.
    pub(crate) fn probe(pd: &Arc<Pd>) -> Option<Arc<Self>> {
        match Self::open(pd.clone()) {
            Ok(hca) => Some(hca),
            Err(error) if error == ENXIO || error == errno::opnotsupp() => None,
            Err(error) => {
                rnic_warn!(
                    pd.device(),
                    "mlx5 path unavailable, using verbs: {error:?}\n"
                );
                None
            }
        }
    }

    /// Opens the device of a protection domain and creates a key for all memory.
    ///
    /// # Errors
    ///
    /// - `EOPNOTSUPP`: no mlx5 driver manages the device, or its present bond excludes DC.
    /// - `ENXIO`: the device has no atomics in host byte order.
    /// - `EIO`: a command failed.
    /// - `ENOMEM`: no memory.
    fn open(pd: Arc<Pd>) -> Result<Arc<Self>> {
        // SAFETY: The protection domain is valid. It outlives the opened device, which holds a reference.
        let ptr = from_err_ptr(unsafe {
            bindings::kite_mlx5_open(pd.as_raw(), None, core::ptr::null_mut())
        })?;
        let ptr = NonNull::new(ptr).ok_or(ENOMEM)?;
        let mut caps = bindings::kite_mlx5_caps::default();
        // SAFETY: The device is open, and `caps` is valid for writes.
        unsafe { bindings::kite_mlx5_query(ptr.as_ptr(), &mut caps) };
        let has_atomics = caps.atomics.then_some(()).ok_or(ENXIO);
        let global_mkey = has_atomics.and_then(|()| create_global_mkey(ptr));
        let global_mkey = global_mkey.inspect_err(|_| {
            // SAFETY: This function owns the device, and no object was created from it.
            unsafe { bindings::kite_mlx5_close(ptr.as_ptr()) }
        })?;
        // INVARIANT: The device was just opened, and the key was just created.
        let hca = Self {
            ptr,
            global_mkey: Atomic::new(global_mkey),
            has_dc: caps.dc,
            max_rd_atomic: caps.max_rd_atomic.min(caps.max_dest_rd_atomic).min(16) as u8,
            pd,
        };
        Ok(Arc::new(hca, GFP_KERNEL)?)
    }

    /// Returns `true` if the device supports DC.
    pub(crate) fn has_dc(&self) -> bool {
        self.has_dc
    }

    fn as_raw(&self) -> *mut bindings::kite_mlx5_dev {
        self.ptr.as_ptr()
    }

    /// Returns the RDMA device.
    pub(crate) fn device(&self) -> IbDevice {
        self.pd.device()
    }

    /// Returns the key for all DMA-mapped memory, used by the kernels of peers.
    pub(crate) fn global_mkey(&self) -> u32 {
        self.global_mkey.load(Relaxed)
    }

    /// Replaces the key for all DMA-mapped memory. On return, the device rejects requests with the old key,
    /// unless an error was logged.
    pub(crate) fn replace_global_mkey(&self) {
        let replaced = create_global_mkey(self.ptr).and_then(|new_mkey| {
            let old_mkey = self.global_mkey.xchg(new_mkey, Relaxed);
            // SAFETY: The device is open, by the type invariants. No object of this node uses the key.
            to_result(unsafe { bindings::kite_mlx5_mkey_destroy(self.as_raw(), old_mkey) })
        });
        if let Err(error) = replaced {
            rnic_err!(
                self.device(),
                "removed nodes may still access memory: key cannot be replaced: {error:?}\n"
            );
        }
    }

    /// Returns the key for local memory in local work requests.
    fn local_dma_lkey(&self) -> u32 {
        self.pd.local_dma_lkey()
    }
}

/// Creates a key for all DMA-mapped memory, on an open device.
fn create_global_mkey(ptr: NonNull<bindings::kite_mlx5_dev>) -> Result<u32> {
    let mut mkey = 0;
    // SAFETY: The device is open, and `mkey` is valid for writes.
    to_result(unsafe {
        bindings::kite_mlx5_global_mkey_create(ptr.as_ptr(), ACCESS_FLAGS, &mut mkey)
    })?;
    Ok(mkey)
}

impl Drop for Mlx5Device {
    fn drop(&mut self) {
        // SAFETY: The device is open, by the type invariants. Every object created from it holds a reference,
        // so none is left.
        unsafe {
            if bindings::kite_mlx5_mkey_destroy(self.as_raw(), self.global_mkey()) != 0 {
                rnic_warn!(self.device(), "global mkey cannot be destroyed\n");
            }
            bindings::kite_mlx5_close(self.as_raw());
        }
    }
}
