// SPDX-License-Identifier: GPL-2.0

//! Reliable control requests to peers, and work that is deferred for them.
//!
//! The services above send requests with [`client::ControlClient`], which retries a request until its outcome
//! is final. The fabric below sends one message and matches one reply ([`crate::fabric::control`]). The
//! formats are in `kite_core::wire`, and `src/rnic/control_dispatch.rs` dispatches received requests.
//! `CONTRIBUTING.md` lists the places of a new control message.

pub(crate) mod client;
pub(crate) mod priority;
pub(crate) mod reply;
pub(crate) mod reply_code;
pub(crate) mod retry;
pub(crate) mod workqueues;
