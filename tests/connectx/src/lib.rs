// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Software ConnectX: RNICs for the stock mlx5 driver over vfio-user, and the network between them.
//!
//! A virtual machine accesses its device by [`vfio`]: configuration space ([`pci`]) and BAR 0 ([`bar`]). [`firmware`]
//! executes commands, which create objects ([`object`]). [`engine`] executes the work requests in guest memory after
//! doorbells. [`network`] delivers packets. [`fabric::Fabric`] runs all devices in one thread, and handles each event
//! completely before the next, so that runs are reproducible.

#![forbid(unsafe_code)]

pub mod bar;
pub mod cache;
pub mod control;
pub mod cost;
pub mod device;
pub mod doorbell;
pub mod engine;
pub mod fabric;
pub mod firmware;
pub mod interrupts;
mod layout;
pub mod memory;
pub mod network;
pub mod object;
pub mod pci;
mod random;
#[cfg(any(test, fuzzing))]
mod rig;
pub mod vfio;

#[cfg(any(test, fuzzing))]
pub use rig::fuzz;
