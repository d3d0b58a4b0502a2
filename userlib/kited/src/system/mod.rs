// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The host on which the daemon runs: memory, watchdog, and access of users to verbs.

pub(crate) mod pressure;
pub(crate) mod uverbs;
