// SPDX-License-Identifier: GPL-2.0

//! Safe types over kernel services that the `kernel` crate does not wrap yet.
//!
//! Each file is one service, whose users need no `unsafe` for it.

pub(crate) mod adaptive_spin;
pub(crate) mod buffer;
pub(crate) mod bytes;
pub(crate) mod compat;
pub(crate) mod completion;
pub(crate) mod deadline;
pub(crate) mod event_counter;
pub(crate) mod memcg;
pub(crate) mod pages;
pub(crate) mod pin;
pub(crate) mod revocable;
pub(crate) mod ring_memory;
pub(crate) mod thread;
pub(crate) mod workqueue;
