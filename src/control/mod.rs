// SPDX-License-Identifier: GPL-2.0

//! Reliable control requests to peers, and work that is deferred for them.
//!
//! The services above send requests with [`client::ControlClient`], which repeats a request until its outcome
//! is final. The fabric below sends one message and matches one reply ([`crate::fabric::control`]).

pub(crate) mod client;
pub(crate) mod priority;
pub(crate) mod reply;
pub(crate) mod reply_code;
pub(crate) mod retry;
pub(crate) mod workqueues;
