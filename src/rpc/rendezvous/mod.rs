// SPDX-License-Identifier: GPL-2.0

//! Rendezvous: transfer of data that do not fit into a ring message. The server reads them from, and writes
//! long replies to, memory of the caller's node.

pub(crate) mod call;
pub(crate) mod mapping_cache;
pub(crate) mod queue;
