// SPDX-License-Identifier: GPL-2.0

//! The receive side: the poller thread, what it polls, and waiters that poll in its place.
pub(crate) mod busy_poll;
pub(crate) mod poller;
pub(crate) mod wake;
