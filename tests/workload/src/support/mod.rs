// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Modules that several subcommands use.

pub(crate) mod abi;
pub(crate) mod io_queue;
pub(crate) mod random;
pub(crate) mod signals;
pub(crate) mod threads;
