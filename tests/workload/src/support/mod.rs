// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Modules that several programs share.

pub(crate) mod abi;
pub(crate) mod mapped;
pub(crate) mod random;
pub(crate) mod signals;
pub(crate) mod threads;
