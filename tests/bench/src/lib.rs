// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Statistics that the programs of the benchmark share.

pub mod statistics;
