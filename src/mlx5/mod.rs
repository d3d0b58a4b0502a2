// SPDX-License-Identifier: GPL-2.0

//! Safe Rust over `c-shim/mlx5.h`: dynamically connected (DC) queue pairs, and atomic operations, which no verb makes for
//! the kernel.
//!
//! A request on an *initiator* names its *target*, wherever that is, so a few of them reach every node (KRCORE,
//! section 3). Objects own what they are made from, as those of `verbs` do, in whose protection domain they are:
//! what was said there of the end of a device holds here, too.

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
        pd::Pd,
    },
};
use core::ptr::NonNull;
use kernel::{
    error::{from_err_ptr, to_result},
    prelude::*,
    sync::Arc,
};

/// All that peers may do to our memory.
const ACCESS_FLAGS: c_int = (bindings::ib_access_flags_IB_ACCESS_LOCAL_WRITE
    | bindings::ib_access_flags_IB_ACCESS_REMOTE_READ
    | bindings::ib_access_flags_IB_ACCESS_REMOTE_WRITE
    | bindings::ib_access_flags_IB_ACCESS_REMOTE_ATOMIC) as c_int;

/// The port that we send and receive by.
#[derive(Clone, Copy)]
pub(crate) struct PortConfig {
    pub(crate) port: PortNum,
    /// Index of our GID in its table.
    pub(crate) gid_index: u8,
    /// Bytes of its largest packet.
    pub(crate) mtu: u32,
}

/// The hardware of an RNIC.
///
/// # Invariants
///
/// `ptr` is open, and we own it; `key` is a key of its.
pub(crate) struct Mlx5Device {
    ptr: NonNull<bindings::kite_mlx5_dev>,
    global_mkey: u32,
    has_dc: bool,
    max_rd_atomic: u8,
    pd: Arc<Pd>,
}

// SAFETY: The shim's calls may be made from any thread.
unsafe impl Send for Mlx5Device {}
// SAFETY: As above.
unsafe impl Sync for Mlx5Device {}

impl Mlx5Device {
    /// The hardware behind a protection domain, if an mlx5 driver drives it and it has what we need.
    pub(crate) fn probe(pd: &Arc<Pd>) -> Option<Arc<Self>> {
        match Self::open(pd.clone()) {
            Ok(hca) => Some(hca),
            Err(error) if error == ENXIO || error == errno::opnotsupp() => None,
            Err(error) => {
                pr_warn!("mlx5 path unavailable, using verbs: {error:?}\n");
                None
            }
        }
    }

    /// Opens the hardware behind a protection domain, and makes a key to all memory there.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` if no mlx5 driver drives it; `ENXIO` if it has no atomics in our byte order; `EIO`, `ENOMEM`.
    fn open(pd: Arc<Pd>) -> Result<Arc<Self>> {
        // SAFETY: The protection domain is valid, and outlives what is opened, which holds it.
        let ptr = from_err_ptr(unsafe {
            bindings::kite_mlx5_open(pd.as_raw(), None, core::ptr::null_mut())
        })?;
        let ptr = NonNull::new(ptr).ok_or(ENOMEM)?;
        let mut caps = bindings::kite_mlx5_caps::default();
        // SAFETY: It is open, and `caps` may be written.
        unsafe { bindings::kite_mlx5_query(ptr.as_ptr(), &mut caps) };
        let global_mkey = Self::create_global_mkey(ptr, &caps).inspect_err(|_| {
            // SAFETY: It is ours, and nothing was made from it.
            unsafe { bindings::kite_mlx5_close(ptr.as_ptr()) }
        })?;
        // INVARIANT: We just opened it, and made the key.
        let hca = Self {
            ptr,
            global_mkey,
            has_dc: caps.dc,
            max_rd_atomic: caps.max_rd_atomic.min(caps.max_dest_rd_atomic).min(16) as u8,
            pd,
        };
        Ok(Arc::new(hca, GFP_KERNEL)?)
    }

    /// Makes a key, if the hardware has all that we need.
    fn create_global_mkey(
        ptr: NonNull<bindings::kite_mlx5_dev>,
        caps: &bindings::kite_mlx5_caps,
    ) -> Result<u32> {
        if !caps.atomics {
            return Err(ENXIO);
        }
        let mut mkey = 0;
        // SAFETY: It is open, and `key` may be written.
        to_result(unsafe {
            bindings::kite_mlx5_global_mkey_create(ptr.as_ptr(), ACCESS_FLAGS, &mut mkey)
        })?;
        Ok(mkey)
    }

    /// Whether it has DC.
    pub(crate) fn has_dc(&self) -> bool {
        self.has_dc
    }

    fn as_raw(&self) -> *mut bindings::kite_mlx5_dev {
        self.ptr.as_ptr()
    }

    /// The RNIC.
    pub(crate) fn device(&self) -> IbDevice {
        self.pd.device()
    }

    /// The key to all memory that is mapped for DMA, for us and for the kernels of peers.
    pub(crate) fn global_mkey(&self) -> u32 {
        self.global_mkey
    }
}

impl Drop for Mlx5Device {
    fn drop(&mut self) {
        // SAFETY: By the type invariants; what was made from it holds a reference to us.
        unsafe {
            if bindings::kite_mlx5_mkey_destroy(self.as_raw(), self.global_mkey) != 0 {
                pr_warn!("global mkey cannot be destroyed\n");
            }
            bindings::kite_mlx5_close(self.as_raw());
        }
    }
}
