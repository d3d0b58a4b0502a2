// SPDX-License-Identifier: GPL-2.0

//! Policies driven by measurements: rate control, promotion to RC, choice of transport.
pub mod promotion;
pub mod qos;
#[cfg(test)]
mod simulation;
pub mod transport;
