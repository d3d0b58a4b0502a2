// SPDX-License-Identifier: GPL-2.0 OR MIT
//! A software ConnectX: an RNIC that the stock mlx5 driver drives over vfio-user, and the network between
//! several of them.
//!
//! A virtual machine speaks to its device through [`vfio`], and sees [`pci`] and [`bar`]. Commands come in
//! through [`firmware`] and make objects ([`object`]); doorbells make [`engine`] carry out the work
//! requests in guest memory, whose packets [`network`] delivers. A [`fabric::Fabric`] has all devices and
//! runs them in one thread, each event to its end, so that a run can be repeated.

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
