// SPDX-License-Identifier: GPL-2.0

//! Receive side: processing of received messages, the poller thread with its clients, and waiters that
//! busy-poll in place of the thread.

mod busy_poll;
pub(crate) mod engine;
pub(crate) mod handler;
pub(crate) mod poll_client;
pub(crate) mod poller;
mod router;
pub(crate) mod wake;
