// SPDX-License-Identifier: GPL-2.0

//! Safe types over kernel services that the `kernel` crate does not wrap.
//!
//! Each file covers one service, and its users need no `unsafe` code. The header of a file names the missing
//! abstraction. Once the `kernel` crate has the abstraction, the file can be removed.

pub(crate) mod adaptive_spin;
mod atomic;
pub(crate) mod buffer;
pub(crate) mod bytes;
pub(crate) mod compat;
pub(crate) mod completion;
pub(crate) mod crypto;
pub(crate) mod deadline;
pub(crate) mod event_counter;
pub(crate) mod memcg;
pub(crate) mod pages;
pub(crate) mod pin;
pub(crate) mod revocable;
pub(crate) mod ring_memory;
pub(crate) mod thread;
pub(crate) mod workqueue;
