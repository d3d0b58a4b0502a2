// SPDX-License-Identifier: GPL-2.0

//! Routes to other ports, for datagrams and for connecting queue pairs.

use super::{
    device::{Gid, LinkLayer, PortNum},
    pd::Pd,
};
use crate::bindings::{self, inline};
use core::ptr::NonNull;
use kernel::{error::from_err_ptr, prelude::*, sync::Arc};

/// Hops that a packet may take between subnets.
const HOP_LIMIT: u8 = 64;

/// Where a port is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PortAddress {
    /// Its GID.
    pub(crate) gid: Gid,
    /// Its LID, on InfiniBand.
    pub(crate) lid: u16,
}

/// A route from a port of ours to another.
///
/// # Invariants
///
/// `ptr` is a live address handle that we own, made from `attr`.
pub(crate) struct AddressHandle {
    ptr: NonNull<bindings::ib_ah>,
    attr: bindings::rdma_ah_attr,
    _pd: Arc<Pd>,
}

// SAFETY: Address handles may be used from any thread.
unsafe impl Send for AddressHandle {}
// SAFETY: As above.
unsafe impl Sync for AddressHandle {}

impl AddressHandle {
    /// Finds the way from `port` (whose GID has index `from`) to `to`. May sleep for as long as the
    /// network takes to resolve the neighbour.
    ///
    /// # Errors
    ///
    /// What the RDMA core says of an unknown neighbour: `EHOSTUNREACH`, `ENODATA`, `ETIMEDOUT`.
    pub(crate) fn new(
        pd: Arc<Pd>,
        port: PortNum,
        link_layer: LinkLayer,
        sgid_index: u8,
        dest: PortAddress,
    ) -> Result<Self> {
        let mut attr = Self::build_attr(&pd, port, link_layer, sgid_index, dest);
        // The call for user space is taken, since only it resolves the MAC address that RoCE needs;
        // `attr` then holds it, for queue pairs to connect by.
        // SAFETY: `pd` is valid; without `udata` the call is made for the kernel.
        let ptr = from_err_ptr(unsafe {
            bindings::rdma_create_user_ah(pd.as_raw(), &mut attr, core::ptr::null_mut())
        })?;
        // INVARIANT: We just made it.
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
        // SAFETY: The device is valid, and `attr` and `dgid` are ours.
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
        // SAFETY: Plain data, for which bindgen just does not derive `Copy`; the pointer in it to our own
        // GID is empty.
        unsafe { core::ptr::read(&self.attr) }
    }
}

impl Drop for AddressHandle {
    fn drop(&mut self) {
        let flags = bindings::rdma_destroy_ah_flags_RDMA_DESTROY_AH_SLEEPABLE;
        // SAFETY: By the type invariants; we may sleep.
        unsafe { bindings::rdma_destroy_ah_user(self.as_raw(), flags, core::ptr::null_mut()) };
    }
}
