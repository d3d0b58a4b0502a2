// SPDX-License-Identifier: GPL-2.0

//! Locks and barriers of a region, and fair admission.
pub mod barrier;
pub mod fairness;
pub mod lock;
pub mod ticket;
