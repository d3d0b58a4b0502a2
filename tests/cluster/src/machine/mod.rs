// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Virtual machines: kernels, firmware, root file systems, QEMU processes and their files.

pub(crate) mod accel;
pub(crate) mod firmware;
pub(crate) mod guarded;
pub(crate) mod hosts;
pub(crate) mod image;
pub(crate) mod kernel;
pub(crate) mod qemu;
pub(crate) mod qmp;
pub(crate) mod snapshot;
pub(crate) mod workdir;
