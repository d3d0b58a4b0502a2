// SPDX-License-Identifier: GPL-2.0

//! The logic of kite without I/O: the protocol state machines, policies, and wire formats.
//!
//! The crate covers region names and rights, the striping of a region over nodes, and the ownership of names.
//! The remaining modules are lock queues, rings, connections, and the message formats between kernels.
//!
//! The kernel module and the host tests compile the same source. The crate depends on `core` only and does
//! not allocate. No input may cause a panic or an overflow, since most input comes from user space or the
//! fabric.
//!
//! # Locking
//!
//! The crate has no locks and no atomics. A method with `&mut self` relies on the lock of the caller. No
//! function sleeps.
#![forbid(unsafe_code)]

pub mod atomic;
pub mod copy;
pub mod layout;
pub mod name;
pub mod name_hash;
pub mod policy;
pub mod proto;
pub mod queue;
pub mod retired_keys;
pub mod rights;
pub mod ring;
pub mod sync;
pub mod view;
pub mod wire;
pub mod wrid;
