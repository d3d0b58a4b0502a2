// SPDX-License-Identifier: GPL-2.0 OR MIT
//! kited: agrees with the other nodes on the members of the cluster, and sets the view of the kernel.
//!
//! [`membership`] decides, in pure state machines that exchange [`protocol`] messages. [`node`] connects such a machine
//! with the network ([`wire`]) and the [`kernel`].

pub mod checkpoint;
mod control;
pub mod fd_store;
pub mod host;
pub mod hosts_file;
pub mod kernel;
pub mod key;
mod links;
pub mod membership;
pub mod node;
pub mod protocol;
pub mod state_file;
pub mod store;
pub mod wire;
mod worker;
