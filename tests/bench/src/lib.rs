// SPDX-License-Identifier: GPL-2.0 OR MIT
//! What the programs of the benchmark share: numbers, and what they come to.

pub mod statistics;
