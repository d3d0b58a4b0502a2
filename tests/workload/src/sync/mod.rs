// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Programs that synchronize by a region: atomic operations, locks and barriers.

pub(crate) mod atomics;
pub(crate) mod locks;
