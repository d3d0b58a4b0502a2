// SPDX-License-Identifier: GPL-2.0 OR MIT
//! RPC: `client` makes calls and sends messages, `multicast` makes one call to many servers, `server` receives and
//! replies.

mod client;
mod multicast;
mod server;

pub use server::{IncomingRpc, PendingCall, ServeOptions, Service};
