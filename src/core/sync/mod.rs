// SPDX-License-Identifier: GPL-2.0

//! Lock queues and barriers of a region, and fair admission to a resource.
pub mod barrier;
pub mod fairness;
pub mod lock;
pub mod ticket;
