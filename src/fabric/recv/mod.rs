// SPDX-License-Identifier: GPL-2.0

//! Receive side: the poller thread, its clients, and waiters that busy-poll in place of the thread.
pub(crate) mod busy_poll;
pub(crate) mod poller;
pub(crate) mod wake;
