// SPDX-License-Identifier: GPL-2.0

//! Safe Rust over the kernel's RDMA verbs (`ib_core`).
//!
//! Objects own what they are made from by reference count, so they go in the right order whatever the
//! order in which their users drop them. All of them must be gone when the device's
//! [`client::Client::remove`] returns: that is the one rule the types cannot check, and it is the
//! safety requirement of [`device::Device`].
//!
//! C header: `include/rdma/ib_verbs.h`

pub(crate) mod address;
pub(crate) mod client;
pub(crate) mod cq;
pub(crate) mod device;
pub(crate) mod dma;
pub(crate) mod mr;
pub(crate) mod pd;
pub(crate) mod qp;
pub(crate) mod work;

use kernel::prelude::*;

/// The name that the resource tracker (`rdma resource`) shows as the owner of our objects.
const RESTRACK_OWNER: &CStr = c"kite";
