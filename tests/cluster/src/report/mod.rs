// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Reports of a node's kernel: console log, faults, memory leaks.

pub(crate) mod console;
pub(crate) mod faults;
pub(crate) mod leaks;
