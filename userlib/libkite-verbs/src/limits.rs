// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Limits of the device.

use std::ffi::c_int;

use kite::VQPS_MAX;

/// Maximum QPs of a device. Each has a listener, a virtual QP to send, and a virtual QP to receive.
pub(crate) const MAX_QPS: usize = VQPS_MAX / 3;

/// Maximum posted receives of a QP.
pub(crate) const MAX_RECV_WR: usize = 1 << 14;

/// Maximum SGEs of a request.
pub(crate) const MAX_SGE: u32 = 16;

/// Maximum completions of a CQ.
pub(crate) const MAX_CQE: usize = 1 << 14;

/// Number of the only port, which has one GID and one P_Key. Ports are counted from 1.
pub(crate) const PORT_NUM: u8 = 1;

/// Reads and atomic operations in flight on a QP. kite has no limit; this one is usual for RNICs.
pub(crate) const MAX_RD_ATOMIC: c_int = 16;
