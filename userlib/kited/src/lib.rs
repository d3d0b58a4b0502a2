// SPDX-License-Identifier: GPL-2.0 OR MIT
//! kited: agrees with the other nodes on who is in the cluster, and tells the kernel.
//!
//! [`membership`] decides, as pure state machines that exchange [`protocol`] messages. [`node`]
//! puts such a machine between the network ([`wire`]) and the [`kernel`].

pub mod checkpoint;
pub mod fd_store;
pub mod host;
mod hosts;
pub mod kernel;
pub mod key;
mod links;
pub mod membership;
pub mod node;
pub mod protocol;
pub mod wire;
mod worker;
