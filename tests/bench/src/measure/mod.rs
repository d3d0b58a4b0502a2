// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Measurements that are no [cells](crate::cell): series over sizes, nodes or time.

pub(crate) mod alloc_scaling;
pub(crate) mod lookup;
pub(crate) mod mesh;
pub(crate) mod node_memory;
pub(crate) mod rings;
pub(crate) mod scale;
pub(crate) mod scatter;
pub(crate) mod sharing;
