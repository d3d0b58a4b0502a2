// SPDX-License-Identifier: GPL-2.0 OR MIT
//! State that outlives a process of the daemon: its checkpoint in memory, the descriptors that a service manager
//! stores, and the file of a seed.

pub mod checkpoint;
pub mod fd_store;
pub mod state_file;
