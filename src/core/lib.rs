// SPDX-License-Identifier: GPL-2.0

//! The logic of kite without I/O: names and rights, how a region is cut into chunks and spread over
//! nodes, who keeps a name, whose turn it is with a lock, and the formats that the kernels of a cluster
//! speak.
//!
//! The kernel module and the tests on the host are built from the same source. It uses `core` alone,
//! allocates nothing, and does not panic or overflow on any input, since most of it comes from
//! user space or from the fabric.
#![forbid(unsafe_code)]

pub mod atomic;
pub mod copy;
pub mod layout;
pub mod name;
pub mod name_hash;
pub mod policy;
pub mod proto;
pub mod queue;
pub mod rights;
pub mod ring;
pub mod sync;
pub mod view;
pub mod wire;
pub mod wrid;
