// SPDX-License-Identifier: GPL-2.0

//! Calls whose data the receiver reads from the sender's memory.
pub(crate) mod mapping_cache;
pub(crate) mod queue;
