// SPDX-License-Identifier: GPL-2.0

//! Safe types over kernel services that the `kernel` crate does not wrap yet.
//!
//! Each file is one service, whose users need no `unsafe` for it.

pub(crate) mod bytes;
pub(crate) mod compat;
pub(crate) mod deadline;
pub(crate) mod event;
pub(crate) mod gate;
pub(crate) mod memory;
pub(crate) mod pages;
pub(crate) mod patience;
pub(crate) mod payer;
pub(crate) mod pin;
pub(crate) mod queue;
pub(crate) mod shared;
pub(crate) mod thread;
pub(crate) mod watch;
