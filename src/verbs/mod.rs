// SPDX-License-Identifier: GPL-2.0

//! Safe wrappers of the kernel's RDMA verbs (`ib_core`).
//!
//! Objects hold references to the objects from which they were created. So they are destroyed in the right
//! order, whatever the order of the drops. All of them must be dropped before the device's
//! [`client::IbClient::remove`] returns. Types cannot check this rule. It is the safety requirement of
//! [`device::IbDevice`].
//!
//! C header: `include/rdma/ib_verbs.h`

pub(crate) mod address;
pub(crate) mod client;
pub(crate) mod cq;
pub(crate) mod device;
pub(crate) mod dma;
pub(crate) mod log;
pub(crate) mod mr;
pub(crate) mod pd;
pub(crate) mod qp;
pub(crate) mod work;

use kernel::prelude::*;

/// Owner of kite's objects, as shown by the resource tracker (`rdma resource`).
const RESTRACK_OWNER: &CStr = c"kite";
