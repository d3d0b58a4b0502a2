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
pub mod barrier;
pub mod conn;
pub mod copy;
pub mod directory;
pub mod layout;
pub mod ledger;
pub mod lock;
pub mod name;
pub mod once;
pub mod path;
pub mod promotion;
pub mod qos;
pub mod queue;
pub mod rights;
pub mod ring;
#[cfg(test)]
mod simulation;
pub mod ticket;
pub mod turns;
pub mod view;
pub mod window;
pub mod wire;
pub mod word;
pub mod wrid;
