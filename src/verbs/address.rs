// SPDX-License-Identifier: GPL-2.0

//! Addresses of remote ports, for datagrams and for connecting QPs.

use super::{
    device::{Gid, LinkLayer, PortNum},
    pd::Pd,
};
use crate::bindings::{self, inline};
use core::ptr::NonNull;
use kernel::{error::from_err_ptr, prelude::*, sync::Arc};

/// Hop limit of packets that cross subnets.
const HOP_LIMIT: u8 = 64;

/// Address of a port.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PortAddress {
    /// GID of the port.
    pub(crate) gid: Gid,
    /// LID of the port. InfiniBand only.
    pub(crate) lid: u16,
}

/// Address handle: path from a local port to a remote port.
///
/// # Invariants
///
/// `ptr` is a live address handle that this object owns. It was created from `attr`.
pub(crate) struct AddressHandle {
    ptr: NonNull<bindings::ib_ah>,
    attr: bindings::rdma_ah_attr,
    _pd: Arc<Pd>,
}

// SAFETY: Address handles may be used from any thread.
unsafe impl Send for AddressHandle {}
// SAFETY: The argument for `Send` holds here too.
unsafe impl Sync for AddressHandle {}

impl AddressHandle {
    /// Creates an address handle from GID `sgid_index` of `port` to `dest`. May sleep until
    /// the network has resolved the neighbor.
    ///
    /// # Errors
    ///
    /// - `EHOSTUNREACH`, `ENODATA`, `ETIMEDOUT`: the neighbor is unknown.
    /// - Other errors of the RDMA core.
    pub(crate) fn new(
        pd: Arc<Pd>,
        port: PortNum,
        link_layer: LinkLayer,
        sgid_index: u8,
        dest: PortAddress,
    ) -> Result<Self> {
        let mut attr = Self::build_attr(&pd, port, link_layer, sgid_index, dest);
        // Only the variant for user space resolves the MAC address that RoCE needs. It stores the address in
        // `attr`, from which QPs are connected.
        // SAFETY: `pd` is valid. A null `udata` makes the call one of the kernel.
        let ptr = from_err_ptr(unsafe {
            bindings::rdma_create_user_ah(pd.as_raw(), &mut attr, core::ptr::null_mut())
        })?;
        // INVARIANT: The address handle was just created from `attr`.
        Ok(Self {
            ptr: NonNull::new(ptr).ok_or(ENOMEM)?,
            attr,
            _pd: pd,
        })
    }

    fn build_attr(
        pd: &Pd,
        port: PortNum,
        link_layer: LinkLayer,
        sgid_index: u8,
        dest: PortAddress,
    ) -> bindings::rdma_ah_attr {
        let mut attr: bindings::rdma_ah_attr = pin_init::zeroed();
        let mut dgid = bindings::ib_gid { raw: dest.gid };
        // SAFETY: The device is valid. `attr` and `dgid` are local variables.
        unsafe {
            attr.type_ = inline::rdma_ah_find_type(pd.device().as_raw(), port);
            inline::rdma_ah_set_port_num(&mut attr, port);
            if link_layer == LinkLayer::InfiniBand {
                inline::rdma_ah_set_dlid(&mut attr, u32::from(dest.lid));
            } else {
                inline::rdma_ah_set_grh(&mut attr, &mut dgid, 0, sgid_index, HOP_LIMIT, 0);
            }
        }
        attr
    }

    pub(super) fn as_raw(&self) -> *mut bindings::ib_ah {
        self.ptr.as_ptr()
    }

    pub(crate) fn raw_attr(&self) -> bindings::rdma_ah_attr {
        // SAFETY: The type is plain data, for which bindgen does not derive `Copy`. Its GID pointer is null.
        unsafe { core::ptr::read(&self.attr) }
    }
}

impl Drop for AddressHandle {
    fn drop(&mut self) {
        let flags = bindings::rdma_destroy_ah_flags_RDMA_DESTROY_AH_SLEEPABLE;
        // SAFETY: The handle is live, by the type invariants, and not used after this call. The caller may
        // sleep.
        unsafe { bindings::rdma_destroy_ah_user(self.as_raw(), flags, core::ptr::null_mut()) };
    }
}
